"""Training features of a drafter: tokens, who wrote them, and the hidden states of the frozen target.

Shapes: B rows, L positions in a row, D hidden size of the target."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Features:
    """A batch of token rows with the target's hidden states. Several conversations may share a row (packing):
    `segments_BL` numbers them and is -1 on padding. `supervised_BL` is a property of the *token*: it was written by the
    assistant and may be a label. Nothing is ever shifted by hand; a family asks `labels(offset)` for the token `offset`
    places ahead."""

    tokens_BL: Tensor  # Token ids, int64; padding holds any valid id
    supervised_BL: Tensor  # True where the token was written by the assistant and may serve as a label
    segments_BL: Tensor  # Number of the conversation inside its row, int64; -1 is padding
    positions_BL: Tensor  # Position id of the token inside its own segment, int64
    final_BLD: Tensor | None = None  # The target's after its last norm, for its output layer. None until encoded
    taps: dict[int, Tensor] = field(default_factory=dict)  # Output of layer i before the final norm, each [B, L, D]
    labels_at_most: int | None = None
    """Most tokens that may be labels, counted on the host, so that a device is not asked; None where nobody counted."""

    def __post_init__(self) -> None:
        shape = self.tokens_BL.shape
        for name in ("supervised_BL", "segments_BL", "positions_BL"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} must have the shape of tokens_BL {tuple(shape)}, got {tuple(getattr(self, name).shape)}")

    def labels(self, offset: int) -> tuple[Tensor, Tensor]:
        """Return (labels_BL, valid_BL): the token `offset` places after each index, at least 1 (ValueError), and
        whether it is a label: it exists, lies in the same segment and was written by the assistant. Else the label is 0
        and must not be read."""
        if offset < 1:
            raise ValueError(f"offset must be at least 1, got {offset}")
        # Where there is no label stands 0, which cross entropy can read; whoever asks drops its loss by `valid`.
        labels = torch.zeros_like(self.tokens_BL)
        valid = torch.zeros_like(self.supervised_BL)
        if offset < self.tokens_BL.shape[1]:
            here, there = self.segments_BL[:, :-offset], self.segments_BL[:, offset:]
            valid[:, :-offset] = (here == there) & (here >= 0) & self.supervised_BL[:, offset:]
            labels[:, :-offset] = torch.where(valid[:, :-offset], self.tokens_BL[:, offset:], 0)
        return labels, valid

    def visible(self) -> Tensor:
        """Attention mask, bool [B, L, L]: each index sees those of its own segment up to itself."""
        order_L = torch.arange(self.tokens_BL.shape[1], device=self.tokens_BL.device)
        return (self.segments_BL[:, :, None] == self.segments_BL[:, None, :]) & (order_L[:, None] >= order_L)

    def final(self) -> Tensor:
        """The final states, [B, L, D]; ValueError if the batch has not been encoded by the target yet."""
        if self.final_BLD is None:
            raise ValueError("these features hold no target states; encode them with Target.encode first")
        return self.final_BLD

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Features":
        """The same batch with every tensor moved."""
        return replace(self, tokens_BL=move(self.tokens_BL), supervised_BL=move(self.supervised_BL),
                       segments_BL=move(self.segments_BL), positions_BL=move(self.positions_BL),
                       final_BLD=None if self.final_BLD is None else move(self.final_BLD),
                       taps={layer: move(state) for layer, state in self.taps.items()})

    def to(self, device: torch.device | str) -> "Features":
        """The same batch on another device. To a GPU the host does not wait for copies from page-locked memory."""
        there = torch.device(device)
        # Counted while the labels are still on the host: later, the count would make it wait for the device.
        counted = self.labels_at_most
        if counted is None and self.supervised_BL.device.type == "cpu" and there.type != "cpu":
            counted = int(self.supervised_BL.sum())
        return replace(self.moved(lambda tensor: tensor.to(there, non_blocking=there.type == "cuda")),
                       labels_at_most=counted)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, pad_id: int = 0) -> "Features":
        """Right-pad rows of (tokens, supervised), one conversation each, into a batch without target states."""
        width = max(len(tokens) for tokens, _ in rows)
        tokens_BL = torch.full((len(rows), width), pad_id, dtype=torch.long)
        supervised_BL = torch.zeros((len(rows), width), dtype=torch.bool)
        segments_BL = torch.full((len(rows), width), -1, dtype=torch.long)
        for row, (tokens, supervised) in enumerate(rows):
            tokens_BL[row, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.long)
            supervised_BL[row, : len(tokens)] = torch.tensor(list(supervised), dtype=torch.bool)
            segments_BL[row, : len(tokens)] = 0
        positions_BL = torch.arange(width).expand(len(rows), width).contiguous()
        return cls(tokens_BL=tokens_BL, supervised_BL=supervised_BL, segments_BL=segments_BL, positions_BL=positions_BL)


class ReadRows(Sequence[Features]):
    """Rows of text with the target's states, none of which is kept: those of long held-out text take more than a device
    has. Each row has a reader, which returns the same row at every call."""

    def __init__(self, read: Iterable[Callable[[], Features]]) -> None:
        self.read = tuple(read)

    def __len__(self) -> int:
        return len(self.read)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return ReadRows(self.read[place])
        return self.read[place]()

    def mapped(self, change: Callable[[Features], Features]) -> "ReadRows":
        """The same rows, each changed after it is read."""
        return ReadRows(partial(lambda read: change(read()), read) for read in self.read)
