"""Bigram: the last token alone predicts the next one. The smallest family that drafts; nobody would ship it.

Shapes: B rows, L positions, D hidden size, F frontier nodes, Q entries of the draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config_checks import Size
from ...features import Features
from ...interfaces.drafter import DrafterConfig, Drafts, FamilyCard, Training
from ...interfaces.proposer import DraftState, Frontier, Observation, Scores
from ...parts.shared_embeddings import BorrowingDrafter, Sizes
from ...target.draft_vocabulary import OwnOutput
from ...target.model import Target


@dataclass(frozen=True, kw_only=True)
class BigramConfig(DrafterConfig):
    """The shape of a bigram drafter."""

    width: Size = 64
    """Width of its hidden layer."""
    own_output: bool = False
    """Train an output layer of its own, one for all steps, which starts as the target's."""


class Bigram(BorrowingDrafter[DraftState]):
    """up(SiLU(down(e(x_p)))), read by the target's output layer, predicts x_{p+1}.

    Own weights: `down.weight` [width, D], `up.weight` [D, width], with an output layer of its own `outputs.0.weight`
    [Q, D], and with a reduced vocabulary its ids, `token_ids`.
    """

    family = "bigram"
    card = FamilyCard(name="bigram", guesses="the last token alone predicts the next one", cost="next to nothing")
    export_refusal = "no serving engine runs a bigram drafter; decode the artifact with draftsmith"

    config: BigramConfig
    config_class = BigramConfig
    trained_as = Training(objective="soft")
    reads_states = False
    unrolls = 0  # Its only step, applied repeatedly.

    def __init__(self, config: BigramConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.down = nn.Linear(sizes.hidden_size, config.width, bias=False)
        self.up = nn.Linear(config.width, sizes.hidden_size, bias=False)
        if config.own_output:
            entries = config.vocabulary_size or sizes.vocab_size
            self.outputs = nn.ModuleList([OwnOutput(sizes.hidden_size, entries, bias=False)])

    def initialise(self, target: Target) -> None:
        """Keep torch's random weights but for the output layer."""
        for layer in self.outputs:
            layer.weight.copy_(self.output_rows().weight_QD)

    def forward(self, features: Features) -> Drafts:
        """The states of all positions, each of which predicts the next token."""
        return Drafts(hidden_BLKD=self._states(features.tokens_BL)[:, :, None], offsets=(1,))

    def _states(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.up(functional.silu(self.down(self.embed(tokens))))
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
