"""The interface of everything that proposes tokens while decoding, trained or not.

Shapes: B rows, F frontier nodes, H depths answered, Q entries of the draft vocabulary or candidates of a node, R ranks
used, N new positions, M nodes of a pass, D hidden size, V target vocabulary, O nodes asked about.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Nodes of a growing tree whose children are asked for."""

    nodes_BF: Tensor
    """Index of each node in the tree, int64; 0 is the root."""
    parents_BF: Tensor
    """Index of each node's parent in the tree; -1 for the root."""
    tokens_BF: Tensor
    """Token of each node, int64."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of the children of a frontier.

    A one-shot family answers H > 1 depths at once: level h scores every descendant h + 1 levels below the frontier
    node, whatever the path between. A recurrent family answers H = 1.
    """

    log_probs_BFHQ: Tensor
    """Draft log-probabilities, float32; minus infinity stands for "no guess"."""
    token_ids_Q: Tensor | None = None
    """Target-vocabulary id of each entry of a reduced draft vocabulary; None when Q is the whole vocabulary."""
    candidates_BFHQ: Tensor | None = None
    """Instead of `token_ids_Q`: the ids of a few candidates, other ones at every node. Only a drafter that answers
    this way may have fewer guesses than asked for."""

    def best(self, width: int) -> "Proposals":
        """The `width` likeliest children of each node, best first.

        Raises:
            ValueError: if the draft vocabulary is smaller than `width`.
        """
        entries = self.log_probs_BFHQ.shape[-1]
        if self.candidates_BFHQ is not None:
            top = self.log_probs_BFHQ.topk(min(width, entries), dim=-1)
            missing = (0, width - top.indices.shape[-1])
            tokens = nn.functional.pad(self.candidates_BFHQ.gather(-1, top.indices), missing)
            log_probs = nn.functional.pad(top.values, missing, value=-torch.inf)
            return Proposals(tokens, log_probs > -torch.inf, log_probs)
        if width > entries:
            raise ValueError(f"the tree uses the {width} best proposals of a node, the draft vocabulary has {entries}")
        top = self.log_probs_BFHQ.topk(width, dim=-1)
        tokens = top.indices if self.token_ids_Q is None else self.token_ids_Q[top.indices]
        return Proposals(tokens, None, top.values)


@dataclass(frozen=True)
class Proposals:
    """Children by rank, best first."""

    tokens_BFHR: Tensor
    """Target-vocabulary ids; any id where there is no guess."""
    guessed_BFHR: Tensor | None
    """Where the drafter has a guess at all; None when it has one everywhere."""
    log_probs_BFHR: Tensor
    """Their draft log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What the target said at the nodes of a pass, the rejected ones included."""

    tokens_BM: Tensor
    """Token of each node, int64."""
    real_BM: Tensor
    """False at padding nodes, where the logits mean nothing."""
    logits_BMV: Tensor
    """The target's next-token logits behind each node."""
    places_BM: Tensor
    """Column of the node in the observation's `tokens_BN`; -1 for nodes that were rejected."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything a drafter may look at after a pass: what was newly accepted, and what the target thought there.

    Row b has `counts_B[b]` new positions, left-aligned and padded on the right. Their tokens have been through the
    target (the last root and the accepted nodes); `roots_B` is the token the target decided next, which has not.
    """

    tokens_BN: Tensor
    """Tokens that went through the target, int64."""
    counts_B: Tensor
    """How many of them are real, per row."""
    final_BND: Tensor
    """The target's final states (after its last norm) at those tokens."""
    taps: dict[int, Tensor]
    """Outputs of the tapped layers at those tokens, each [B, N, D]."""
    roots_B: Tensor
    """The next token of each row: the root of its next tree."""
    verified: Verified | None = None
    """The target's logits, for drafters with `reads_logits`: at all nodes of a pass, at the last token of a prompt
    chunk."""

    @property
    def real_BN(self) -> Tensor:
        """Where a token is real and no padding."""
        return torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device) < self.counts_B[:, None]

    @property
    def behind_BN(self) -> Tensor:
        """The token behind each one, int64; behind the last real one it is the root. Behind padding it is any."""
        shifted_BN = torch.cat([self.tokens_BN[:, 1:], self.roots_B[:, None]], dim=1)
        last_B1 = self.counts_B[:, None] - 1
        here_N = torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device)
        return torch.where(here_N == last_B1, self.roots_B[:, None], shifted_BN)


class DraftState:
    """Sequence state of a batch of rows; each family keeps its own kind."""


class Proposer(ABC):
    """Guesses what the target says next; sequence state stays outside, so that rows can come, go and share it."""

    family: ClassVar[str]
    """Name of the family in artifacts, recipes and reports."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs this drafter reads; none by default."""
        return ()

    @property
    def reach(self) -> int | None:
        """How deep below the root it can score: a one-shot family's depths; None for as deep as anyone likes."""
        return None

    @property
    def reads_logits(self) -> bool:
        """Whether observations must carry the target's logits; they need not by default."""
        return False

    @abstractmethod
    def start(self, rows: int, capacity: int) -> DraftState:
        """An empty state for a batch of `rows` sequences of at most `capacity` tokens, the largest tree included."""

    @abstractmethod
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Take in what the last pass taught about the rows `rows_R` of the state; N counts new positions."""

    @abstractmethod
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """One draft step: scores of the children of the frontier nodes.

        The first call after an observation gets the root; a node is asked for once, after its parent.
        """

    @abstractmethod
    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget everything about the rows `rows_R`: other sequences take their places."""

    def forget(self) -> None:  # noqa: B027 -- doing nothing is right for most
        """Drop what was learnt from earlier sequences; most families keep nothing beyond their weights."""

    @abstractmethod
    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let the state's row r be the former row rows_R[r], the others leave; later rows are pulled forward only."""

    def expand_bytes(self) -> int:
        """Bytes of weights that one `expand` reads, own and borrowed ones; lookups in a table count nothing."""
        return 0

    def observe_bytes(self) -> int:
        """Bytes of weights that one `observe` reads; most families only note what they will read later."""
        return 0


def spread(values_BOQ: Tensor, origin_BF: Tensor) -> Tensor:
    """The values of each node of a level, [B, F, Q]."""
    return values_BOQ.gather(1, origin_BF[..., None].expand(-1, -1, values_BOQ.shape[-1]))
