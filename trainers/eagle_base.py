"""What the training of the EAGLE line and of Falcon shares: the labels' default judge, the draft vocabulary, and where
the drafter believes the tokens to stand."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.drafters.eagle import Eagle, EagleConfig
from ..modules.drafters.eagle3 import Eagle3, Eagle3Config
from ..modules.drafters.falcon import Falcon, FalconConfig
from ..modules.features import Features
from ..modules.target.model import Target
from .base import DraftModule, TrainConfig
from .draft_vocabulary import reduced_vocabulary
from .objectives import ObjectiveName
from .position_offsets import PositionConfig, moved


@dataclass(frozen=True, kw_only=True)
class FeedbackTrainConfig(TrainConfig):
    """What they are all told."""

    objective: ObjectiveName = "soft"
    """See TrainConfig; that of EAGLE's papers is `soft`, the target as teacher."""
    positions: PositionConfig = field(default_factory=PositionConfig)
    """Where the drafter believes the tokens to stand; by default where they do."""
    drafter: EagleConfig | Eagle3Config | FalconConfig = field(default_factory=Eagle3Config)
    """The drafter."""


class FeedbackModule(DraftModule):
    """A drafter in training that reads the target's states, and behind them its own.

    Args:
        target: the frozen model.
        config: drafter and training.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if positions would leave the target's context, or a reduced vocabulary does not fit.
    """

    config: FeedbackTrainConfig
    drafter: Eagle | Eagle3 | Falcon

    def __init__(self, target: Target, config: FeedbackTrainConfig, *, token_counts: Tensor | None = None) -> None:
        super().__init__(target, config, token_counts=token_counts)
        self._largest_offset = config.positions.limit(target)
        self._token_ids_Q = reduced_vocabulary(config.drafter.vocabulary_size, token_counts, target)

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        """The target reads the batch where it stands; the drafter, in training alone, where it may be moved to."""
        batch = self.encoded(batch)
        if self._largest_offset:
            # The last step of the last index draws on the highest position.
            highest = self.target.context_length - self.drafter.trained_steps
            batch = moved(batch, anchors=self.config.positions.anchors, limit=self._largest_offset, highest=highest)
        return super().training_step(batch, batch_idx)
