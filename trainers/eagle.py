"""Training an EAGLE-1 drafter on the target's states and distributions (arXiv:2401.15077, section 4.1), also by HASS's
harmonised passes (arXiv:2408.15766) or with FSPAD's two states (arXiv:2408.15562)."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from ..modules.drafters.eagle import Eagle, EagleConfig
from ..modules.errors import UserError
from ..modules.target.model import Target
from .eagle_base import FeedbackModule, FeedbackTrainConfig
from .objectives import Objective


@dataclass(frozen=True, kw_only=True)
class EagleTrainConfig(FeedbackTrainConfig):
    """How an EAGLE-1 drafter is shaped and trained."""

    feature_weight: float = 10.0
    """See TrainConfig; the paper weighs states 1.0 beside 0.1 for the objective."""
    decay: float = 1.0
    """Weight of step k in the loss is decay ** k; HASS weighs its passes alike."""
    top_weight: float = 0.0
    """Weight, beside the objective's 1, of the cross entropy over the target's likeliest tokens alone (HASS,
    arXiv:2408.15766, section 3.1). Its 1.0 beside 0.1 for the objective is 10 here."""
    top_k: int = 10
    """How many tokens those are."""
    drafter: EagleConfig = field(default_factory=EagleConfig)
    """The drafter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter.partial_alignment and not self.feature_weight:
            raise UserError("partial_alignment keeps a state that feature_weight alone teaches, got feature_weight "
                            f"{self.feature_weight}; set it above 0 (the paper's weights make it 10), or "
                            "partial_alignment to false")

    def judge(self) -> Objective:
        """The objective, with HASS's over the likeliest tokens."""
        return replace(super().judge(), top_weight=self.top_weight, top_k=self.top_k)


class EagleModule(FeedbackModule):
    """An EAGLE-1 drafter in training: at index p it learns the target's state of p + 1 and the token at p + 2.

    Args:
        target: the frozen model.
        config: drafter and training; the defaults when left out.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if positions would leave the target's context, or a reduced vocabulary does not fit.
    """

    config: EagleTrainConfig
    drafter: Eagle

    def __init__(
        self, target: Target, config: EagleTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or EagleTrainConfig(), token_counts=token_counts)

    def build_drafter(self) -> Eagle:
        """A new drafter, beginning with the target's state unchanged."""
        return Eagle.create(self.config.drafter, self.target, self._token_ids_Q)
