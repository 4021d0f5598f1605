"""Training a drafter of blocks on the target's states and distributions (DFlash, arXiv:2602.06036; DSpark,
arXiv:2607.05147; JetSpec, arXiv:2606.18394)."""

from dataclasses import dataclass, field

from torch import Tensor

from ...modules.drafters.block import BlockDraft, BlockDraftConfig
from ...modules.errors import UserError
from ...modules.target.model import Target
from ..train_config import TrainConfig
from .eagle_base import FeatureModule, FeatureTrainConfig

CHOICE_WEIGHT = 0.25
"""Weight of the choice among the candidates of a lattice next to the slots' own loss (arXiv:2608.20530)."""
ALONE_UNTIL = 0.5
"""Share of a training in which the weight goes from the slots' own guesses to those by a GRU (arXiv:2605.29707)."""
SLOTS_WEIGHT = 0.6
"""Weight of the slots' own guesses next to those of a refiner (arXiv:2608.02438)."""


@dataclass(frozen=True, kw_only=True)
class BlockTrainConfig(FeatureTrainConfig):
    """Shape and training of a drafter of blocks."""

    drafter: BlockDraftConfig = field(default_factory=BlockDraftConfig)
    """The drafter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter.confidence and (self.objective == "hard" or isinstance(self.step_weights, str)):
            raise UserError("confidence learns the acceptance from the target's distribution, with fixed weights of the"
                            f" steps, got objective {self.objective!r} and step_weights {self.step_weights!r}; set "
                            "objective to soft or hard_tvd and step_weights to a number, or confidence to false")
        if self.feature_weight:
            raise UserError(f"feature_weight is {self.feature_weight}, but slots estimate no state of the target; set "
                            "feature_weight to 0")


class BlockModule(FeatureModule):
    """A drafter of blocks in training: step k after position p learns the token at p + 2 + k, with the true tokens
    before it in the block.

    Raises:
        UserError: if a tap is no layer of the target or the mask a token of its text; see DraftModule for others.
    """

    drafter_class = BlockDraft
    config: BlockTrainConfig
    drafter: BlockDraft

    def __init__(
        self, target: Target, config: TrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config, token_counts=token_counts)
        # The choice among encoded candidates learns from the target whatever the slots learn from.
        self.needs_teacher = self.needs_teacher or self.config.drafter.correction == "lattice"

    def weights(self, steps: int) -> tuple[float, ...]:
        """Weight of each draft step; where a choice among candidates is learned too, first those of its steps."""
        own = super().weights(self.config.drafter.num_steps)
        if steps == len(own):
            return own
        match self.config.drafter.correction:
            case "lattice":
                return (CHOICE_WEIGHT,) * len(own) + own
            case "refiner":
                return own + tuple(SLOTS_WEIGHT * weight for weight in own)
            case "gru":
                alone = max(0.0, 1 - self.progress_at(self.global_step) / ALONE_UNTIL)
                return tuple(share * weight for share in (1 - alone, alone) for weight in own)
        return own * 2
