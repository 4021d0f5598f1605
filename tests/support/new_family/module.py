"""Training a bigram drafter on the tokens that follow."""

from dataclasses import dataclass, field

from torch import Tensor

from ...modules.drafters.bigram import Bigram, BigramConfig
from ...modules.target.model import Target
from ..base import DraftModule
from ..losses.objectives import ObjectiveName
from ..train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class BigramTrainConfig(TrainConfig):
    """Shape and training of a bigram drafter."""

    objective: ObjectiveName = "soft"
    """As for all families."""
    drafter: BigramConfig = field(default_factory=BigramConfig)
    """The drafter."""


class BigramModule(DraftModule):
    """A bigram drafter in training."""

    drafter_class = Bigram
    config: BigramTrainConfig
    drafter: Bigram

    def __init__(
        self, target: Target, config: BigramTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or BigramTrainConfig(), token_counts=token_counts)
