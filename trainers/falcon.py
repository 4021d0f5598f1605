"""Training a Falcon drafter on the target's states and distributions (arXiv:2412.12639, section 3.3)."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.drafters.falcon import Falcon, FalconConfig
from ..modules.target.model import Target
from .eagle_base import FeedbackModule, FeedbackTrainConfig
from .objectives import ObjectiveName


@dataclass(frozen=True, kw_only=True)
class FalconTrainConfig(FeedbackTrainConfig):
    """How a Falcon drafter is shaped and trained."""

    objective: ObjectiveName = "soft"
    """See TrainConfig. The paper's is nine parts `soft`, the target sharpened to temperature 0.95, and one part `hard`;
    here it is one of them."""
    feature_weight: float = 10.0
    """See TrainConfig; the paper weighs states 1.0 beside 0.1 for the objective."""
    decay: float = 1.0
    """Weight of step k in the loss is decay ** k; the paper weighs all tokens of a block alike."""
    drafter: FalconConfig = field(default_factory=FalconConfig)
    """The drafter."""


class FalconModule(FeedbackModule):
    """A Falcon drafter in training: a block that ends at p learns the target's states of p + 1 to p + K and the tokens
    behind them. Every index is such an end.

    The paper's second pass, over inputs of which some are the draft's own (CSGD, section 3.2), is not here; `blocks`
    above 1 in the drafter's settings trains on its own estimates instead.

    Args:
        target: the frozen model.
        config: drafter and training; the defaults when left out.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if positions would leave the target's context, or a reduced vocabulary does not fit.
    """

    config: FalconTrainConfig
    drafter: Falcon

    def __init__(
        self, target: Target, config: FalconTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or FalconTrainConfig(), token_counts=token_counts)

    def build_drafter(self) -> Falcon:
        """A new drafter, beginning with the target's states unchanged."""
        return Falcon.create(self.config.drafter, self.target, self._token_ids_Q)
