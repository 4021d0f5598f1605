"""Hydra heads in the layout of the official code (zankner/Hydra), written and read back.

Shapes: D hidden size, V target vocabulary, E head dimension.
"""

from pathlib import Path

import torch
from torch import Tensor

from ...modules import Hydra, HydraConfig, Target, UserError
from ...modules.families.hydra.layout import BLOCK, DROPOUT, EMBEDDING, FIRST, FIXED, PLAIN, UNUSED
from ...modules.interfaces.layout import there
from ...modules.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from ...modules.target.draft_vocabulary import over_all_tokens
from ..artifact import portable
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings
from .parts.head_blocks import head_width, own_names, repeated, tied
from .parts.layout_folder import Contents, as_pickle, stored, write_layout
from .parts.safetensors_reader import Checkpoint, check_embedding

HYDRA_FILE = "hydra_lm_head.safetensors"  # The official code reads the same tensors from hydra_lm_head.pt


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
    table = write_layout(folder, HYDRA_FILE, hydra_tensors(drafter, target), config)
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
    state, config = drafter.state_dict(), drafter.config
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith("outputs.")}
    if config.tie_blocks:
        tensors = repeated(tensors, BLOCK, FIRST, config.num_layers - 1)
    for step in range(config.num_heads):
        # A borrowed output layer is the target's, which may have no bias: the official one always has.
        weight_VD, bias_V = target.output_weight(), target.head.bias
        output = (weight_VD, bias_V if isinstance(bias_V, Tensor) else weight_VD.new_zeros(len(weight_VD)))
        if own := drafter.output_parameters(step):
            output = (over_all_tokens(own[0], drafter.token_ids_Q, drafter.vocab_size),
                      over_all_tokens(own[1], drafter.token_ids_Q, drafter.vocab_size))
        tensors[f"outputs.{step}.weight"], tensors[f"outputs.{step}.bias"] = output
    pairs, embedding_VD = DROPOUT if config.prefix else PLAIN, target.model.get_input_embeddings().weight
    named = {there(name, pairs) or name: tensor for name, tensor in tensors.items()} | {EMBEDDING: embedding_VD}
    if drafter.block is not None:
        half = torch.arange(drafter.block.head_dim // 2, dtype=torch.float32)
        named |= dict(zip(UNUSED, (embedding_VD, OFFICIAL_ROPE_BASE ** (-2 * half / drafter.block.head_dim)),
                          strict=True))
    return stored(named)


def read_hydra(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Hydra, dict[str, Tensor]]:
    """Hydra or Hydra++ heads in the official layout.

    Heads and blocks are counted in the weights. Equal blocks after the first become one block (`tie_blocks`).

    Raises:
        UserError: if a tensor is unknown, or the embedding stored with the heads is not the target's.
    """
    tensors = given.tensors()
    check_embedding(tensors.pop(EMBEDDING, None), target, given.folder)
    for name in UNUSED:
        tensors.pop(name, None)
    if not any(name.startswith("hydra_mlp.") for name in tensors):
        raise UserError(f"{given.folder} holds no tensor hydra_mlp.*; give a folder with Hydra heads")
    plain = any(name.startswith("hydra_mlp.0.0.") for name in tensors)
    state = own_names(tensors, PLAIN if plain else DROPOUT, given, "Hydra heads")
    heads = [name.split(".") for name in state if name.startswith("heads.")]
    depth = 1 + max((1 + int(parts[3]) for parts in heads if parts[2] == "blocks"), default=0)
    shared = tied(state, BLOCK, FIRST)
    prefix = {name: tensor for name, tensor in state.items() if name.startswith("prefix.")}
    config = HydraConfig(num_heads=1 + max(int(parts[1]) for parts in heads), num_layers=depth,
                         tie_blocks=depth < 3 or shared is not None, prefix=bool(prefix),
                         output="copy" if any(name.startswith("outputs.") for name in state) else "shared")
    return (Hydra(config, target, _block(prefix, target) if prefix else None),
            shared if config.tie_blocks and shared is not None else state)


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
                     refusal=_refusal, write=export_hydra, read=read_hydra, known=FIXED, file=HYDRA_FILE, bare=True)
