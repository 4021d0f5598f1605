"""A drafter and a target whose next token depends on the last one alone: everything about them can be enumerated."""

from typing import Any

import torch
from draftsmith.modules import (
    Drafter,
    Drafts,
    DraftState,
    Draws,
    Features,
    Frontier,
    Observation,
    Scores,
    Target,
    TargetIdentity,
)
from torch import Tensor


class TableDrafter(Drafter):
    """Recurrent: the children of a node are scored by its token's row of a table [V, Q] of log-probabilities."""

    family = "table"

    def __init__(self, log_q_VQ: Tensor, token_ids_Q: Tensor | None = None) -> None:
        super().__init__()
        self.log_q_VQ, self.ids_Q, self.calls = log_q_VQ, token_ids_Q, 0

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None) -> "TableDrafter":
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> "TableDrafter":
        raise NotImplementedError

    def bind(self, target: Target) -> None:
        pass

    @property
    def state_size(self) -> int:
        raise NotImplementedError

    def forward(self, features: Features) -> Drafts:
        raise NotImplementedError

    def project(self, hidden: Tensor, step: int) -> Tensor:
        raise NotImplementedError

    def start(self, rows: int, capacity: int) -> DraftState:
        return DraftState()

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        pass

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        self.calls += 1
        return Scores(log_probs_BFHQ=self.log_q_VQ[frontier.tokens_BF][:, :, None], token_ids_Q=self.ids_Q)


class CandidateDrafter(TableDrafter):
    """Recurrent: names its candidates, those of token t are t, t + 1, … modulo the target's vocabulary."""

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        tokens_BF1 = frontier.tokens_BF[..., None]
        ids_BFQ = (tokens_BF1 + torch.arange(self.log_q_VQ.shape[1])) % len(self.log_q_VQ)
        log_q_BFQ = self.log_q_VQ[frontier.tokens_BF]
        return Scores(log_probs_BFHQ=log_q_BFQ[:, :, None], candidates_BFHQ=ids_BFQ[:, :, None])


class DepthDrafter(TableDrafter):
    """One-shot: depth d is scored by row d of a table [H, Q], whatever the tokens; `roots` shifts rows of the batch."""

    family = "depth"

    @property
    def reach(self) -> int:
        return self.log_q_VQ.shape[0]

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        assert frontier.nodes_BF.shape[1] == 1
        assert bool((frontier.parents_BF == -1).all())
        self.calls += 1
        batch = frontier.nodes_BF.shape[0]
        return Scores(log_probs_BFHQ=self.log_q_VQ.expand(batch, 1, -1, -1), token_ids_Q=self.ids_Q)


def random_log_probs(*shape: int, seed: int = 0, sharpness: float = 1.0) -> Tensor:
    """log-probabilities over the last dimension, float32."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(*shape, generator=generator)).log_softmax(-1)


def draws_for(rows: int, temperature: float = 1.0, *, seed: int = 3, place: int = 1) -> Draws:
    """Random numbers for `rows` requests, numbered from 0."""
    return Draws(seed=seed, requests_B=torch.arange(rows), places_B=torch.full((rows,), place),
                 temperature_B=torch.full((rows,), temperature))
