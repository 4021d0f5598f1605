"""What the training of the whole EAGLE line shares: its labels' default judge, its vocabulary, and where the drafter
believes the tokens to stand."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.eagle import EagleConfig
from ..modules.eagle3 import Eagle3Config
from ..modules.features import Features
from ..modules.target import Target
from .base import DraftModule, TrainConfig
from .objectives import ObjectiveName
from .positions import PositionConfig, moved
from .vocabulary import reduced_vocabulary


@dataclass(frozen=True, kw_only=True)
class FeedbackTrainConfig(TrainConfig):
    """What all members of the line are told."""

    objective: ObjectiveName = "soft"
    """See TrainConfig; the papers' is `soft`, the target as teacher."""
    positions: PositionConfig = field(default_factory=PositionConfig)
    """Where the drafter believes the tokens to stand; by default where they do."""
    drafter: EagleConfig | Eagle3Config = field(default_factory=Eagle3Config)
    """The drafter."""


class FeedbackModule(DraftModule):
    """A drafter of the EAGLE line in training.

    Args:
        target: the frozen model.
        config: drafter and training.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if positions would leave the target's context, or a reduced vocabulary does not fit.
    """

    config: FeedbackTrainConfig

    def __init__(self, target: Target, config: FeedbackTrainConfig, *, token_counts: Tensor | None = None) -> None:
        super().__init__(target, config, token_counts=token_counts)
        self._largest_offset = config.positions.limit(target)
        self._token_ids_Q = reduced_vocabulary(config.drafter.vocabulary_size, token_counts, target)

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        """The target reads the batch where it stands; the drafter, in training alone, where it may be moved to."""
        batch = self.encoded(batch)
        if self._largest_offset:
            # The last step of the last index draws on the highest position.
            highest = self.target.context_length - self.config.drafter.steps
            batch = moved(batch, anchors=self.config.positions.anchors, limit=self._largest_offset, highest=highest)
        return super().training_step(batch, batch_idx)
