"""Hydra heads in the layout of the official code (zankner/Hydra), written and read back.

Block l of head h is `hydra_mlp.{h}.{l}`, its output layer `hydra_lm_head.{h}`. With a prefix layer (Hydra++) dropout
modules take every second slot: `hydra_mlp.{h}.{2 l + 1}` and `hydra_lm_head.{h}.1`, beside `prefix_embeding_layer`
(sic). The blocks behind the first are one block stored again and again. Head h at position p predicts token p + 2 + h.

Shapes: D hidden size, V target vocabulary, E head dimension.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...modules import Drafter, Hydra, HydraConfig, Target, UserError
from ...modules.atomic_files import whole_folder, write_file
from ...modules.drafters.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from ..artifact import portable
from .safetensors_reader import check_embedding, read_tensors

HYDRA_FILE = "hydra_lm_head.safetensors"
"""The official code reads the same tensors from hydra_lm_head.pt."""
_OWNED = frozenset({"config.json", HYDRA_FILE, "README.md"})
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
_PREFIX = "prefix_embeding_layer"
_EMBEDDING = "input_embed_fn.weight"
_UNUSED = (f"{_PREFIX}.embed_tokens.weight", f"{_PREFIX}.layers.0.self_attn.rotary_emb.inv_freq")
"""Stored by the official code, and not read by it."""


def export_hydra(drafter: Drafter, target: Target, out: Path) -> None:
    """Write Hydra heads as the official code stores them.

    A shared output layer is written out once for each head, and a reduced draft vocabulary with it becomes the whole.

    Raises:
        UserError: if the drafter is no Hydra, its own output layer is reduced, or its deeper blocks differ.
    """
    if not isinstance(drafter, Hydra):
        raise UserError(f"the format hydra holds Hydra heads, this artifact is {drafter.family}; export that family "
                        "in its own format")
    if drafter.config.output == "copy" and drafter.token_ids_Q is not None:
        raise UserError(f"these heads have own output layers over {drafter.config.vocabulary_size} tokens; the layout "
                        "needs a row for every token: train with output: shared, or with vocabulary_size: null")
    if not drafter.config.tie_blocks and drafter.config.num_layers > 2:
        raise UserError(f"the layout holds one block behind the first, passed again and again; these heads have "
                        f"{drafter.config.num_layers - 1}: train with tie_blocks: true")
    with whole_folder(out, _OWNED) as partial:
        save_file(hydra_tensors(drafter, target), partial / HYDRA_FILE, metadata={"format": "pt"})
        write_file(partial / "config.json", json.dumps(_config(drafter, target), indent=2) + "\n")
        write_file(partial / "README.md", _readme(drafter, target))


def hydra_tensors(drafter: Hydra, target: Target) -> dict[str, Tensor]:
    """The heads under their official names, in float32 on the CPU, each tensor with memory of its own."""
    embedding_VD = target.model.get_input_embeddings().weight
    tensors: dict[str, Tensor] = {_EMBEDDING: embedding_VD}
    for step, head in drafter.steps():
        for layer in range(drafter.config.num_layers):
            block = head.first if layer == 0 else head.blocks[0]
            for name, tensor in block.state_dict().items():
                tensors[f"hydra_mlp.{step}.{_slot(drafter.config, layer)}.{name}"] = tensor
        for name, tensor in _output(drafter, target, step).items():
            tensors[f"hydra_lm_head.{step}.{'1.' if drafter.config.prefix else ''}{name}"] = tensor
    if drafter.prefix is not None and drafter.block is not None:
        for name, tensor in drafter.prefix.state_dict().items():
            tensors[f"{_PREFIX}.{name.replace('block.', 'layers.0.', 1)}"] = tensor
        half = torch.arange(drafter.block.head_dim // 2, dtype=torch.float32)
        tensors |= dict(zip(_UNUSED, (embedding_VD, OFFICIAL_ROPE_BASE ** (-2 * half / drafter.block.head_dim)),
                            strict=True))
    return {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}


def _slot(config: HydraConfig, layer: int) -> int:
    return 2 * layer + 1 if config.prefix else layer


def _output(drafter: Hydra, target: Target, step: int) -> dict[str, Tensor]:
    own = drafter.output_parameters(step)
    if own:
        return {"weight": own[0], "bias": own[1]}
    weight_VD, bias_V = target.output_weight(), target.head.bias
    return {"weight": weight_VD, "bias": bias_V if isinstance(bias_V, Tensor) else weight_VD.new_zeros(len(weight_VD))}


def import_hydra(folder: Path, target: Target) -> Hydra:
    """Read Hydra or Hydra++ heads in the official layout (safetensors only) and bind them to `target`.

    Heads and blocks are counted in the weights. Blocks behind the first that are equal are one block here, too.

    Raises:
        UserError: if there is no safetensors file, a tensor is missing, unknown or of another shape, the embedding
            stored with the heads is not the target's, or the heads read another state than the last.
    """
    tensors = read_tensors(folder, HYDRA_FILE)
    _check_config(folder)
    check_embedding(tensors.pop(_EMBEDDING, None), target, folder)
    for name in _UNUSED:
        tensors.pop(name, None)
    state, prefix, slots = _own_names(tensors, folder)
    layers = {head: sorted({slot for place, slot, _ in slots if place == head}) for head, _, _ in slots}
    depth = max(map(len, layers.values()), default=0)
    tied = depth < 3 or _tied(slots, layers)
    for (head, slot, part), tensor in slots.items():
        layer = layers[head].index(slot)
        if layer == 0 or not tied or layer == 1:
            state[f"heads.{head}.first.{part}" if layer == 0 else f"heads.{head}.blocks.{layer - 1}.{part}"] = tensor
    own = any(name.startswith("outputs.") for name in state)
    config = HydraConfig(num_heads=max(layers, default=0) + 1, num_layers=max(depth, 1), tie_blocks=tied,
                         prefix=bool(prefix), output="copy" if own else "shared")
    drafter = Hydra(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
                    block=_block(prefix, target) if prefix else None)
    try:
        drafter.load_state_dict(state | prefix)
    except RuntimeError as error:
        raise UserError(f"the Hydra heads in {folder} do not fit {target.identity.name} (width {target.hidden_size}, "
                        f"{target.vocab_size} tokens): {' '.join(str(error).split())}") from error
    drafter.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))
    drafter.bind(target)
    return drafter.eval()


def _own_names(
    tensors: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[tuple[int, int, str], Tensor]]:
    """(output layers and (prefix layer) under their names here, blocks by head, slot and part)."""
    outputs: dict[str, Tensor] = {}
    prefix: dict[str, Tensor] = {}
    blocks: dict[tuple[int, int, str], Tensor] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            blocks[int(match[1]), int(match[2]), match[3]] = tensor
        elif match := _OUTPUT.fullmatch(name):
            outputs[f"outputs.{match[1]}.{match[2]}"] = tensor
        elif name.startswith(f"{_PREFIX}."):
            prefix[name.replace(_PREFIX, "prefix", 1).replace("layers.0.", "block.", 1)] = tensor
        else:
            raise UserError(f"{folder} holds {name!r}, no tensor of Hydra heads; give a folder with heads alone")
    if not blocks:
        raise UserError(f"{folder} holds no tensor hydra_mlp.*; give a folder with Hydra heads")
    return outputs, prefix, blocks


def _tied(slots: dict[tuple[int, int, str], Tensor], layers: dict[int, list[int]]) -> bool:
    """Whether the blocks behind the first are equal in every head; independent training never leaves them so."""
    pairs = [(slots.get((head, layers[head][1], part)), tensor) for (head, slot, part), tensor in slots.items()
             if slot in layers[head][2:]]
    return all(first is not None and torch.equal(first, tensor) for first, tensor in pairs)


def _block(prefix: dict[str, Tensor], target: Target) -> BlockConfig:
    """The shape of the prefix layer: its tensors', with as many heads as the target has."""
    like = BlockConfig.like(target)
    sizes = {name: prefix[f"prefix.block.{name}.weight"].shape[0] for name in
             ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj") if f"prefix.block.{name}.weight" in prefix}
    if len(sizes) < 3:
        return like
    queries, keys, width = sizes.values()
    head_dim = max(2, queries // like.num_heads)
    return BlockConfig(hidden_size=like.hidden_size, intermediate_size=width, num_heads=like.num_heads,
                       num_kv_heads=max(1, keys // head_dim), head_dim=head_dim, norm_eps=like.norm_eps)


def _check_config(folder: Path) -> None:
    """Heads may have been trained on the state of another layer; the weights do not say so."""
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); copy it again, or leave it out") from error
    for key, known in (("hidden_state_offset", 0), ("grounded_heads", True)):
        if config.get(key, known) != known:
            raise UserError(f"{path} says {key}: {config[key]}; only heads with {key}: {json.dumps(known)}, which read "
                            "the final state and the true tokens, can be imported")


def _config(drafter: Hydra, target: Target) -> dict[str, Any]:
    return {
        "base_model_name_or_path": portable(target.identity.name),
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "prefix-mlp" if drafter.config.prefix else "mlp",
        "hydra_num_heads": drafter.config.num_heads,
        "hydra_num_layers": drafter.config.num_layers,
    }


def _readme(drafter: Hydra, target: Target) -> str:
    return (
        f"# Hydra heads for {portable(target.identity.name)}\n\n"
        f"{drafter.config.num_heads} heads in the layout of zankner/Hydra, which reads a pickle:\n\n"
        "```python\nimport torch\nfrom safetensors.torch import load_file\n\n"
        f'torch.save(load_file("{HYDRA_FILE}"), "hydra_lm_head.pt")\n```\n\n'
        "The tree of the artifact is not part of the layout.\n"
    )
