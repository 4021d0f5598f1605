"""Training a Kangaroo adapter on the target's distributions (arXiv:2404.18911, section 3.1)."""

from dataclasses import dataclass, field

from ...modules.drafters.kangaroo import Kangaroo, KangarooConfig
from .eagle_base import FeatureModule, FeatureTrainConfig


@dataclass(frozen=True, kw_only=True)
class KangarooTrainConfig(FeatureTrainConfig):
    """Shape and training of a Kangaroo adapter."""

    drafter: KangarooConfig = field(default_factory=KangarooConfig)
    """The adapter, and where its chains end."""


class KangarooModule(FeatureModule):
    """A Kangaroo adapter in training: at position p it learns the target's distribution of the token at p + 1.

    Positions and labels are those of the text. In the official code the states move one position to the left and the
    mask of labels does not: the first token is never read there, and the first two of each answer are no labels.
    """

    drafter_class = Kangaroo
    config: KangarooTrainConfig
    drafter: Kangaroo
