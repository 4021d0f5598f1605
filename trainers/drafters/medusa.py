"""Training Medusa heads (Medusa-1, arXiv:2401.10774, eq. 1)."""

from dataclasses import dataclass, field

from ...modules.drafters.medusa import Medusa, MedusaConfig
from ..base import DraftModule
from ..losses.objectives import ObjectiveName
from ..train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class MedusaTrainConfig(TrainConfig):
    """Shape and training of Medusa heads."""

    objective: ObjectiveName = "hard"
    """As for all families; the paper's is `hard`, the tokens that follow."""
    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    """The heads."""


class MedusaModule(DraftModule):
    """Medusa heads in training: head k learns the token k + 2 places ahead, weighted by decay ** k."""

    drafter_class = Medusa
    config: MedusaTrainConfig
    drafter: Medusa
