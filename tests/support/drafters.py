"""Drafters for tests: scripted ones, tables that can be enumerated, and one that passes everything on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from draftsmith.modules import (
    Drafter,
    DraftState,
    Draws,
    Frontier,
    Observation,
    Proposer,
    Scores,
    Target,
)
from draftsmith.modules.interfaces.proposer import (
    SharesTargetRows,
    VerifiedRows,
    started,
)
from draftsmith.modules.target.devices.compiled_layers import Compiler
from draftsmith.modules.token_tree import TokenTree
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

    def read(self, rows_R: Tensor, observation: Observation) -> None:
        """Add the new tokens. The target has processed the last root now; it is the first of them."""
        columns = (rows_R.tolist(), observation.counts_B.tolist(), observation.tokens_BN.tolist(),
                   observation.roots_B.tolist())
        for row, count, tokens, root in zip(*columns, strict=True):
            self.rows[row] = [*self.rows[row][:-1], *tokens[:count], root]


class Untrained(Drafter):
    """A drafter without weights: what only training and artifacts ask for is not there."""

    create = rebuild = forward = project = None  # type: ignore[assignment]

    def describe(self) -> dict[str, Any]:
        return {}

    def bind(self, target: Target) -> None:
        pass


class ScriptedDrafter(Untrained):
    """A drafter that has the full texts and scores the next tokens by `mode`: oracle, wrong, random or mixed."""

    family = "scripted"

    def __init__(self, vocab_size: int, texts: list[list[int]], mode: str, seed: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.texts, self.mode = vocab_size, texts, mode
        self.generator = torch.Generator().manual_seed(seed)

    def start(self, rows: int, capacity: int) -> History:
        return History([[] for _ in range(rows)])

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        assert isinstance(state, History)
        assert observation.final_BND.shape[1] == observation.tokens_BN.shape[1]
        state.read(rows_R, observation)

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


class TableDrafter(Untrained):
    """Recurrent: the children of a node are scored by its token's row of a table [V, Q] of log-probabilities."""

    family = "table"

    def __init__(self, log_q_VQ: Tensor, token_ids_Q: Tensor | None = None) -> None:
        super().__init__()
        self.log_q_VQ, self.ids_Q, self.calls = log_q_VQ, token_ids_Q, 0

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


class WrappedState(DraftState):
    """The other drafter's state, with what a subclass adds."""

    def __init__(self, inner: DraftState) -> None:
        self.inner, self.held, self.caches = inner, (inner,), inner.caches

    def drop_tree(self) -> None:
        self.inner.drop_tree()

    def expect(self, path: int, skipped: bool) -> None:
        self.inner.expect(path, skipped)

    def advance(self, counts: Sequence[int]) -> None:
        self.inner.advance(counts)


class Wrapped(Proposer, SharesTargetRows):
    """Another drafter, of which a subclass changes a part."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.family = inner, inner.family  # type: ignore[misc]
        self.taps, self.reach, self.reads_logits = inner.taps, inner.reach, inner.reads_logits
        self.virtual_nodes, self.chain_limits = inner.virtual_nodes, inner.chain_limits
        self.reads_references, self.reads_own_text = inner.reads_references, inner.reads_own_text

    def state_of(self, state: DraftState) -> DraftState:
        """The other drafter's state, within that of this one."""
        return state

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        return self.inner.rank_chances

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> DraftState:
        return started(self.inner, verified, rows, capacity)

    def open(self, state: DraftState, row_R: Tensor, *, reference: Sequence[int], own_text: Sequence[int]) -> None:
        super().open(state, row_R, reference=reference, own_text=own_text)
        self.inner.open(self.state_of(state), row_R, reference=reference, own_text=own_text)

    def extended(self, state: DraftState, tree: TokenTree) -> TokenTree:
        return self.inner.extended(self.state_of(state), tree)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        self.inner.observe(self.state_of(state), rows_R, observation)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        return self.inner.expand(self.state_of(state), frontier)

    def compiled(self, compiler: Compiler) -> AbstractContextManager[None]:
        return self.inner.compiled(compiler)

    def forget(self) -> None:
        self.inner.forget()
