"""The interface of everything that proposes tokens while decoding, trained or not.

Shapes: B rows, F frontier nodes, H depths scored, Q entries of the draft vocabulary or candidates of a node, R ranks
used, N new positions, M nodes of a pass, S virtual nodes of a node, D hidden size (the target's, or that of the
drafter's own states), V target vocabulary, O nodes with their own values, P places of held-out text, K draft steps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from ..config_checks import Chance, CheckedSettings, Parts
from ..errors import UserError
from ..row_buffers import RowBuffer
from ..target.devices.compiled_layers import Compiler
from ..target.kv_cache import RowCache
from ..target.partial_passes import EarlyLayers
from ..token_tree import TokenTree
from ..verification.sampling import widened


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The nodes of a growing tree whose children the drafter proposes next."""

    nodes_BF: Tensor  # Index of each node in the tree, int64; 0 is the root
    parents_BF: Tensor  # Index of each node's parent in the tree; -1 for the root
    tokens_BF: Tensor  # Token of each node, int64

    def parents_among(self, nodes_BM: Tensor) -> Tensor:
        """Column of each node's parent among the given nodes of the tree, [B, F]; 0 where it is not among them."""
        return (self.parents_BF[:, :, None] == nodes_BM[:, None]).long().argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of the children of a frontier. A parallel family scores H > 1 depths at once: depth h scores
    every descendant h + 1 levels below the frontier node, whatever the path between. Autoregressive ones: H = 1."""

    log_probs_BFHQ: Tensor  # Draft log-probabilities, float32; minus infinity means "no guess"
    token_ids_Q: Tensor | None = None  # Target-vocabulary id of each entry of a reduced vocabulary; None for the whole
    candidates_BFHQ: Tensor | None = None
    """In place of `token_ids_Q`: the ids of a few candidates, different at each node. Only a drafter that sets this may
    return fewer guesses than requested."""
    all_guesses: bool = False  # True if every candidate is a guess: then none is asked while a tree grows
    states_BFHD: Tensor | None = None
    """The drafter's hidden state that each depth's scores come from: with H = 1 its state at the frontier node, whose
    token it has read. None for a drafter without one. Stopping rules may read it; it costs nothing. It may lie in the
    draft state's memory, which the next `observe` overwrites."""

    @classmethod
    def from_logits(cls, logits_BFHQ: Tensor, token_ids_Q: Tensor | None = None,
                    states_BFHD: Tensor | None = None) -> "Scores":
        """Scores of a drafter's logits, normalised in float32 or wider."""
        # In half precision several tokens would have one probability, and their order would be lost.
        log_probs_BFHQ = widened(logits_BFHQ).log_softmax(-1)
        return cls(log_probs_BFHQ=log_probs_BFHQ, token_ids_Q=token_ids_Q, states_BFHD=states_BFHD)

    def best(self, width: int) -> tuple[Tensor, Tensor | None]:
        """(ids of the `width` most probable children of each node, best first, any where there is no guess; True where
        there is one, or None where all are), [B, F, H, R] each. UserError if the draft vocabulary is smaller."""
        entries = self.log_probs_BFHQ.shape[-1]
        if self.candidates_BFHQ is not None:
            top = self.log_probs_BFHQ.topk(min(width, entries), dim=-1)
            # A tree has one width for all rows: guesses that a node lacks are padding without a chance.
            missing = (0, width - top.indices.shape[-1])
            tokens_BFHR = nn.functional.pad(self.candidates_BFHQ.gather(-1, top.indices), missing)
            if self.all_guesses and width <= entries:
                return tokens_BFHR, None
            return tokens_BFHR, nn.functional.pad(top.values, missing, value=-torch.inf) > -torch.inf
        if width > entries:
            raise UserError(f"the tree uses the {width} best guesses after a token, but the draft vocabulary has "
                            f"{entries} tokens; choose a narrower tree, such as chain")
        best_BFHR = self.log_probs_BFHQ.topk(width, dim=-1).indices
        return best_BFHR if self.token_ids_Q is None else self.token_ids_Q[best_BFHR], None


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The target's logits at all nodes of a pass, rejected ones included."""

    tokens_BM: Tensor  # Token of each node, int64
    real_BM: Tensor  # False at padding nodes; their logits have no meaning
    logits_BMV: Tensor  # The target's next-token logits after each node
    places_BM: Tensor  # Column of the node in the observation's `tokens_BN`; -1 for nodes that were rejected


