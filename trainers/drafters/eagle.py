"""Training an EAGLE-1 drafter on the target's states and distributions (arXiv:2401.15077, section 4.1), also by HASS's
harmonised passes (arXiv:2408.15766) or with FSPAD's two states (arXiv:2408.15562)."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from ...modules.drafters.eagle import Eagle, EagleConfig
from ...modules.errors import UserError
from ...modules.target.model import Target
from ..losses.objectives import Objective
from .eagle_base import UnrolledModule, UnrolledTrainConfig


@dataclass(frozen=True, kw_only=True)
class EagleTrainConfig(UnrolledTrainConfig):
    """Shape and training of an EAGLE-1 drafter."""

    feature_weight: float = 10.0
    """As for all families; the paper's weights are 1.0 for states and 0.1 for the objective."""
    decay: float = 1.0
    """Weight of step k in the loss is decay ** k; HASS weights its passes equally."""
    top_weight: float = 0.0
    """Weight of the cross entropy over the target's most probable tokens alone, relative to the objective's 1 (HASS,
    arXiv:2408.15766, section 3.1). HASS's 1.0 with 0.1 for the objective is 10 here."""
    top_k: int = 10
    """Number of those tokens."""
    drafter: EagleConfig = field(default_factory=EagleConfig)
    """The drafter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter.partial_alignment and not self.feature_weight:
            raise UserError("partial_alignment has a state that only feature_weight trains, got feature_weight "
                            f"{self.feature_weight}; set it above 0 (the paper's weights make it 10), or "
                            "partial_alignment to false")

    def objective_settings(self) -> Objective:
        """The objective with HASS's loss over the most probable tokens."""
        return replace(super().objective_settings(), top_weight=self.top_weight, top_k=self.top_k)


class EagleModule(UnrolledModule):
    """An EAGLE-1 drafter in training: at position p it learns the target's state of p + 1 and the token at p + 2."""

    drafter_class = Eagle
    config: EagleTrainConfig
    drafter: Eagle

    def __init__(
        self, target: Target, config: EagleTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or EagleTrainConfig(), token_counts=token_counts)
