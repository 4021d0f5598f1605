"""How a tree grows: written once, for every family, over `Proposer.expand`.

Shapes: B rows, N nodes, F frontier nodes, H depths answered at once, Q draft vocabulary, R ranks used.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .drafter import DraftState, Frontier, Proposals, Proposer
from .tree import TokenTree, Topology


class Policy(ABC):
    """Decides which guesses of a drafter are verified."""

    @property
    @abstractmethod
    def max_size(self) -> int:
        """Most nodes of a tree, the root included: cache slots a pass may need."""

    @abstractmethod
    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor) -> TokenTree:
        """Build one tree a row below its root. It may look at nothing but what the drafter knows so far."""


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth of a static tree that have children, and what is needed to fill those children in."""

    parents: tuple[int, ...]
    children: tuple[int, ...]
    child_parents: tuple[int, ...]
    child_ranks: tuple[int, ...]


class StaticTree(Policy):
    """The same tree in every pass; each node takes its parent's proposal of its rank (arXiv:2401.10774, 2.3.3).

    Where the drafter has no guess, the node and all below it are padding.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._levels = [_level(topology, depth) for depth in range(topology.depth)]

    @property
    def max_size(self) -> int:
        return self.topology.size

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor) -> TokenTree:
        tokens_BN = roots_B[:, None].repeat(1, self.topology.size)
        # Where each node's scores stand: the column of its ancestor in the frontier that was expanded last.
        columns = [0] * self.topology.size
        real_BN: Tensor | None = None
        answered = Proposals(tokens_BN[:, None, :0, None], None)
        used = 0
        for level in self._levels:
            if used == answered.tokens_BFHR.shape[2]:
                answered = self._ask(drafter, state, level, tokens_BN)
                used = 0
                for column, node in enumerate(level.parents):
                    columns[node] = column
            source = [columns[parent] for parent in level.child_parents]
            tokens_BN[:, level.children] = answered.tokens_BFHR[:, source, used, list(level.child_ranks)]
            if answered.guessed_BFHR is not None:
                real_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if real_BN is None else real_BN
                guessed_BC = answered.guessed_BFHR[:, source, used, list(level.child_ranks)]
                real_BN[:, level.children] = guessed_BC & real_BN[:, level.child_parents]
            for child, parent in zip(level.children, level.child_parents, strict=True):
                columns[child] = columns[parent]
            used += 1
        tree = self.topology.plant(tokens_BN)
        return tree if real_BN is None else trimmed(replace(tree, real_BN=real_BN))

    def _ask(self, drafter: Proposer, state: DraftState, level: _Level, tokens_BN: Tensor) -> Proposals:
        """Proposals of the level's inner nodes by rank."""
        batch = tokens_BN.shape[0]
        nodes_BF = torch.tensor(level.parents, device=tokens_BN.device).expand(batch, -1)
        above = [self.topology.parents[node] for node in level.parents]
        parents_BF = torch.tensor(above, device=tokens_BN.device).expand(batch, -1)
        frontier = Frontier(nodes_BF=nodes_BF, parents_BF=parents_BF, tokens_BF=tokens_BN.gather(1, nodes_BF))
        return drafter.expand(state, frontier).best(self.topology.width)


class Chain(StaticTree):
    """A fixed number of tokens in a row, each the drafter's likeliest."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a chain needs at least 1 drafted token, got {length}")
        super().__init__(Topology.chain(length))


def trimmed(tree: TokenTree) -> TokenTree:
    """The tree without the padding that no row needs; down to the root where nobody has a guess.

    On a CPU the time of a pass grows with its nodes and its size is known at once. On an accelerator a small pass costs
    what a pass of one token does, while asking for the size would wait for the device and another shape would need
    another graph: there the padding stays.
    """
    if tree.real_BN.device.type != "cpu":
        return tree
    size = int(tree.real_BN.sum(-1).max())
    return tree if size == tree.size else tree.packed(size)


def _level(topology: Topology, depth: int) -> _Level:
    children = tuple(node for node in range(topology.size) if topology.depths[node] == depth + 1)
    child_parents = tuple(topology.parents[node] for node in children)
    return _Level(
        parents=tuple(sorted(set(child_parents))),
        children=children,
        child_parents=child_parents,
        child_ranks=tuple(topology.ranks[node] for node in children),
    )
