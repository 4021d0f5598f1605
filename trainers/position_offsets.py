"""Large positions out of short rows: what follows the first tokens of a conversation is moved far on, as if a long text
stood between (anchor-offset positions, LongSpec, arXiv:2502.17421).

Shapes: B rows, L positions.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..modules.errors import UserError
from ..modules.features import Features
from ..modules.target.model import Target

_UNKNOWN = 1 << 30
"""Context length of a target whose configuration names none."""


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Where the drafter believes the tokens of a training row to stand."""

    offset: Literal["max"] | int | None = None
    """Largest number that positions are moved by, one drawn uniformly from 0 up for each conversation of a micro-batch;
    `max` is as far as the target's context has room for, which no other offset leaves either. None moves nothing: a
    drafter then never learns the positions behind its rows."""
    anchors: int = 4
    """First tokens of a conversation whose positions stay; attention leans on them in long texts too."""

    def __post_init__(self) -> None:
        if self.anchors < 0:
            raise UserError(f"positions.anchors must not be negative, got {self.anchors}")
        if self.offset not in (None, "max") and not (
            isinstance(self.offset, int) and not isinstance(self.offset, bool) and self.offset >= 1
        ):
            raise UserError(f"positions.offset must be 'max' or a whole number of at least 1, got {self.offset!r}; "
                            "leave it out to move nothing")

    def limit(self, target: Target) -> int:
        """The largest offset beside this target.

        Raises:
            UserError: if it is larger than the context, or nobody knows how large that is.
        """
        name, context = target.identity.name, target.context_length
        if self.offset is None:
            return 0
        if isinstance(self.offset, int):
            if self.offset >= context:
                raise UserError(f"positions.offset is {self.offset}, but the context of {name} ends at {context} "
                                "tokens; lower it, or set it to max")
            return self.offset
        if context >= _UNKNOWN:
            raise UserError(f"positions.offset is 'max', but the configuration of {name} does not say how long its "
                            "context is; give a number")
        return context


def moved(features: Features, *, anchors: int, limit: int, highest: int) -> Features:
    """The batch with position ids from `anchors` up moved on, by one offset a conversation.

    Nothing else changes: order, sight and labels go by the index, and the states are those that the target had at its
    own positions. (LongSpec's code moves the target's as well, which stored states do not allow.) What drafts from the
    anchors themselves goes on right behind them, as at the beginning of a text.

    Offsets come from torch's generator on the CPU: whoever sets its seed for a micro-batch repeats them.

    Args:
        anchors: first positions of a conversation that stay.
        limit: largest offset.
        highest: position id that none is moved beyond. What lies beyond it already is not moved.
    """
    numbers_BL, positions_BL = features.segments_BL.clamp(min=0), features.positions_BL
    there_BL = positions_BL.masked_fill(features.segments_BL < 0, 0)
    last_BL = torch.zeros_like(there_BL).scatter_reduce(1, numbers_BL, there_BL, "amax").gather(1, numbers_BL)
    room_BL = (highest - last_BL).clamp(min=0, max=limit)
    # In float32 the offsets of a long context would not be equally likely.
    drawn_BL = torch.rand(positions_BL.shape, dtype=torch.float64).to(positions_BL.device).gather(1, numbers_BL)
    offsets_BL = (drawn_BL * (room_BL + 1)).long()
    stays_BL = (positions_BL < anchors) | (features.segments_BL < 0)
    return replace(features, positions_BL=positions_BL + offsets_BL.masked_fill(stays_BL, 0))
