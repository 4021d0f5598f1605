"""Training a Falcon drafter on the target's states and distributions (arXiv:2412.12639, section 3.3)."""

from dataclasses import dataclass, field

from ...modules.config_checks import NotNegative
from ...modules.drafters.falcon import Falcon, FalconConfig
from ..losses.objectives import ObjectiveName
from .eagle_base import FeatureModule, FeatureTrainConfig


@dataclass(frozen=True, kw_only=True)
class FalconTrainConfig(FeatureTrainConfig):
    """Shape and training of a Falcon drafter."""

    objective: ObjectiveName = "soft"
    """As for all families. The official code has 0.9 of it, with the target at temperature 0.95, and 0.1 `hard`."""
    feature_weight: NotNegative = 10.0
    """As for all families; the paper's weights are 1.0 for states and 0.1 for the objective."""
    drafter: FalconConfig = field(default_factory=FalconConfig)
    """The drafter."""


class FalconModule(FeatureModule):
    """A Falcon drafter in training: a block that ends at p learns the target's states of p + 1 to p + K and the tokens
    after them. Every position is such an end.

    The official code also shows it some true states a block ahead (CSGD); `blocks` above 1 lets it read its own
    estimates instead, as HASS does.
    """

    drafter_class = Falcon
    decay = 1.0  # the paper weights all tokens of a block equally
    config: FalconTrainConfig
    drafter: Falcon
