"""Training a Falcon drafter on the target's states and distributions (arXiv:2412.12639, section 3.3).

Shapes: B rows, L positions, K positions of a block.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...modules.drafters.falcon import Falcon, FalconConfig
from ...modules.features import Features
from ...modules.interfaces.drafter import Drafts
from ...modules.target.model import Target
from ..losses.objectives import Objective, ObjectiveName
from .eagle_base import FeatureModule, FeatureTrainConfig

GLANCED_FIRST, GLANCED_LAST = 0.45, 0.1
"""Replaced inputs as a share of the wrong guesses, at the start and at the end of the training: the official code's.
The paper's falls from 0.4 to 0."""


@dataclass(frozen=True, kw_only=True)
class FalconTrainConfig(FeatureTrainConfig):
    """Shape and training of a Falcon drafter."""

    objective: ObjectiveName = "soft"
    """As for all families. The official code has 0.9 of it, with the target at temperature 0.95, and 0.1 `hard`."""
    hard_share: float = 0.0
    """Share of the cross entropy with the next token in the objective; the official code's is 0.1."""
    feature_weight: float = 10.0
    """As for all families; the paper's weights are 1.0 for states and 0.1 for the objective."""
    decay: float = 1.0
    """Weight of step k in the loss is decay ** k; the paper weights all tokens of a block equally."""
    glancing: bool = False
    """Train as the official code does (CSGD): the drafter first guesses without a gradient; at as many positions as a
    share of its wrong guesses, drawn at random, the input is replaced by the target's true state and token a block
    later, which the query there is to estimate. This is the code's way for blocks of two; for larger ones it replaces
    runs. `blocks` above 1 is something else: it reads the drafter's own estimates, as HASS does."""
    drafter: FalconConfig = field(default_factory=FalconConfig)
    """The drafter."""

    def objective_settings(self) -> Objective:
        """The objective with its share of hard labels."""
        return replace(super().objective_settings(), hard_share=self.hard_share)


class FalconModule(FeatureModule):
    """A Falcon drafter in training: a block that ends at p learns the target's states of p + 1 to p + K and the tokens
    after them. Every position is such an end."""

    drafter_class = Falcon
    config: FalconTrainConfig
    drafter: Falcon

    def __init__(
        self, target: Target, config: FalconTrainConfig | None = None, *, token_counts: Tensor | None = None
    ) -> None:
        super().__init__(target, config or FalconTrainConfig(), token_counts=token_counts)

    def training_drafts(self, features: Features) -> tuple[Drafts, Features]:
        """(the drafter's states, with `glancing` after a glance at some true ones, the batch)."""
        if self.config.glancing and self.drafter.training:
            return self.drafter(features, self.glanced(features)), features
        return super().training_drafts(features)

    @torch.no_grad()
    def glanced(self, features: Features) -> Tensor:
        """Positions whose input is replaced, drawn among every K-th one with a label, bool [B, L].

        Their number in a row is the share of now, times the row's guesses of the last token of a block that are wrong.
        """
        size = self.drafter.block_size
        labels_BL, valid_BL = features.labels(size + 1)
        guessed_BL = self._guessed(self.drafter.rollout(features, 1)[-1])
        share = GLANCED_FIRST + (GLANCED_LAST - GLANCED_FIRST) * self.progress
        counts_B = (((guessed_BL != labels_BL) & valid_BL).sum(1) * share).long()
        every_BL = valid_BL & (valid_BL.cumsum(1) % size == (1 % size))
        # From torch's generator on the CPU, which the seed of the micro-batch determines.
        drawn_BL = torch.rand(labels_BL.shape).to(labels_BL.device).masked_fill(~every_BL, 2.0)
        places_BL = drawn_BL.argsort(dim=1).argsort(dim=1)
        return every_BL & (places_BL < counts_B[:, None])

    def _guessed(self, estimate_BLD: Tensor) -> Tensor:
        """The most probable token of each estimated state, [B, L]."""
        rows = [self.drafter.project(row_LD, 0).argmax(-1) for row_LD in estimate_BLD]
        guessed_BL = torch.stack(rows)
        return guessed_BL if self.drafter.token_ids_Q is None else self.drafter.token_ids_Q[guessed_BL]
