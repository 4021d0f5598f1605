"""Training an EAGLE-3 drafter by the training-time test (arXiv:2503.01840, section 3.2)."""

from dataclasses import dataclass, field

from ...modules.drafters.eagle3 import Eagle3, Eagle3Config
from .eagle_base import FeatureModule, FeatureTrainConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(FeatureTrainConfig):
    """Shape and training of an EAGLE-3 drafter."""

    drafter: Eagle3Config = field(default_factory=Eagle3Config)
    """The drafter."""


class Eagle3Module(FeatureModule):
    """An EAGLE-3 drafter in training: step k at position p learns the token at p + 2 + k from its own states before it.

    Tokens are always the true ones: a drafter trained on its own guesses learns less. No loss compares its states with
    the target's, which they need not resemble in this method. A position is learned where the next token of the text
    lies in the draft vocabulary; the official code asks it of the target's most probable token there. The loss itself
    is `VocabularyLoss` of `losses`, which `DraftModule.loss` calls.

    Raises:
        UserError: if a tap is no layer of the target or the widths do not fit; see DraftModule for others.
    """

    drafter_class = Eagle3
    config: Eagle3TrainConfig
    drafter: Eagle3