@dataclass(frozen=True, kw_only=True)
class AheadStates:
    """The target's final states at the virtual nodes after the last accepted node of each row."""

    states_BSD: Tensor  # States by slot; any where there was no such node
    present_BS: Tensor  # True where there was one


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The data a drafter receives after a target pass: the newly accepted tokens and the target's states at them. Row b
    has `counts_B[b]` new positions, left-aligned and padded on the right. The target has processed their tokens (the
    last root and the accepted nodes); it has not yet processed `roots_B`, the token it chose next."""

    tokens_BN: Tensor  # Tokens that the target has processed, int64
    counts_B: Tensor  # Number of real positions in each row
    final_BND: Tensor  # The target's final states (after its last norm) at those tokens
    taps: dict[int, Tensor]  # Outputs of the tapped layers at those tokens, each [B, N, D]
    roots_B: Tensor  # The next token of each row: the root of its next tree
    verified: Verified | None = None  # For drafters with `reads_logits`: of all nodes, or of a chunk's last token
    ahead: AheadStates | None = None  # States at the virtual nodes of a pass; None for a pass without any
    host_rows: list[int] | None = None  # The rows of the state that these are; None where the device alone knows them
    prompt: bool = False  # True for pieces of prompts
    host_counts: list[int] | None = None  # `counts_B` as known on the host; None where only the device knows them

    def on_host(self, rows_R: Tensor) -> tuple[list[int], list[int]]:
        """(the rows of the state, their numbers of real positions); the host waits for the device if it is not told."""
        rows = rows_R.tolist() if self.host_rows is None else self.host_rows
        return rows, self.counts_B.tolist() if self.host_counts is None else self.host_counts

    def newest(self, states_BND: Tensor) -> Tensor:
        """The states at each row's last real position, [B, D]; any where it has none."""
        last_B = (self.counts_B - 1).clamp(min=0)
        return states_BND[torch.arange(len(last_B), device=last_B.device), last_B]

    @property
    def real_BN(self) -> Tensor:
        """True at real tokens, False at padding."""
        return torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device) < self.counts_B[:, None]

    @property
    def next_BN(self) -> Tensor:
        """The token after each token, int64: the root after the last real one, any token after padding."""
        shifted_BN = torch.cat([self.tokens_BN[:, 1:], self.roots_B[:, None]], dim=1)
        # A row's last real token is not in the last column where another row accepted more.
        last_B1 = self.counts_B[:, None] - 1
        here_N = torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device)
        return torch.where(here_N == last_B1, self.roots_B[:, None], shifted_BN)


class DraftState:
    """Base of the sequence state of a batch of rows; each family has its own subclass. What is kept from pass to pass
    stays at its address (`RowBuffer`, `RowCache`), so that drafting can be replayed as a CUDA graph. A growing tree is
    made anew in each pass."""

    held: Sequence["RowBuffer | RowCache | DraftState"] = ()  # With an entry for each row, for `clear` and `keep`
    caches: Sequence[RowCache] = ()  # Keys and values of the rows that belong to the drafter alone

    def drop_tree(self) -> None:
        """Discard the tree that grew last, in terms of what the host knows: nothing is written on the device."""

    def clear(self, rows_R: Tensor) -> None:
        """Reset the rows `rows_R`, so that other sequences can use them."""
        self.drop_tree()
        for part in self.held:
            part.clear(rows_R)

    def keep(self, rows_R: Tensor) -> None:
        """Keep the rows `rows_R` alone: the new row r is the former row rows_R[r], and no row moves back."""
        self.drop_tree()
        for part in self.held:
            part.keep(rows_R)

    def expect(self, path: int, skipped: bool) -> None:
        """Prepare for passes of one shape, of which none accepts more than `path` tokens of a row; before some of them
        nothing is drafted if `skipped`."""

    def advance(self, counts: Sequence[int]) -> None:
        """Count on the host what a replayed pass has committed on the device: counts[r] tokens of row r."""
        for cache in self.caches:
            cache.advance(counts)


State = TypeVar("State", bound=DraftState, default=Any)
"""A family's own state: what its `start` returns is what its `observe` and `expand` get."""


@dataclass(frozen=True, kw_only=True)
class ChainLimits(CheckedSettings):
    """Ends of a chain of drafted tokens (Kangaroo, arXiv:2404.18911, section 3.2); UserError if one is out of range."""

    gamma: Parts = 6  # Most tokens
    # A token whose distribution peaks below this probability is the chain's last. At 0 no chain would ever end early,
    # at 1 every chain would: either bound would switch the rule off without a word.
    eta: Chance = 0.6


