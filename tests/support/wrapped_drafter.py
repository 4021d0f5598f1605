"""A drafter that passes everything on to another one, for tests that change one part of its work."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from draftsmith.modules import DraftState, Frontier, Observation, Proposer, Scores
from draftsmith.modules.compiler import Compiler
from draftsmith.modules.interfaces.proposer import ChainLimits, VerifiedRows
from draftsmith.modules.target.kv_cache import RowCache
from draftsmith.modules.token_tree import TokenTree
from torch import Tensor


class WrappedState(DraftState):
    """The other drafter's state, with what a subclass adds."""

    def __init__(self, inner: DraftState) -> None:
        self.inner = inner

    @property
    def caches(self) -> tuple[RowCache, ...]:
        return self.inner.caches

    def drop_tree(self) -> None:
        self.inner.drop_tree()

    def expect(self, path: int) -> None:
        self.inner.expect(path)

    def advance(self, counts: Sequence[int]) -> None:
        self.inner.advance(counts)


class Wrapped(Proposer):
    """Another drafter, of which a subclass changes a part."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.family = inner, inner.family  # type: ignore[misc]

    def state_of(self, state: DraftState) -> DraftState:
        """The other drafter's state, within that of this one."""
        return state

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def reach(self) -> int | None:
        return self.inner.reach

    @property
    def reads_logits(self) -> bool:
        return self.inner.reads_logits

    @property
    def virtual_nodes(self) -> int:
        return self.inner.virtual_nodes

    @property
    def chain_limits(self) -> ChainLimits:
        return self.inner.chain_limits

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        return self.inner.rank_chances

    def start(self, rows: int, capacity: int) -> DraftState:
        return self.inner.start(rows, capacity)

    def join(self, rows: VerifiedRows, count: int, capacity: int) -> DraftState:
        return self.inner.join(rows, count, capacity)

    def extended(self, state: DraftState, tree: TokenTree) -> TokenTree:
        return self.inner.extended(self.state_of(state), tree)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        self.inner.observe(self.state_of(state), rows_R, observation)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        return self.inner.expand(self.state_of(state), frontier)

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        self.inner.clear(self.state_of(state), rows_R)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        self.inner.keep(self.state_of(state), rows_R)

    def compiled(self, compiler: Compiler) -> AbstractContextManager[None]:
        return self.inner.compiled(compiler)

    def forget(self) -> None:
        self.inner.forget()
