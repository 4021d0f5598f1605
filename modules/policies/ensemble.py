"""Several drafters, one tree: each proposes its own, equal guesses are merged, and all share one budget of nodes.

Shapes: B rows, N nodes of the tree so far, M nodes of the tree that joins it, S nodes of the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores, VerifiedRows
from ..random_streams import Draws
from ..token_tree import TokenTree
from ..verification.sampling import SamplingSetting
from .base import Policy, trimmed


@dataclass
class EnsembleState(DraftState):
    """One state for each part."""

    parts: list[DraftState]


class Ensemble(Proposer):
    """Drafters that look at the same passes; `Union` grows a tree for each and joins them.

    Raises:
        ValueError: if there is no part.
    """

    family = "ensemble"

    def __init__(self, parts: Sequence[Proposer]) -> None:
        if not parts:
            raise ValueError("an ensemble needs at least 1 drafter, got 0")
        self.parts = tuple(parts)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that any part reads."""
        return tuple(sorted({layer for part in self.parts for layer in part.taps}))

    @property
    def reads_logits(self) -> bool:
        """True if any part reads logits."""
        return any(part.reads_logits for part in self.parts)

    def start(self, rows: int, capacity: int) -> EnsembleState:
        """Empty states of all parts."""
        return EnsembleState([part.start(rows, capacity) for part in self.parts])

    def join(self, rows: VerifiedRows, count: int, capacity: int) -> EnsembleState:
        """Empty states of all parts; those that have the target run something for them share its passes."""
        return EnsembleState([part.join(rows, count, capacity) for part in self.parts])

    @property
    def virtual_nodes(self) -> int:
        """Those of all parts, of which one may have any."""
        return sum(part.virtual_nodes for part in self.parts)

    def extended(self, state: DraftState, tree: TokenTree) -> TokenTree:
        """The tree with the virtual nodes of that part."""
        for part, held in zip(self.parts, self.states(state), strict=True):
            tree = part.extended(held, tree)
        return tree

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Pass the observation on to every part."""
        for part, held in zip(self.parts, self.states(state), strict=True):
            part.observe(held, rows_R, observation)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Not answered: a node belongs to one part, which expands it.

        Raises:
            ValueError: always.
        """
        raise ValueError("the parts of an ensemble are expanded one by one; give it the policy Union")

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget the rows in all parts."""
        for part, held in zip(self.parts, self.states(state), strict=True):
            part.clear(held, rows_R)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r] in all parts."""
        for part, held in zip(self.parts, self.states(state), strict=True):
            part.keep(held, rows_R)

    def forget(self) -> None:
        """Let every part start anew."""
        for part in self.parts:
            part.forget()

    def states(self, state: DraftState) -> list[DraftState]:
        """The states of the parts.

        Raises:
            TypeError: if another family made the state.
        """
        if not isinstance(state, EnsembleState):
            raise TypeError(f"Ensemble needs the state that its own start() made, got {type(state).__name__}")
        return state.parts


class Union(Policy):
    """Grows one tree for each part of an `Ensemble` and joins them, the first part's nodes before the next one's.

    The budget is shared: what one part leaves, because it has no guess or because another part has guessed the same,
    the next one uses. So the parts that may have nothing to say come first, and the last part's nodes should be in
    best-first order, as those of a searched tree are: it is cut where the budget ends. What was accepted is not split
    by part, so a stopping rule that adapts learns nothing inside a union.

    Args:
        policies: one for each part, in the ensemble's order.
        size: most nodes of the joined tree, the root included.

    Raises:
        ValueError: if there is no policy, or `size` is below 1.
    """

    def __init__(self, policies: Sequence[Policy], size: int) -> None:
        if not policies or size < 1:
            raise ValueError(f"a union needs at least 1 policy and size 1, got {len(policies)} and size {size}")
        self.policies, self.size = tuple(policies), size

    @property
    def max_size(self) -> int:
        return self.size

    def check(self, drafter: Proposer) -> None:
        """Refuse anything but an ensemble of as many parts, and what a part's policy refuses of its part."""
        for policy, part in zip(self.policies, self._parts(drafter), strict=True):
            policy.check(part)

    def check_sampling(self, setting: SamplingSetting) -> None:
        """Refuse a sampling that a part's policy refuses."""
        for policy in self.policies:
            policy.check_sampling(setting)

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
        # No random numbers go on: a sample that is merged with another guess would no longer be one.
        trees = [
            policy.grow(part, part_state, roots_B)
            for policy, part, part_state in zip(self.policies, parts, held, strict=True)
        ]
        tree = trees[0]
        for joining in trees[1:]:
            tree = joined(tree, joining)
        return trimmed(tree.packed(min(self.size, tree.size)))


def joined(tree: TokenTree, joining: TokenTree) -> TokenTree:
    """All paths of both trees, the second one's new nodes after the first one's; duplicates become padding.

    Raises:
        ValueError: if either has virtual nodes: they belong to one drafter's layout of the pass.
    """
    if tree.virtual is not None or joining.virtual is not None:
        raise ValueError("trees with virtual nodes cannot be joined")
    equal_BMN = joining.equal_paths(tree)
    known_BM = equal_BMN.any(-1)
    own_M = torch.arange(joining.size, device=known_BM.device) + tree.size
    places_BM = torch.where(known_BM, equal_BMN.long().argmax(-1), own_M)
    parents_BM = places_BM.gather(1, joining.parents_BN.clamp(min=0))
    return TokenTree(
        tokens_BN=torch.cat([tree.tokens_BN, joining.tokens_BN], dim=1),
        parents_BN=torch.cat([tree.parents_BN, parents_BM], dim=1),
        depths_BN=torch.cat([tree.depths_BN, joining.depths_BN], dim=1),
        ancestors_BNN=_ancestors(tree, joining, places_BM, own_M),
        real_BN=torch.cat([tree.real_BN, joining.real_BN & ~known_BM], dim=1),
        max_depth=max(tree.max_depth, joining.max_depth),
    )


def _ancestors(tree: TokenTree, joining: TokenTree, places_BM: Tensor, own_M: Tensor) -> Tensor:
    """[B, N + M, N + M]: the tree's own, and the joining one's at the places of their paths."""
    size = tree.size + joining.size
    old_BNS = torch.nn.functional.pad(tree.ancestors_BNN, (0, joining.size))
    there_BMS = places_BM[..., None] == torch.arange(size, device=places_BM.device)
    new_BMS = (joining.ancestors_BNN.float() @ there_BMS.float()) > 0
    new_BMS[:, torch.arange(joining.size, device=own_M.device), own_M] = True
    return torch.cat([old_BNS, new_BMS], dim=1)