class Proposer(ABC, Generic[State]):
    """Proposer of the target's next tokens. Sequence state is passed in, so that rows can join and leave."""

    family: ClassVar[str]  # Name of the family in artifacts, recipes and reports
    taps: tuple[int, ...] = ()  # Target layers whose outputs it reads
    reach: int | None = None  # Depths below the root that a parallel family can score; None when there is no limit
    reads_logits: bool = False  # True if observations must contain the target's logits
    virtual_nodes: int = 0  # Most virtual nodes that `extended` adds after a node of a pass
    chain_limits: ChainLimits = ChainLimits()  # Ends of a chain of the policy `early-exit`
    reads_references: bool = False  # True if it copies from a request's `reference`
    reads_own_text: bool = False  # True if it can read a request's `draft_tokens` in place of the prompt

    @abstractmethod
    def start(self, rows: int, capacity: int) -> State:
        """An empty state for a batch of `rows` sequences of at most `capacity` tokens, the largest tree included."""

    def open(self, state: State, row_R: Tensor, *, reference: Sequence[int], own_text: Sequence[int]) -> None:
        """Reset a row of the state for another sequence, with the tokens of a text that its answer may resemble and of
        one that is read in place of its prompt, if there are any; most read neither."""
        state.clear(row_R)

    @abstractmethod
    def observe(self, state: State, rows_R: Tensor, observation: Observation) -> None:
        """Update the rows `rows_R` of the state with the observation of the last target pass."""

    @abstractmethod
    def expand(self, state: State, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes: one draft step. The first call after an observation has the
        root as its frontier; each node is passed once, after its parent."""

    def extended(self, state: State, tree: TokenTree) -> TokenTree:
        """The tree, to be verified or read as a prompt, with the virtual nodes at which the target makes its guesses
        (arXiv:2405.18628), whose states the next observation holds; `tree.lookahead` may limit their number."""
        return tree

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        """Chance that a guess at virtual nodes of each rank at each depth is right, as counted on held-out text; None
        where nobody counted."""
        return None

    def count_ranks(self, table_PK: Tensor) -> None:
        """Keep the rank of the right token at P held-out places for each of K draft steps, for `rank_chances`."""

    def compiled(self, compiler: Compiler) -> AbstractContextManager[None]:
        """A block in which layers of its own run compiled."""
        return nullcontext()

    def forget(self) -> None:
        """Drop what it has stored, besides weights, from earlier sequences."""


def spread(values_BOQ: Tensor, origin_BF: Tensor) -> Tensor:
    """Values of each node of a tree level, [B, F, Q]: row `origin_BF` of the values that the level shares."""
    return values_BOQ.gather(1, origin_BF[..., None].expand(-1, -1, values_BOQ.shape[-1]))


class VerifiedRows(Protocol):
    """Rows that a target verifies, as a drafter sees that has the target run something for it."""

    reads_virtual: bool  # True if the virtual nodes of a pass have states

    def early(self, num_layers: int) -> EarlyLayers | None:
        """The first layers in the cache of these rows, or None where none runs; verification takes over what ran."""
        ...


class SharesTargetRows(ABC):
    """A proposer for which the target runs something in the rows that are verified: its first layers, virtual nodes."""

    @abstractmethod
    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> DraftState:
        """`Proposer.start` for sequences that are the rows of `verified`; None where these are not to be had."""


class JudgesGuesses(ABC):
    """A drafter that estimates the chance of what it guesses next before the guess is chosen (arXiv:2607.05147)."""

    judges: bool  # True if this drafter of the family does
    judge_temperatures_K: Tensor  # Temperature of its judgement at each draft step; 1 before they are calibrated

    @abstractmethod
    def judge(self, states: Tensor, step: int) -> Tensor:
        """Logit [...] of the acceptance of a guess made from states [..., D] that `project` reads at a step."""


def started(drafter: Proposer, rows: VerifiedRows | None, count: int, capacity: int) -> DraftState:
    """An empty state for `count` sequences that `rows` verifies, which it shares if it can; None for no such rows."""
    if isinstance(drafter, SharesTargetRows):
        return drafter.start(count, capacity, rows)
    state: DraftState = drafter.start(count, capacity)
    return state
