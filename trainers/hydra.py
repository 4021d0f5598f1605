"""Training Hydra heads on the true tokens before each guess (arXiv:2402.05109, section 3)."""

from dataclasses import dataclass, field

from torch import Tensor

from ..modules.drafters.hydra import Hydra
from ..modules.drafters.hydra_heads import HydraConfig
from ..modules.target.model import Target
from .base import DraftModule, TrainConfig
from .draft_vocabulary import reduced_vocabulary
from .objectives import ObjectiveName


@dataclass(frozen=True, kw_only=True)
class HydraTrainConfig(TrainConfig):
    """How Hydra heads are shaped and trained."""

    objective: ObjectiveName = "hard"
    """See TrainConfig; the paper's is `hard` for Hydra and `soft`, the target as teacher, for Hydra++."""
    decay: float = 1.0
    """Weight of head k in the loss is decay ** k; the official code weighs all heads alike."""
    drafter: HydraConfig = field(default_factory=HydraConfig)
    """The heads."""


class HydraModule(DraftModule):
    """Hydra heads in training: head k learns the token k + 2 places ahead, having read those before it.

    Args:
        target: the frozen model.
        config: heads and training; the defaults when left out.
        token_counts: how often each token is a label, [V]; a reduced draft vocabulary is chosen by it.

    Raises:
        UserError: if a reduced vocabulary is asked for without counts, or with a size that does not fit them.
    """

    config: HydraTrainConfig
    drafter: Hydra

    def __init__(
        self, target: Target, config: HydraTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or HydraTrainConfig(), token_counts=token_counts)
        self._token_ids_Q = reduced_vocabulary(self.config.drafter.vocabulary_size, token_counts, target)

    def build_drafter(self) -> Hydra:
        """New heads, each beginning as the target's output layer."""
        return Hydra.create(self.config.drafter, self.target, self._token_ids_Q)
