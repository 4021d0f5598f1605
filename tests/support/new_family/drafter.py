"""Bigram: the last token alone predicts the next one. The smallest family that drafts; nobody would ship it.

Shapes: B rows, L positions, D hidden size, F frontier nodes, Q entries of the draft vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes, settings_of
from ..features import Features
from ..interfaces.drafter import DrafterConfig, Drafts
from ..interfaces.family_card import FamilyCard
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..target.loading.identity import TargetIdentity
from ..target.model import Target
from .parts.shared_embeddings import BorrowingDrafter


@dataclass(frozen=True, kw_only=True)
class BigramConfig(DrafterConfig):
    """The shape of a bigram drafter."""

    width: int = 64
    """Width of its hidden layer."""

    def __post_init__(self) -> None:
        check_sizes(width=self.width, vocabulary_size=self.vocabulary_size)


class Bigram(BorrowingDrafter):
    """up(SiLU(down(e(x_p)))), read by the target's output layer, predicts x_{p+1}.

    Own weights: `down.weight` [width, D], `up.weight` [D, width], and with a reduced vocabulary its ids, `token_ids`.
    """

    family = "bigram"
    card = FamilyCard(name="bigram", guesses="the last token alone predicts the next one", cost="next to nothing")
    export_refusal = "no serving engine runs a bigram drafter; decode the artifact with draftsmith"

    def __init__(self, config: BigramConfig, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size=hidden_size, vocab_size=vocab_size, vocabulary_size=config.vocabulary_size)
        self.config = config
        self.down = nn.Linear(hidden_size, config.width, bias=False)
        self.up = nn.Linear(config.width, hidden_size, bias=False)

    @classmethod
    def create(cls, config: BigramConfig, target: Target, token_ids_Q: Tensor | None = None) -> Self:
        """A new drafter for `target`, bound to it. Raises UserError when ids and settings do not agree."""
        drafter = cls(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        drafter.attach(target, token_ids_Q)
        return drafter

    def describe(self) -> dict[str, Any]:
        """The settings, JSON-ready."""
        return asdict(self.config)

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        config = BigramConfig(**settings_of(description, BigramConfig, "a bigram drafter is"))
        return cls(config, hidden_size=identity.hidden_size, vocab_size=identity.vocab_size)

    @property
    def reads_states(self) -> bool:
        """False: it reads tokens alone."""
        return False

    @property
    def unrolls(self) -> int:
        """Its only step, applied repeatedly."""
        return 0

    def forward(self, features: Features) -> Drafts:
        """The states of all positions, each of which predicts the next token."""
        return Drafts(hidden_BLKD=self._states(features.tokens_BL)[:, :, None], offsets=(1,))

    def _states(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.up(functional.silu(self.down(self._embed(tokens))))
        return states

    def start(self, rows: int, capacity: int) -> DraftState:
        """No state: a node's own token decides its children."""
        return DraftState()

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Nothing to store."""

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes."""
        logits_BFQ = self.project(self._states(frontier.tokens_BF), 0)
        return Scores.from_logits(logits_BFQ[:, :, None], self.token_ids)

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Nothing to reset."""

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Nothing to move."""
