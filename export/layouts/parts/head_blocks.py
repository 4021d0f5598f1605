"""Blocks and output layers of heads, as the layouts of Medusa and Hydra store them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....modules import Medusa, Target
from ....modules.drafters.parts.decoder_block import BlockConfig

Blocks = Mapping[tuple[int, int, str], Tensor]
"""Tensors by head, block and name within the block."""


def output_bias(target: Target) -> str:
    """The refusal of a target whose output layer has a bias, for which the layouts of Medusa, EAGLE and Kangaroo have
    no place: engines take its matrix alone. Empty for any other."""
    return "" if getattr(target.head, "bias", None) is None else (
        f"the output layer of {target.identity.name} has a bias, for which the layout has no place; decode the "
        "artifact with draftsmith")


def head_width(block: BlockConfig) -> str:
    """The refusal of a layer whose heads are not as wide as the official code computes, which reads no key for it;
    empty for any other."""
    return "" if block.num_heads * block.head_dim == block.hidden_size else (
        f"the official code has heads of {block.hidden_size} / {block.num_heads} elements, this drafter of "
        f"{block.head_dim}; decode it with draftsmith")


def medusa_blocks(drafter: Medusa) -> Blocks:
    """The residual blocks of Medusa heads, a tied block as often as it is applied: the layouts know no other form."""
    config = drafter.config
    return {(head, layer, part): tensor
            for head, blocks in enumerate(drafter.heads) for layer in range(config.num_layers)
            for part, tensor in [*blocks.children()][0 if config.tie_blocks else layer].state_dict().items()}


def tied(blocks: Blocks, first: int) -> bool:
    """True if in every head all blocks after block `first` equal it."""
    # Independent training never leaves two blocks equal, so that equal ones were one.
    pairs = [(blocks.get((head, first, part)), tensor) for (head, block, part), tensor in blocks.items()
             if block > first]
    return all(shared is not None and torch.equal(shared, tensor) for shared, tensor in pairs)
