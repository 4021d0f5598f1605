"""The interface of everything that proposes tokens while decoding, trained or not.

Shapes: B rows, F frontier nodes, H depths scored, Q entries of the draft vocabulary or candidates of a node, R ranks
used, N new positions, M nodes of a pass, S virtual nodes of a node, D hidden size (the target's, or that of the
drafter's own states), V target vocabulary, O nodes with their own values.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..compiler import Compiler
from ..config_checks import check_sizes
from ..errors import UserError
from ..target.early_layers import EarlyLayers
from ..target.kv_cache import RowCache
from ..token_tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The nodes of a growing tree whose children the drafter proposes next."""

    nodes_BF: Tensor
    """Index of each node in the tree, int64; 0 is the root."""
    parents_BF: Tensor
    """Index of each node's parent in the tree; -1 for the root."""
    tokens_BF: Tensor
    """Token of each node, int64."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of the children of a frontier.

    A parallel family scores H > 1 depths at once: depth h scores every descendant h + 1 levels below the frontier node,
    whatever the path between. An autoregressive family has H = 1.
    """

    log_probs_BFHQ: Tensor
    """Draft log-probabilities, float32; minus infinity means "no guess"."""
    token_ids_Q: Tensor | None = None
    """Target-vocabulary id of each entry of a reduced draft vocabulary; None when Q is the whole vocabulary."""
    candidates_BFHQ: Tensor | None = None
    """In place of `token_ids_Q`: the ids of a few candidates, different at each node. Only a drafter that sets this may
    return fewer guesses than requested."""
    states_BFHD: Tensor | None = None
    """The drafter's hidden state that each depth's scores come from: with H = 1 its state at the frontier node, whose
    token it has read. None for a drafter without one. Stopping rules may read it; it costs nothing. It may lie in the
    draft state's memory, which the next `observe` overwrites."""

    @classmethod
    def from_logits(
        cls, logits_BFHQ: Tensor, token_ids_Q: Tensor | None = None, states_BFHD: Tensor | None = None
    ) -> "Scores":
        """Scores of a drafter's logits, normalised in float32 or wider."""
        wide = torch.promote_types(logits_BFHQ.dtype, torch.float32)
        log_probs_BFHQ = logits_BFHQ.to(wide).log_softmax(-1)
        return cls(log_probs_BFHQ=log_probs_BFHQ, token_ids_Q=token_ids_Q, states_BFHD=states_BFHD)

    def best(self, width: int) -> "Proposals":
        """The `width` most probable children of each node, best first.

        Raises:
            UserError: if the draft vocabulary is smaller than `width`.
        """
        entries = self.log_probs_BFHQ.shape[-1]
        if self.candidates_BFHQ is not None:
            top = self.log_probs_BFHQ.topk(min(width, entries), dim=-1)
            missing = (0, width - top.indices.shape[-1])
            tokens = nn.functional.pad(self.candidates_BFHQ.gather(-1, top.indices), missing)
            log_probs = nn.functional.pad(top.values, missing, value=-torch.inf)
            return Proposals(tokens, log_probs > -torch.inf, log_probs)
        if width > entries:
            raise UserError(f"the tree uses the {width} best guesses after a token, but the draft vocabulary has "
                            f"{entries} tokens; choose a narrower tree, such as chain")
        top = self.log_probs_BFHQ.topk(width, dim=-1)
        tokens = top.indices if self.token_ids_Q is None else self.token_ids_Q[top.indices]
        return Proposals(tokens, None, top.values)


@dataclass(frozen=True)
class Proposals:
    """Children by rank, best first."""

    tokens_BFHR: Tensor
    """Target-vocabulary ids; any id where there is no guess."""
    guessed_BFHR: Tensor | None
    """True where the drafter has a guess; None when it has one everywhere."""
    log_probs_BFHR: Tensor
    """Draft log-probabilities of the children."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The target's logits at all nodes of a pass, rejected ones included."""

    tokens_BM: Tensor
    """Token of each node, int64."""
    real_BM: Tensor
    """False at padding nodes; their logits have no meaning."""
    logits_BMV: Tensor
    """The target's next-token logits after each node."""
    places_BM: Tensor
    """Column of the node in the observation's `tokens_BN`; -1 for nodes that were rejected."""


@dataclass(frozen=True, kw_only=True)
class AheadStates:
    """The target's final states at the virtual nodes after the last accepted node of each row."""

    states_BSD: Tensor
    """States by slot; any where there was no such node."""
    present_BS: Tensor
    """True where there was one."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The data a drafter receives after a target pass: the newly accepted tokens and the target's states at them.

    Row b has `counts_B[b]` new positions, left-aligned and padded on the right. The target has processed their tokens
    (the last root and the accepted nodes); it has not yet processed `roots_B`, the token it chose next.
    """

    tokens_BN: Tensor
    """Tokens that the target has processed, int64."""
    counts_B: Tensor
    """Number of real positions in each row."""
    final_BND: Tensor
    """The target's final states (after its last norm) at those tokens."""
    taps: dict[int, Tensor]
    """Outputs of the tapped layers at those tokens, each [B, N, D]."""
    roots_B: Tensor
    """The next token of each row: the root of its next tree."""
    verified: Verified | None = None
    """The target's logits, for drafters with `reads_logits`: at all nodes of a pass, at the last token of a prompt
    chunk."""
    ahead: AheadStates | None = None
    """States at the virtual nodes of a pass; None for a pass without any."""
    host_rows: list[int] | None = None
    """The rows of the state that these are, as known on the host; None where only the device knows them."""
    host_counts: list[int] | None = None
    """`counts_B` as known on the host; None where only the device knows them."""

    def on_host(self, rows_R: Tensor) -> tuple[list[int], list[int]]:
        """(the rows of the state, their numbers of real positions); the host waits for the device if it is not told."""
        rows = rows_R.tolist() if self.host_rows is None else self.host_rows
        return rows, self.counts_B.tolist() if self.host_counts is None else self.host_counts

    @property
    def real_BN(self) -> Tensor:
        """True at real tokens, False at padding."""
        return torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device) < self.counts_B[:, None]

    @property
    def next_BN(self) -> Tensor:
        """The token after each token, int64: the root after the last real one, any token after padding."""
        shifted_BN = torch.cat([self.tokens_BN[:, 1:], self.roots_B[:, None]], dim=1)
        last_B1 = self.counts_B[:, None] - 1
        here_N = torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device)
        return torch.where(here_N == last_B1, self.roots_B[:, None], shifted_BN)


