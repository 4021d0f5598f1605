"""A drafter that passes everything on to another one, for tests that change one part of its work."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from draftsmith.modules import DraftState, Frontier, Observation, Proposer, Scores
from draftsmith.modules.interfaces.proposer import SharesTargetRows, VerifiedRows, started
from draftsmith.modules.target.devices.compiled_layers import Compiler
from draftsmith.modules.token_tree import TokenTree
from torch import Tensor


class WrappedState(DraftState):
    """The other drafter's state, with what a subclass adds."""

    def __init__(self, inner: DraftState) -> None:
        self.inner, self.held, self.caches = inner, (inner,), inner.caches

    def drop_tree(self) -> None:
        self.inner.drop_tree()

    def expect(self, path: int) -> None:
        self.inner.expect(path)

    def advance(self, counts: Sequence[int]) -> None:
        self.inner.advance(counts)


class Wrapped(Proposer, SharesTargetRows):
    """Another drafter, of which a subclass changes a part."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.family = inner, inner.family  # type: ignore[misc]
        self.taps, self.reach, self.reads_logits = inner.taps, inner.reach, inner.reads_logits
        self.virtual_nodes, self.chain_limits = inner.virtual_nodes, inner.chain_limits

    def state_of(self, state: DraftState) -> DraftState:
        """The other drafter's state, within that of this one."""
        return state

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        return self.inner.rank_chances

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> DraftState:
        return started(self.inner, verified, rows, capacity)

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
