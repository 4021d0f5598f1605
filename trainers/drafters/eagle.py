"""Training an EAGLE-1 drafter on the target's states and distributions (arXiv:2401.15077, section 4.1), also by HASS's
harmonised passes (arXiv:2408.15766) or with FSPAD's two states (arXiv:2408.15562)."""

from dataclasses import dataclass, field

from ...modules.config_checks import NotNegative
from ...modules.drafters.eagle import Eagle, EagleConfig
from ...modules.errors import UserError
from .eagle_base import FeatureModule, FeatureTrainConfig


@dataclass(frozen=True, kw_only=True)
class EagleTrainConfig(FeatureTrainConfig):
    """Shape and training of an EAGLE-1 drafter."""

    feature_weight: NotNegative = 10.0
    """As for all families; the paper's weights are 1.0 for states and 0.1 for the objective."""
    drafter: EagleConfig = field(default_factory=EagleConfig)
    """The drafter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter.partial_alignment and not self.feature_weight:
            raise UserError("partial_alignment has a state that only feature_weight trains, got feature_weight "
                            f"{self.feature_weight}; set it above 0 (the paper's weights make it 10), or "
                            "partial_alignment to false")


class EagleModule(FeatureModule):
    """An EAGLE-1 drafter in training: at position p it learns the target's state of p + 1 and the token at p + 2."""

    drafter_class = Eagle
    decay = 1.0  # HASS weights its passes equally
    config: EagleTrainConfig
    drafter: Eagle
