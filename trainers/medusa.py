"""Training Medusa heads (Medusa-1, arXiv:2401.10774, eq. 1)."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.drafters.medusa import Medusa, MedusaConfig
from ..modules.target.model import Target
from .base import DraftModule, TrainConfig
from .draft_vocabulary import reduced_vocabulary
from .objectives import ObjectiveName


@dataclass(frozen=True, kw_only=True)
class MedusaTrainConfig(TrainConfig):
    """How Medusa heads are shaped and trained."""

    objective: ObjectiveName = "hard"
    """See TrainConfig; the paper's is `hard`, the tokens that follow."""
    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    """The heads."""


class MedusaModule(DraftModule):
    """Medusa heads in training: head k learns the token k + 2 places ahead, weighted by decay ** k.

    Args:
        target: the frozen model.
        config: heads and training; the defaults when left out.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if a reduced vocabulary is asked for without counts, or with a size that does not fit them.
    """

    config: MedusaTrainConfig
    drafter: Medusa

    def __init__(
        self, target: Target, config: MedusaTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or MedusaTrainConfig(), token_counts=token_counts)
        self._token_ids_Q = reduced_vocabulary(self.config.drafter.vocabulary_size, token_counts, target)

    def build_drafter(self) -> Medusa:
        """New heads, each beginning as the target's output layer."""
        return Medusa.create(self.config.drafter, self.target, self._token_ids_Q)
