"""Several drafters, one tree: each proposes its own, equal guesses are merged, and all share one budget of nodes.

Shapes: B rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compiler import Compiler
from ..errors import UserError
from ..interfaces.proposer import (
    DraftState,
    Frontier,
    GuessesInPasses,
    Observation,
    Proposer,
    Remembers,
    RunsCompiled,
    Scores,
    SharesTargetRows,
    VerifiedRows,
    compiled,
    extended,
    started,
    virtual_nodes,
)
from ..random_streams import Draws
from ..token_tree import TokenTree
from ..verification.sampling import SamplingSetting
from .base import Policy, trimmed
from .joined_trees import joined


@dataclass
class EnsembleState(DraftState):
    """One state for each part."""

    parts: list[DraftState]

    def __post_init__(self) -> None:
        self.held, self.caches = self.parts, [cache for part in self.parts for cache in part.caches]

    def drop_tree(self) -> None:
        """Discard the trees of all parts."""
        for part in self.parts:
            part.drop_tree()

    def expect(self, path: int) -> None:
        """Prepare every part."""
        for part in self.parts:
            part.expect(path)

    def advance(self, counts: Sequence[int]) -> None:
        """Let every part count."""
        for part in self.parts:
            part.advance(counts)


class Ensemble(Proposer[EnsembleState], SharesTargetRows, GuessesInPasses, RunsCompiled, Remembers):
    """Drafters that look at the same passes; `Union` grows a tree for each and joins them.

    Raises:
        ValueError: if there is no part.
    """

    family = "ensemble"
    rank_chances = None
    """None: the guesses of several drafters were not counted."""

    def __init__(self, parts: Sequence[Proposer]) -> None:
        if not parts:
            raise ValueError("an ensemble needs at least 1 drafter, got 0")
        self.parts = tuple(parts)
        self.taps = tuple(sorted({layer for part in parts for layer in part.taps}))
        self.reads_logits = any(part.reads_logits for part in parts)
        # Of the parts one may have any: no tree takes the virtual nodes of two.
        self.virtual_nodes = sum(virtual_nodes(part) for part in parts)

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> EnsembleState:
        """Empty states; the last part may run the target's first layers in the rows that are verified."""
        *others, last = self.parts
        # Of the first layers only the last output is kept, which is no use to a part that taps another one.
        shared = None if any(part.taps for part in others) else verified
        return EnsembleState([*(part.start(rows, capacity) for part in others),
                              started(last, shared, rows, capacity)])

    def extended(self, state: EnsembleState, tree: TokenTree) -> TokenTree:
        """The tree with the virtual nodes of the part that has any."""
        for part, held in zip(self.parts, state.parts, strict=True):
            tree = extended(part, held, tree)
        return tree

    def observe(self, state: EnsembleState, rows_R: Tensor, observation: Observation) -> None:
        """Pass the observation on to every part."""
        for part, held in zip(self.parts, state.parts, strict=True):
            part.observe(held, rows_R, observation)

    def expand(self, state: EnsembleState, frontier: Frontier) -> Scores:
        """Not answered: a node belongs to one part, which expands it.

        Raises:
            ValueError: always.
        """
        raise ValueError("the parts of an ensemble are expanded one by one; give it the policy Union")

    @contextmanager
    def compiled(self, compiler: Compiler) -> Iterator[None]:
        """A block in which the layers of all parts run compiled."""
        with ExitStack() as blocks:
            for part in self.parts:
                blocks.enter_context(compiled(part, compiler))
            yield

    def forget(self) -> None:
        """Let every part start anew."""
        for part in self.parts:
            if isinstance(part, Remembers):
                part.forget()


class Union(Policy):
    """Grows one tree for each part of an `Ensemble` and joins them, the first part's nodes before the next one's.

    The budget is shared: what one part leaves, because it has no guess or because another part has guessed the same,
    the next one uses. So the parts that may have nothing to say come first, and the last part's nodes should be in
    best-first order, as those of a searched tree are: it is cut where the budget ends. Only the last part samples; of a
    part that does, no node is cut, since what is cut would depend on what was drawn.

    Args:
        policies: one for each part, in the ensemble's order.
        size: most nodes of the joined tree, the root included.

    Raises:
        ValueError: if there is no policy, `size` is below 1, or it has no room for all nodes of all parts though the
            last one samples.
    """

    def __init__(self, policies: Sequence[Policy], size: int) -> None:
        if not policies or size < 1:
            raise ValueError(f"a union needs at least 1 policy and size 1, got {len(policies)} and size {size}")
        whole = whole_size(policies)
        if policies[-1].samples and size < whole:
            raise ValueError(f"a union whose last part samples needs room for all {whole} nodes, got size {size}")
        self.policies, self.size = tuple(policies), size
        self.max_size, self.samples = size, policies[-1].samples

    def check(self, drafter: Proposer) -> None:
        """Refuse anything but an ensemble of as many parts, and what a part's policy refuses of its part."""
        for policy, part in zip(self.policies, self._parts(drafter), strict=True):
            policy.check(part)

    def check_sampling(self, setting: SamplingSetting) -> None:
        """Refuse a sampling that a part's policy refuses."""
        for policy in self.policies:
            policy.check_sampling(setting)

    def unwatched(self) -> "Union":
        """A union of policies that ask the device for nothing."""
        return Union([policy.unwatched() for policy in self.policies], self.size)

    def _parts(self, drafter: Proposer) -> Sequence[Proposer]:
        if not isinstance(drafter, Ensemble) or len(drafter.parts) != len(self.policies):
            raise UserError(
                f"this union joins an Ensemble of {len(self.policies)} drafters, got {drafter.family}; give as many "
                "drafters as policies"
            )
        return drafter.parts

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        parts = self._parts(drafter)
        held = state.parts if isinstance(state, EnsembleState) else []
        # Others than the last part get no random numbers: a merged sample would no longer be one.
        chances = [*([None] * (len(parts) - 1)), draws]
        trees = []
        for number, (policy, part, own, chance) in enumerate(zip(self.policies, parts, held, chances, strict=True)):
            tree = policy.grow(part, own, roots_B, chance)
            # Each node says which part it comes from: an evaluation counts the accepted guesses of each.
            trees.append(replace(tree, parts_BN=torch.full_like(tree.tokens_BN, number)))
        tree = trees[0]
        for joining in trees[1:]:
            tree = joined(tree, joining)
        # Duplicates have become padding, which packing moves to the end, where the budget cuts.
        return trimmed(tree.packed(min(self.size, tree.size)))


def whole_size(policies: Sequence[Policy]) -> int:
    """Nodes of a union in which nothing is cut, the root included."""
    return 1 + sum(policy.max_size - 1 for policy in policies)
