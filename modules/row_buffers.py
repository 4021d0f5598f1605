"""Tensors with an entry for each row of a batch that stay where they are from the first pass to the last.

A CUDA graph replays operations on the very same addresses. So everything that one pass leaves to the next is written in
place, and rows that leave a batch make nothing smaller: the first rows are those in use.

Shapes: R rows that change, S rows of the buffer."""

from typing import Any

import torch
from torch import Tensor


class RowBuffer:
    """A tensor with an entry of a given shape for each row, written in place; `blank` in a row that holds nothing."""

    values: Tensor  # All entries, [S, *entry]

    def __init__(self, rows: int, *entry: int, blank: Any = 0, device: torch.device, dtype: torch.dtype) -> None:
        # What is made in torch.inference_mode could not be written outside it.
        with torch.inference_mode(False):
            self.values = torch.full((rows, *entry), blank, device=device, dtype=dtype)
        self.blank = blank

    def store(self, rows_R: Tensor, found: Tensor, new_R: Tensor) -> None:
        """Put entries [R, *entry] into the rows `rows_R`, those without `new_R` excepted, which keep theirs."""
        chosen = new_R.view(-1, *[1] * (found.dim() - 1))
        kept = torch.where(chosen, found.to(self.values.dtype), self.values[rows_R])
        self.values.index_copy_(0, rows_R, kept)

    def clear(self, rows_R: Tensor) -> None:
        """Make these rows blank."""
        self.values.index_fill_(0, rows_R, self.blank)

    def keep(self, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]; the rows after them become blank."""
        self.values[: len(rows_R)] = self.values[rows_R]
        self.values[len(rows_R) :] = self.blank
