"""Training an EAGLE-3 drafter by the training-time test (arXiv:2503.01840, section 3.2)."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ...modules.drafters.eagle3 import Eagle3, Eagle3Config, chosen_taps, chosen_width
from ...modules.errors import UserError
from ...modules.features import Features
from ...modules.target.model import Target
from ..losses.chunked_losses import greedy_tokens
from .eagle_base import UnrolledModule, UnrolledTrainConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(UnrolledTrainConfig):
    """Shape and training of an EAGLE-3 drafter."""

    loss_mask: Literal["label", "argmax"] = "label"
    """The token that must lie in the reduced draft vocabulary for a position to be learned: `label`, the next token of
    the text, or `argmax`, the one that the target finds most probable there, as in the official code. The two differ on
    sampled answers; `argmax` runs the target's whole output layer at each label."""
    drafter: Eagle3Config = field(default_factory=Eagle3Config)
    """The drafter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_mask not in ("label", "argmax"):
            raise UserError(f"loss_mask must be 'label' or 'argmax', got {self.loss_mask!r}")
        if self.loss_mask == "label":
            return
        if self.objective == "hard":
            raise UserError("loss_mask is 'argmax', but objective is 'hard', which learns labels alone; set objective "
                            "to soft, or loss_mask to label")
        if self.drafter.vocabulary_size is None:
            raise UserError("loss_mask is 'argmax', but vocabulary_size is null, and every token lies in the whole "
                            "vocabulary; set vocabulary_size, or loss_mask to label")


class Eagle3Module(UnrolledModule):
    """An EAGLE-3 drafter in training: step k at position p learns the token at p + 2 + k from its own states before it.

    Tokens are always the true ones: a drafter trained on its own guesses learns less. No loss compares its states with
    the target's, which they need not resemble in this method.

    Raises:
        UserError: if a tap is no layer of the target or the widths do not fit; see DraftModule for others.
    """

    drafter_class = Eagle3
    config: Eagle3TrainConfig
    drafter: Eagle3

    def __init__(
        self, target: Target, config: Eagle3TrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or Eagle3TrainConfig(), token_counts=token_counts)
        chosen_taps(self.config.drafter.taps, target)
        chosen_width(self.config.drafter, target)

    def deciding_tokens(self, features: Features) -> Tensor | None:
        """The target's most probable tokens, where the loss is masked by them."""
        return None if self.config.loss_mask == "label" else greedy_tokens(self.target, features)
