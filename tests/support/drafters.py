"""Scripted drafters for tests: always right, random, or always wrong.

They are autoregressive (one level in each call), unlike Medusa, so that the loop is tested with both kinds.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from draftsmith.modules import (
    Drafter,
    Drafts,
    DraftState,
    Features,
    Frontier,
    Observation,
    Scores,
    Target,
    TargetIdentity,
)
from torch import Tensor


@dataclass
class History(DraftState):
    """Tokens of each row (the root last), and the depth of each node of the growing tree."""

    rows: list[list[int]]
    depths: dict[tuple[int, int], int] = field(default_factory=dict)
    paths: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def clear(self, rows_R: Tensor) -> None:
        for row in rows_R.tolist():
            self.rows[row] = []

    def keep(self, rows_R: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows_R.tolist()]


class ScriptedDrafter(Drafter):
    """A drafter that has the full texts and scores the next tokens by `mode`: oracle, wrong, random or mixed."""

    family = "scripted"

    def __init__(self, vocab_size: int, texts: list[list[int]], mode: str, seed: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.texts, self.mode = vocab_size, texts, mode
        self.generator = torch.Generator().manual_seed(seed)

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None) -> "ScriptedDrafter":
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> "ScriptedDrafter":
        return cls(identity.vocab_size, [], "random")

    def bind(self, target: Target) -> None:
        pass

    @property
    def state_size(self) -> int:
        raise NotImplementedError

    def forward(self, features: Features) -> Drafts:
        raise NotImplementedError

    def project(self, hidden: Tensor, step: int) -> Tensor:
        raise NotImplementedError

    def start(self, rows: int, capacity: int) -> History:
        return History([[] for _ in range(rows)])

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        assert isinstance(state, History)
        for place, row in enumerate(rows_R.tolist()):
            new = observation.tokens_BN[place, : int(observation.counts_B[place])].tolist()
            # The target has processed the last root now; it is the first of the new tokens.
            state.rows[row] = [*state.rows[row][:-1], *new, int(observation.roots_B[place])]
            assert observation.final_BND.shape[1] == observation.tokens_BN.shape[1]

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        assert isinstance(state, History)
        batch, width = frontier.nodes_BF.shape
        scores = torch.rand(batch, width, 1, self.vocab_size, generator=self.generator)
        for row in range(batch):
            for column in range(width):
                node, parent = int(frontier.nodes_BF[row, column]), int(frontier.parents_BF[row, column])
                depth = 0 if parent < 0 else state.depths[row, parent] + 1
                state.depths[row, node] = depth
                truth = self._truth(state.rows[row], depth)
                if truth is not None and self.mode != "random":
                    hit = self.mode == "oracle" or (
                        self.mode == "mixed" and bool(torch.rand((), generator=self.generator) < 0.6))
                    scores[row, column, 0, truth] = 4.0 if hit else -1.0
        return Scores(log_probs_BFHQ=scores.log_softmax(-1))

    def _truth(self, known: list[int], depth: int) -> int | None:
        for text in self.texts:
            if text[: len(known)] == known and len(known) + depth < len(text):
                return text[len(known) + depth]
        return None


class TargetDrafter(ScriptedDrafter):
    """A drafter with the target's own distribution; logits are cached by prefix."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.vocab_size, [], "target")
        self.target = [target]
        self.known: dict[tuple[int, ...], Tensor] = {}

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        assert isinstance(state, History)
        batch, width = frontier.nodes_BF.shape
        scores = torch.empty(batch, width, 1, self.vocab_size, dtype=torch.float64)
        for row in range(batch):
            for column in range(width):
                node, parent = int(frontier.nodes_BF[row, column]), int(frontier.parents_BF[row, column])
                above = [] if parent < 0 else [*state.paths[row, parent], int(frontier.tokens_BF[row, column])]
                state.paths[row, node] = above
                scores[row, column, 0] = self.logits(tuple(state.rows[row] + above))
        return Scores(log_probs_BFHQ=scores.log_softmax(-1))

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self.known:
            with self.target[0].native() as model, torch.no_grad():
                self.known[prefix] = model(torch.tensor([prefix])).logits[0, -1]
        return self.known[prefix]
