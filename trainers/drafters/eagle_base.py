"""Shared training of feature drafters: the target as teacher, position ids that may be offset."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ...modules.drafters.parts.feature_drafter import FeatureConfig, FeatureDrafter
from ...modules.features import Features
from ...modules.target.model import Target
from ..base import DraftModule
from ..losses.objectives import ObjectiveName
from ..steps.position_offsets import PositionConfig, with_offsets
from ..train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class FeatureTrainConfig(TrainConfig):
    """Settings shared by EAGLE and Falcon."""

    objective: ObjectiveName = "soft"
    """As for all families; EAGLE's papers have `soft`, the target as teacher."""
    positions: PositionConfig = field(default_factory=PositionConfig)
    """Offsets of the position ids in training; none by default."""
    drafter: FeatureConfig = field(default_factory=FeatureConfig)
    """The drafter."""


class FeatureModule(DraftModule):
    """A drafter in training that reads the target's states, and after them its own.

    Raises:
        UserError: if settings do not fit the target, or positions would leave its context; see DraftModule for others.
    """

    drafter_class: ClassVar[type[FeatureDrafter]]
    config: FeatureTrainConfig
    drafter: FeatureDrafter

    def __init__(
        self, target: Target, config: TrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config, token_counts=token_counts)
        # Before the target answers anything, which the drafter's making comes after.
        self.drafter_class.fitted(self.config.drafter, target)
        self._largest_offset = self.config.positions.limit(target)

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        """Loss of a micro-batch; the target reads its true positions, the drafter possibly offset ones."""
        batch = self.encoded(batch)
        if self._largest_offset:
            # The last step of the last position has the highest position id.
            highest = self.target.context_length - self.drafter.trained_steps
            batch = with_offsets(batch, limit=self._largest_offset, highest=highest)
        return super().training_step(batch, batch_idx)
