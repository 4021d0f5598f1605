"""Tables of the tensors of a layout, by name, shape and number format: engines pass over a missing or unknown tensor.

A table is made from the drafter's settings alone, never from its tensors, so that the two can be compared.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ....modules.drafters.parts.decoder_block import BlockConfig

_NUMBER = re.compile(r"\d+")
_NAMED = 5
"""Number of wrong tensors that an error names."""


class TensorForm(NamedTuple):
    """Shape and number format of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


Table = Mapping[str, TensorForm]
"""The tensors of a file, by name."""


def require_table(tensors: Mapping[str, Tensor], table: Table) -> None:
    """Compare the tensors that are about to be written with the table of their layout.

    Raises:
        ValueError: if one is missing, unknown, or of another shape or number format.
    """
    require_forms(forms_of(tensors), table)


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorForm]:
    """Shapes and number formats of tensors."""
    return {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def require_forms(found: Table, table: Table) -> None:
    """The same for tensors whose shapes and number formats alone are at hand. Raises ValueError."""
    # An engine passes over an unknown tensor and leaves a missing one at random, so that both must be found here.
    if found != table:
        wrong = sorted(name for name in table.keys() | found.keys() if table.get(name) != found.get(name))
        raise ValueError(f"the export would hold wrong tensors: {', '.join(wrong[:_NAMED])}")


def layer_table(prefix: str, block: BlockConfig, *, norms: Iterable[str], read: int | None = None) -> Table:
    """Tensors of a Llama layer.

    Args:
        prefix: start of their names, with its last dot.
        block: the shape of the layer.
        norms: names of its norms.
        read: width of the attention's input; None for the layer's own.
    """
    width, inner = block.hidden_size, block.intermediate_size
    return {**attention_table(prefix, block, norms=norms, read=read),
            f"{prefix}mlp.gate_proj.weight": TensorForm((inner, width)),
            f"{prefix}mlp.up_proj.weight": TensorForm((inner, width)),
            f"{prefix}mlp.down_proj.weight": TensorForm((width, inner))}


def attention_table(prefix: str, block: BlockConfig, *, norms: Iterable[str], read: int | None = None) -> Table:
    """Tensors of a Llama layer without its MLP; arguments as in `layer_table`."""
    width, read = block.hidden_size, read or block.hidden_size
    queries, keys = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    shapes = {"q_proj": (queries, read), "k_proj": (keys, read), "v_proj": (keys, read), "o_proj": (width, queries)}
    return {**{f"{prefix}self_attn.{name}.weight": TensorForm(shape) for name, shape in shapes.items()},
            **{f"{prefix}{name}.weight": TensorForm((width,)) for name in norms}}


def table_text(table: Table) -> str:
    """The table in Markdown; names that differ by a number alone, such as those of equal heads, share a line."""
    def form(item: tuple[str, TensorForm]) -> tuple[str, TensorForm]:
        return _NUMBER.sub("{}", item[0]), item[1]

    lines = ["| tensor | shape | number format |", "|---|---|---|"]
    for (_, (shape, dtype)), same in groupby(sorted(table.items(), key=lambda item: (form(item), item[0])), key=form):
        names = [name for name, _ in same]
        name = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` to `{names[-1]}` ({len(names)})"
        lines.append(f"| {name} | {list(shape)} | {str(dtype).removeprefix('torch.')} |")
    return "\n".join(lines)
