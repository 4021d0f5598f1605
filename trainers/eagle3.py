"""Training an EAGLE-3 drafter by the training-time test (arXiv:2503.01840, section 3.2)."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.drafters.eagle3 import Eagle3, Eagle3Config, chosen_taps, chosen_width
from ..modules.target.model import Target
from .eagle_base import FeedbackModule, FeedbackTrainConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(FeedbackTrainConfig):
    """How an EAGLE-3 drafter is shaped and trained."""

    drafter: Eagle3Config = field(default_factory=Eagle3Config)
    """The drafter."""


class Eagle3Module(FeedbackModule):
    """An EAGLE-3 drafter in training: step k at index p learns the token at p + 2 + k, on its own states before it.

    Tokens are always the true ones, since with its own guesses in their place a drafter is known to learn less. No
    state is held to the target's: that they need not resemble is the method's point.

    Args:
        target: the frozen model.
        config: drafter and training; the defaults when left out.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if a tap is no layer of the target, the widths do not go together, positions would leave its
            context, or a reduced vocabulary does not fit.
    """

    config: Eagle3TrainConfig
    drafter: Eagle3

    def __init__(
        self, target: Target, config: Eagle3TrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or Eagle3TrainConfig(), token_counts=token_counts)
        chosen_taps(self.config.drafter.taps, target)
        chosen_width(self.config.drafter, target)

    def build_drafter(self) -> Eagle3:
        """A new drafter, beginning as the highest tap."""
        return Eagle3.create(self.config.drafter, self.target, self._token_ids_Q)
