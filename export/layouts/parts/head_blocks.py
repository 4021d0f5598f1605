"""Blocks and output layers of heads, as the layouts of Medusa and Hydra store them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....modules import Target, UserError
from ....modules.interfaces.layout import Pairs, here
from ....modules.parts.decoder_block import BlockConfig
from .safetensors_reader import Checkpoint


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


def repeated(state: Mapping[str, Tensor], later: str, first: str, count: int) -> dict[str, Tensor]:
    """The tensors of heads with a tied block, whose names start with `first`, as often as it is applied, which layouts
    call `later`."""
    return {again: tensor for name, tensor in state.items() for layer in range(max(1, count))
            if (again := here(name, ((first, later),), l=layer) or name)}


def tied(state: Mapping[str, Tensor], later: str, first: str) -> dict[str, Tensor] | None:
    """The same the other way around: without the blocks that equal the first one; None where one of them does not."""
    # Independent training never leaves two blocks equal, so that equal ones were one.
    firsts = {name: here(name, ((later, first),)) or name for name in state}
    equal = all(one in state and torch.equal(state[one], state[name]) for name, one in firsts.items())
    return {name: state[name] for name in firsts.values()} if equal else None


def own_names(tensors: Mapping[str, Tensor], pairs: Pairs, given: Checkpoint, content: str) -> dict[str, Tensor]:
    """A checkpoint's tensors by their names here. Raises UserError for one of another name."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (own := here(name, pairs)) is None:
            raise UserError(f"{given.folder} holds {name!r}, no tensor of {content}; give a folder with only the "
                            "heads, or choose another --format")
        found[own] = tensor
    return found
