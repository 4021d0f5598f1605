"""Training a drafter of blocks on the target's states and distributions (DFlash, arXiv:2602.06036; DSpark,
arXiv:2607.05147; JetSpec, arXiv:2606.18394)."""

from dataclasses import dataclass, field

from ...modules.drafters.block import BlockDraft, BlockDraftConfig
from ...modules.errors import UserError
from .eagle_base import FeatureModule, FeatureTrainConfig

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

    def weights(self, steps: int) -> tuple[float, ...]:
        """Weight of each draft step; where a choice among candidates is learned too, first those of its steps."""
        own = super().weights(self.config.drafter.num_steps)
        if steps == len(own):
            return own
        match self.config.drafter.correction:
            case "refiner":
                return own + tuple(SLOTS_WEIGHT * weight for weight in own)
            case "gru":
                alone = max(0.0, 1 - self.progress_at(self.global_step) / ALONE_UNTIL)
                return tuple(share * weight for share in (1 - alone, alone) for weight in own)
        return own * 2