class VerifiedRows(Protocol):
    """Rows that a target verifies, as a drafter sees that has the target run something for it."""

    @property
    def reads_virtual(self) -> bool:
        """True if the virtual nodes of a pass have states."""
        ...

    def early(self, num_layers: int) -> EarlyLayers | None:
        """The first layers in the cache of these rows, or None where no layer runs; verification takes over what they
        computed."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChainLimits:
    """Ends of a chain of drafted tokens (Kangaroo, arXiv:2404.18911, section 3.2).

    Raises:
        UserError: if a limit is out of range.
    """

    gamma: int = 6
    """Most tokens."""
    eta: float = 0.6
    """A token whose distribution peaks below this probability is the chain's last."""

    def __post_init__(self) -> None:
        check_sizes(gamma=self.gamma)
        if not 0 < self.eta < 1:
            raise UserError(f"eta must be above 0 and below 1, got {self.eta}")


class DraftState:
    """Base of the sequence state of a batch of rows; each family has its own subclass.

    What is kept from pass to pass stays at its address (`RowBuffer`, `RowCache`), so that drafting can be replayed as a
    CUDA graph. A growing tree is made anew in each pass.
    """

    @property
    def caches(self) -> tuple[RowCache, ...]:
        """Keys and values of the rows that belong to the drafter alone; none by default."""
        return ()

    def drop_tree(self) -> None:
        """Discard the tree that grew last, in terms of what the host knows: nothing is written on the device."""

    def expect(self, path: int) -> None:
        """Prepare for passes of one shape, of which none accepts more than `path` tokens of a row."""

    def advance(self, counts: Sequence[int]) -> None:
        """Count on the host what a replayed pass has committed on the device: counts[r] tokens of row r."""
        for cache in self.caches:
            cache.advance(counts)


class Proposer(ABC):
    """Proposer of the target's next tokens. Sequence state is passed in, so that rows can join and leave."""

    family: ClassVar[str]
    """Name of the family in artifacts, recipes and reports."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs this drafter reads; none by default."""
        return ()

    @property
    def reach(self) -> int | None:
        """Depths below the root that it can score, for a parallel family; None when there is no limit."""
        return None

    @property
    def reads_logits(self) -> bool:
        """True if observations must contain the target's logits; False by default."""
        return False

    @abstractmethod
    def start(self, rows: int, capacity: int) -> DraftState:
        """An empty state for a batch of `rows` sequences of at most `capacity` tokens, the largest tree included."""

    def join(self, rows: VerifiedRows, count: int, capacity: int) -> DraftState:
        """`start` for `count` sequences that `rows` verifies; drafters of the target's first layers run them there."""
        return self.start(count, capacity)

    @property
    def virtual_nodes(self) -> int:
        """Most virtual nodes that `extended` adds after a node; 0 by default."""
        return 0

    def extended(self, state: DraftState, tree: TokenTree) -> TokenTree:
        """The tree with the virtual nodes whose states the next observation holds; as it is by default.

        Called with what is about to be verified, or read as a prompt. `tree.lookahead` may limit their number.
        """
        return tree

    @abstractmethod
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Update the rows `rows_R` of the state with the observation of the last target pass."""

    @abstractmethod
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes: one draft step.

        The first call after an observation has the root as its frontier; each node is passed once, after its parent.
        """

    @abstractmethod
    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset the rows `rows_R`, so that other sequences can use them."""

    @property
    def chain_limits(self) -> ChainLimits:
        """Limits of a chain that stops at its first unsure token; the paper's by default."""
        return ChainLimits()

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        """Chance that its guess of each rank at each depth is right, as counted on held-out text; None where nobody
        counted."""
        return None

    def compiled(self, compiler: Compiler) -> AbstractContextManager[None]:
        """A block in which its layers run compiled; one without effect for a proposer without layers of its own."""
        return nullcontext()

    def forget(self) -> None:  # noqa: B027 -- most families have nothing to drop
        """Drop what was stored from earlier sequences; most families store nothing but their weights."""

    @abstractmethod
    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R` alone: the new row r is the former row rows_R[r], and no row moves back."""

    def expand_bytes(self) -> int:
        """Bytes of weights that one `expand` reads, own and borrowed; table lookups do not count."""
        return 0

    def observe_bytes(self) -> int:
        """Bytes of weights that one `observe` reads; 0 for families that only store the observation."""
        return 0


def spread(values_BOQ: Tensor, origin_BF: Tensor) -> Tensor:
    """Values of each node of a tree level, [B, F, Q]: row `origin_BF` of the values that the level shares."""
    return values_BOQ.gather(1, origin_BF[..., None].expand(-1, -1, values_BOQ.shape[-1]))
