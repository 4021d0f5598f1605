"""How a tree grows: written once, for every family, over `Drafter.expand`.

Shapes: B rows, N nodes, F frontier nodes, H depths answered at once, Q draft vocabulary, R ranks used.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafter import Drafter, DraftState, Frontier, Scores
from .tree import TokenTree, Topology


class Policy(ABC):
    """Decides which guesses of a drafter are verified."""

    @property
    @abstractmethod
    def max_size(self) -> int:
        """Most nodes of a tree, the root included: cache slots a pass may need."""

    @abstractmethod
    def grow(self, drafter: Drafter, state: DraftState, roots_B: Tensor) -> TokenTree:
        """Build one tree a row below its root. It may look at nothing but what the drafter knows so far."""


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth of a static tree that have children, and what is needed to fill those children in."""

    parents: tuple[int, ...]
    children: tuple[int, ...]
    child_parents: tuple[int, ...]
    child_ranks: tuple[int, ...]


class StaticTree(Policy):
    """The same tree in every pass; each node takes its parent's proposal of its rank (arXiv:2401.10774, 2.3.3)."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._levels = [_level(topology, depth) for depth in range(topology.depth)]

    @property
    def max_size(self) -> int:
        return self.topology.size

    def grow(self, drafter: Drafter, state: DraftState, roots_B: Tensor) -> TokenTree:
        tokens_BN = roots_B[:, None].repeat(1, self.topology.size)
        # Where each node's scores stand: the column of its ancestor in the frontier that was expanded last.
        columns = [0] * self.topology.size
        answered_BFHR = tokens_BN[:, None, :0, None]
        used = 0
        for level in self._levels:
            if used == answered_BFHR.shape[2]:
                answered_BFHR = self._ask(drafter, state, level, tokens_BN)
                used = 0
                for column, node in enumerate(level.parents):
                    columns[node] = column
            source = [columns[parent] for parent in level.child_parents]
            tokens_BN[:, level.children] = answered_BFHR[:, source, used, list(level.child_ranks)]
            for child, parent in zip(level.children, level.child_parents, strict=True):
                columns[child] = columns[parent]
            used += 1
        return self.topology.plant(tokens_BN)

    def _ask(self, drafter: Drafter, state: DraftState, level: _Level, tokens_BN: Tensor) -> Tensor:
        """Proposals of the level's inner nodes by rank, [B, F, H, R]."""
        batch = tokens_BN.shape[0]
        nodes_BF = torch.tensor(level.parents, device=tokens_BN.device).expand(batch, -1)
        above = [self.topology.parents[node] for node in level.parents]
        parents_BF = torch.tensor(above, device=tokens_BN.device).expand(batch, -1)
        frontier = Frontier(nodes_BF=nodes_BF, parents_BF=parents_BF, tokens_BF=tokens_BN.gather(1, nodes_BF))
        return ranked(drafter.expand(state, frontier), self.topology.width)


class Chain(StaticTree):
    """A fixed number of tokens in a row, each the drafter's likeliest."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a chain needs at least 1 drafted token, got {length}")
        super().__init__(Topology.chain(length))


def ranked(scores: Scores, width: int) -> Tensor:
    """Target-vocabulary ids of the `width` likeliest children, best first, [B, F, H, width].

    Raises:
        ValueError: if the draft vocabulary is smaller than `width`.
    """
    vocabulary = scores.log_probs_BFHQ.shape[-1]
    if width > vocabulary:
        raise ValueError(f"the tree uses the {width} best proposals of a node, the draft vocabulary has {vocabulary}")
    indices = scores.log_probs_BFHQ.topk(width, dim=-1).indices
    return indices if scores.token_ids_Q is None else scores.token_ids_Q[indices]


def _level(topology: Topology, depth: int) -> _Level:
    children = tuple(node for node in range(topology.size) if topology.depths[node] == depth + 1)
    child_parents = tuple(topology.parents[node] for node in children)
    return _Level(
        parents=tuple(sorted(set(child_parents))),
        children=children,
        child_parents=child_parents,
        child_ranks=tuple(topology.ranks[node] for node in children),
    )
