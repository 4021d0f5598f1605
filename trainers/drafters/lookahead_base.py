"""Shared training of drafters with virtual nodes: gradients pass through the frozen target.

The labels of a virtual node are what the target would write after its anchor. Where the text is the target's own greedy
answer, it says so itself (arXiv:2405.18628, section 3.2).
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ...modules.drafters.parts.lookahead_drafter import LookaheadConfig, LookaheadDrafter
from ..base import DraftModule
from ..losses.objectives import ObjectiveName
from ..train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class LookaheadTrainConfig(TrainConfig):
    """Settings shared by prompt tokens and Hidden Transfer."""

    objective: ObjectiveName = "soft"
    """As for all families; the papers have `soft`, the target as teacher."""
    drafter: LookaheadConfig = field(default_factory=LookaheadConfig)
    """The drafter."""


class LookaheadModule(DraftModule):
    """A drafter in training whose guesses the target makes at virtual nodes."""

    config: LookaheadTrainConfig
    drafter: LookaheadDrafter
    needs_whole_target: ClassVar[bool] = True
