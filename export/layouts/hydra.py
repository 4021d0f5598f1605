"""Hydra heads in the layout of the official code (zankner/Hydra), written and read back.

Block l of head h is `hydra_mlp.{h}.{l}`, its output layer `hydra_lm_head.{h}`. With a prefix layer (Hydra++) dropout
modules take every second slot: `hydra_mlp.{h}.{2 l + 1}` and `hydra_lm_head.{h}.1`, and `prefix_embeding_layer` (sic)
is added. The blocks after the first are copies of one block. Head h at position p predicts token p + 2 + h.

Shapes: D hidden size, V target vocabulary, E head dimension.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...modules import Hydra, HydraConfig, Target, UserError
from ...modules.drafters.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from ...modules.target.draft_vocabulary import over_all_tokens
from ..artifact import portable
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings
from .parts.head_blocks import head_width, tied
from .parts.layout_folder import Contents, as_pickle, stored, write_layout
from .parts.safetensors_reader import Checkpoint, check_embedding
from .parts.tensor_table import Table, TensorForm, layer_table

HYDRA_FILE = "hydra_lm_head.safetensors"
"""The official code reads the same tensors from hydra_lm_head.pt."""
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
_PREFIX = "prefix_embeding_layer"
_EMBEDDING = "input_embed_fn.weight"
_UNUSED = (f"{_PREFIX}.embed_tokens.weight", f"{_PREFIX}.layers.0.self_attn.rotary_emb.inv_freq")
"""Stored by the official code, and not read by it."""
_KNOWN: dict[str, tuple[Any, ...]] = {"hidden_state_offset": (0,), "grounded_heads": (True,)}
"""Heads that read the final state and the true tokens: the weights do not show which ones they were trained on."""


def export_hydra(drafter: Hydra, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Hydra heads as the official code stores them.

    An output layer of all heads is written once for each. A reduced draft vocabulary becomes the whole one: of own
    layers, the other tokens get rows that never win (`over_all_tokens`).
    """
    config = {
        "base_model_name_or_path": portable(target.identity.name),
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "prefix-mlp" if drafter.config.prefix else "mlp",
        "hydra_num_heads": drafter.config.num_heads,
        "hydra_num_layers": drafter.config.num_layers,
    }
    table = _table(drafter)
    write_layout(folder, HYDRA_FILE, hydra_tensors(drafter, target), table, config)
    return Contents(title="Hydra heads", table=table,
                    example=as_pickle("zankner/Hydra", HYDRA_FILE, "hydra_lm_head.pt"))


def _refusal(drafter: Hydra, target: Target) -> str:
    """The refusal of heads whose later blocks differ, or of a prefix layer whose attention is not the official code's;
    empty for any other."""
    if drafter.config.tie_blocks or drafter.config.num_layers <= 2:
        return "" if drafter.block is None else head_width(drafter.block)
    return (
        f"the layout holds one block after the first, applied repeatedly; these heads have "
        f"{drafter.config.num_layers - 1}: train with tie_blocks: true")


