"""Training a Falcon drafter on the target's states and distributions (arXiv:2412.12639, section 3.3)."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.drafters.falcon import Falcon, FalconConfig
from ..modules.target.model import Target
from .eagle_base import FeatureModule, FeatureTrainConfig
from .objectives import ObjectiveName


@dataclass(frozen=True, kw_only=True)
class FalconTrainConfig(FeatureTrainConfig):
    """Shape and training of a Falcon drafter."""

    objective: ObjectiveName = "soft"
    """See TrainConfig. The paper has 0.9 `soft`, with the target at temperature 0.95, and 0.1 `hard`; here it is one
    of them."""
    feature_weight: float = 10.0
    """See TrainConfig; the paper's weights are 1.0 for states and 0.1 for the objective."""
    decay: float = 1.0
    """Weight of step k in the loss is decay ** k; the paper weights all tokens of a block equally."""
    drafter: FalconConfig = field(default_factory=FalconConfig)
    """The drafter."""


class FalconModule(FeatureModule):
    """A Falcon drafter in training: a block that ends at p learns the target's states of p + 1 to p + K and the tokens
    after them. Every position is such an end.

    The paper's second pass over inputs that are partly the draft's own (CSGD, section 3.2) is not implemented; `blocks`
    above 1 in the drafter's settings trains on its own estimates in its place.
    """

    drafter_class = Falcon
    config: FalconTrainConfig
    drafter: Falcon

    def __init__(
        self, target: Target, config: FalconTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or FalconTrainConfig(), token_counts=token_counts)
