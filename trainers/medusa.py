"""Training Medusa heads (Medusa-1, arXiv:2401.10774, eq. 1)."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.medusa import MedusaConfig
from ..modules.target import Target
from .base import DraftModule, TrainConfig


@dataclass(frozen=True, kw_only=True)
class MedusaTrainConfig(TrainConfig):
    """How Medusa heads are shaped and trained."""

    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    """The heads."""


class MedusaModule(DraftModule):
    """Medusa heads in training."""

    def __init__(
        self, target: Target, config: MedusaTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        """`token_counts` [V]: how often each token is a label; needed for a reduced draft vocabulary."""
        super().__init__()
