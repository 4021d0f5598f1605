"""Training Hydra heads on the true tokens before each guess (arXiv:2402.05109, section 3)."""

from dataclasses import dataclass, field

from ...modules.drafters.hydra import Hydra
from ...modules.drafters.hydra_heads import HydraConfig
from ..base import DraftModule
from ..losses.objectives import ObjectiveName
from ..train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class HydraTrainConfig(TrainConfig):
    """Shape and training of Hydra heads."""

    objective: ObjectiveName = "hard"
    """As for all families; the paper's is `hard` for Hydra and `soft`, the target as teacher, for Hydra++."""
    drafter: HydraConfig = field(default_factory=HydraConfig)
    """The heads."""


class HydraModule(DraftModule):
    """Hydra heads in training: head k learns the token k + 2 places ahead from the true tokens before it."""

    drafter_class = Hydra
    decay = 1.0  # the official code weights all heads equally
    config: HydraTrainConfig
    drafter: Hydra