def hydra_tensors(drafter: Hydra, target: Target) -> dict[str, Tensor]:
    """The heads under their official names, in float32 on the CPU, each tensor with memory of its own."""
    embedding_VD = target.model.get_input_embeddings().weight
    tensors: dict[str, Tensor] = {_EMBEDDING: embedding_VD}
    for step, head in drafter.steps():
        for layer in range(drafter.config.num_layers):
            block = head.first if layer == 0 else head.blocks[0]
            for name, tensor in block.state_dict().items():
                tensors[f"hydra_mlp.{step}.{_slot(drafter.config, layer)}.{name}"] = tensor
        slot = f"hydra_lm_head.{step}.{'1.' if drafter.config.prefix else ''}"
        # A borrowed output layer is the target's, which may have no bias: the official one always has.
        weight_VD, bias_V = target.output_weight(), target.head.bias
        output = (weight_VD, bias_V if isinstance(bias_V, Tensor) else weight_VD.new_zeros(len(weight_VD)))
        if own := drafter.output_parameters(step):
            output = (over_all_tokens(own[0], drafter.token_ids_Q, drafter.vocab_size),
                      over_all_tokens(own[1], drafter.token_ids_Q, drafter.vocab_size))
        tensors[f"{slot}weight"], tensors[f"{slot}bias"] = output
    if drafter.prefix is not None and drafter.block is not None:
        for name, tensor in drafter.prefix.state_dict().items():
            tensors[f"{_PREFIX}.{name.replace('block.', 'layers.0.', 1)}"] = tensor
        half = torch.arange(drafter.block.head_dim // 2, dtype=torch.float32)
        tensors |= dict(zip(_UNUSED, (embedding_VD, OFFICIAL_ROPE_BASE ** (-2 * half / drafter.block.head_dim)),
                            strict=True))
    return stored(tensors)


def _table(drafter: Hydra) -> Table:
    """The tensors of the heads."""
    width, tokens, config = drafter.hidden_size, drafter.vocab_size, drafter.config
    table = {_EMBEDDING: TensorForm((tokens, width))}
    for head in range(config.num_heads):
        first = f"hydra_mlp.{head}.{_slot(config, 0)}"
        forms = {"weight": (width, width * (head + 2)), "bias": (width,)}
        table |= {f"{first}.{layer}.{part}": TensorForm(form) for layer in ("linear", "res_connection")
                  for part, form in forms.items()}
        for layer in range(1, config.num_layers):
            block = f"hydra_mlp.{head}.{_slot(config, layer)}.linear"
            table |= {f"{block}.weight": TensorForm((width, width)), f"{block}.bias": TensorForm((width,))}
        output = f"hydra_lm_head.{head}{'.1' if config.prefix else ''}"
        table |= {f"{output}.weight": TensorForm((tokens, width)), f"{output}.bias": TensorForm((tokens,))}
    if drafter.block is not None:
        table |= layer_table(f"{_PREFIX}.layers.0.", drafter.block,
                             norms=("input_layernorm", "post_attention_layernorm"))
        table |= {f"{_PREFIX}.norm.weight": TensorForm((width,)), _UNUSED[0]: TensorForm((tokens, width)),
                  _UNUSED[1]: TensorForm((drafter.block.head_dim // 2,))}
    return table


def _slot(config: HydraConfig, layer: int) -> int:
    # Dropout modules before each layer take a number, too.
    return 2 * layer + 1 if config.prefix else layer


def read_hydra(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Hydra, dict[str, Tensor]]:
    """Hydra or Hydra++ heads in the official layout.

    Heads and blocks are counted in the weights. Equal blocks after the first become one block (`tie_blocks`).

    Raises:
        UserError: if a tensor is unknown, or the embedding stored with the heads is not the target's.
    """
    tensors, folder = given.tensors(), given.folder
    check_embedding(tensors.pop(_EMBEDDING, None), target, folder)
    for name in _UNUSED:
        tensors.pop(name, None)
    outputs, prefix, blocks = _own_names(tensors, folder)
    depth = 1 + max(layer for _, layer, _ in blocks)
    shared = depth < 3 or tied(blocks, first=1)
    state = {f"heads.{head}.first.{part}" if layer == 0 else f"heads.{head}.blocks.{layer - 1}.{part}": tensor
             for (head, layer, part), tensor in blocks.items() if layer < 2 or not shared}
    config = HydraConfig(num_heads=1 + max(head for head, _, _ in blocks), num_layers=depth, tie_blocks=shared,
                         prefix=bool(prefix), output="copy" if outputs else "shared")
    return Hydra(config, target, _block(prefix, target) if prefix else None), outputs | state | prefix


def _own_names(
    tensors: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[tuple[int, int, str], Tensor]]:
    """(output layers and prefix layer by their names in `Hydra`; blocks by head, layer and name within the block)."""
    outputs: dict[str, Tensor] = {}
    prefix: dict[str, Tensor] = {}
    slots: dict[tuple[int, int, str], Tensor] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            slots[int(match[1]), int(match[2]), match[3]] = tensor
        elif match := _OUTPUT.fullmatch(name):
            outputs[f"outputs.{match[1]}.{match[2]}"] = tensor
        elif name.startswith(f"{_PREFIX}."):
            prefix[name.replace(_PREFIX, "prefix", 1).replace("layers.0.", "block.", 1)] = tensor
        else:
            raise UserError(f"{folder} holds {name!r}, no tensor of Hydra heads; give a folder with only the "
                            "heads, or choose another --format")
    if not slots:
        raise UserError(f"{folder} holds no tensor hydra_mlp.*; give a folder with Hydra heads")
    # Dropout modules take slots, too: the layers are counted by the slots that hold tensors.
    used = {head: sorted({slot for other, slot, _ in slots if other == head}) for head, _, _ in slots}
    blocks = {(head, used[head].index(slot), part): tensor for (head, slot, part), tensor in slots.items()}
    return outputs, prefix, blocks


def _block(prefix: dict[str, Tensor], target: Target) -> BlockConfig:
    """The shape of the prefix layer, read from its tensors, with as many attention heads as the target has."""
    like = BlockConfig.like(target)
    sizes = {name: prefix[f"prefix.block.{name}.weight"].shape[0] for name in
             ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj") if f"prefix.block.{name}.weight" in prefix}
    if len(sizes) < 3:
        return like
    queries, keys, width = sizes.values()
    head_dim = max(2, queries // like.num_heads)
    return BlockConfig(hidden_size=like.hidden_size, intermediate_size=width, num_heads=like.num_heads,
                       num_kv_heads=max(1, keys // head_dim), head_dim=head_dim, norm_eps=like.norm_eps)


HYDRA = ExportFormat(name="hydra", content="Hydra heads", readers={"the official code": ""}, families=(Hydra,),
                     refusal=_refusal, write=export_hydra, read=read_hydra, known=_KNOWN, file=HYDRA_FILE, bare=True)
