"""Large position ids in short rows: the positions after the first tokens of a conversation get an offset, as if a long
text preceded them (anchor-offset positions, LongSpec, arXiv:2502.17421).

Shapes: B rows, L positions.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...modules.config_checks import CheckedSettings, Whole
from ...modules.errors import UserError
from ...modules.features import Features
from ...modules.target.model import Target

ANCHORS = 4  # First tokens of a conversation without an offset; attention relies on them in long texts too
_UNKNOWN = 1 << 30  # Context length of a target whose configuration has none


@dataclass(frozen=True, kw_only=True)
class PositionConfig(CheckedSettings):
    """Offsets of the position ids that the drafter gets in training."""

    offset: Literal["max"] | Whole | None = None
    """Largest offset of the position ids; each conversation of a micro-batch draws one uniformly from 0 up. `max` is
    the largest that fits the target's context, which no offset exceeds. None adds no offsets: a drafter then never
    learns positions beyond its rows."""

    def limit(self, target: Target) -> int:
        """The largest offset for this target; UserError if it is larger than the context, or the context is unknown."""
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


def with_offsets(features: Features, *, limit: int, highest: int) -> Features:
    """The batch with one offset of at most `limit` for each conversation on its position ids from ANCHORS up, to
    `highest`; positions already beyond that get none.

    Nothing else changes: order, attention and labels follow the index, and the states are the target's at its own
    positions. (LongSpec's code offsets the target's positions as well, which stored states do not allow.) A draft from
    the anchors themselves continues right after them, as at the start of a text. Offsets come from torch's generator on
    the CPU, so that the seed of a micro-batch determines them."""
    numbers_BL, positions_BL = features.segments_BL.clamp(min=0), features.positions_BL
    there_BL = positions_BL.masked_fill(features.segments_BL < 0, 0)
    last_BL = torch.zeros_like(there_BL).scatter_reduce(1, numbers_BL, there_BL, "amax").gather(1, numbers_BL)
    room_BL = (highest - last_BL).clamp(min=0, max=limit)
    # In float32 the offsets of a long context would not be equally likely.
    drawn_BL = torch.rand(positions_BL.shape, dtype=torch.float64).to(positions_BL.device).gather(1, numbers_BL)
    offsets_BL = (drawn_BL * (room_BL + 1)).long()
    stays_BL = (positions_BL < ANCHORS) | (features.segments_BL < 0)
    return replace(features, positions_BL=positions_BL + offsets_BL.masked_fill(stays_BL, 0))
