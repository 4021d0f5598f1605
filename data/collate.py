"""Rows of tokens and states become batches: padded one conversation a row, or packed several to a row.

Shapes: N tokens of a piece, B rows, L positions in a row, D hidden size of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..modules import Features


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One conversation, or a window of one."""

    tokens_N: Tensor
    """Token ids."""
    supervised_N: Tensor
    """Written by the assistant, bool."""
    first: int = 0
    """Position of the first token in its conversation."""
    final_ND: Tensor | None = None
    """The target's final states; None when the target computes them in the step."""
    taps: dict[int, Tensor] = field(default_factory=dict)
    """Outputs of the tapped layers by layer index, each [N, D]."""


def plan_bins(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Distribute pieces over rows of row_length tokens."""
    raise NotImplementedError


def pack(rows: Sequence[Sequence[Piece]], row_length: int | None = None) -> Features:
    """Lay the pieces of each row one after another as isolated segments."""
    raise NotImplementedError


def pad(pieces: Sequence[Piece]) -> Features:
    """One piece a row, padded on the right to the longest."""
    return pack([[piece] for piece in pieces])
