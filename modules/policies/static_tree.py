"""Trees of a fixed shape: the same topology in every pass.

Shapes: B rows, N nodes, F frontier nodes, C nodes read from one answer, H depths answered at once, R ranks used.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Proposer
from ..random_streams import Draws
from ..token_tree import TokenTree, Topology
from .base import Policy, trimmed


class StaticTree(Policy):
    """One tree for every pass; each node takes its parent's proposal of its rank (arXiv:2401.10774, 2.3.3).

    Where the drafter has no guess, the node and all below it are padding.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self.max_size = topology, topology.size
        # Derived now: Python 3.11 derives a cached property under a lock, which no compiled graph can take.
        self._derived = topology.depth, topology.ancestors_NN, topology.most_children

    def check(self, drafter: Proposer) -> None:
        """Refuse a tree deeper than a one-shot family answers."""
        if drafter.reach is not None and self.topology.depth > drafter.reach:
            raise UserError(
                f"the tree is {self.topology.depth} tokens deep, but this {drafter.family} drafter answers "
                f"{drafter.reach}; choose a tree of at most that depth"
            )

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        tokens_BN = roots_B[:, None].repeat(1, self.topology.size)
        guessed_BN: Tensor | None = None
        depth = 0
        while depth < self.topology.depth:
            asked = inner_nodes(self.topology, depth, tokens_BN.device).frontier(tokens_BN)
            # A one-shot family answers several depths at once, whatever the path between.
            answered = drafter.expand(state, asked).best(self.topology.width)
            until = min(depth + answered.tokens_BFHR.shape[2], self.topology.depth)
            span = span_of(self.topology, depth, until, tokens_BN.device)
            tokens_BN[:, span.children_C] = span.of(answered.tokens_BFHR)
            if answered.guessed_BFHR is not None:
                guessed_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if guessed_BN is None else guessed_BN
                guessed_BN[:, span.children_C] = span.of(answered.guessed_BFHR)
            depth = until
        tree = self.topology.plant(tokens_BN)
        if guessed_BN is None:
            return tree
        real_BN = ~(tree.ancestors_BNN & ~guessed_BN[:, None]).any(-1)
        return trimmed(replace(tree, real_BN=real_BN))


@dataclass(frozen=True)
class InnerNodes:
    """The nodes of one depth that have children: the same in every pass."""

    nodes_F: Tensor
    parents_F: Tensor
    above_F: Tensor
    """Column of the parent among the inner nodes of the depth above; 0 for the root."""

    def frontier(self, tokens_BN: Tensor) -> Frontier:
        """These nodes in every row."""
        batch = len(tokens_BN)
        return Frontier(nodes_BF=self.nodes_F.expand(batch, -1), parents_BF=self.parents_F.expand(batch, -1),
                        tokens_BF=tokens_BN[:, self.nodes_F])


@dataclass(frozen=True)
class Span:
    """Places of the nodes of some levels in one answer of the drafter: the same in every pass."""

    children_C: Tensor
    """The nodes."""
    columns_C: Tensor
    """Column of the node's ancestor in the frontier that was asked about."""
    levels_C: Tensor
    """Number of the depth among those answered."""
    ranks_C: Tensor
    """Rank among the proposals."""

    def of(self, answers_BFHR: Tensor) -> Tensor:
        """The nodes' entries of an answer, [B, C]."""
        return answers_BFHR[:, self.columns_C, self.levels_C, self.ranks_C]


@lru_cache(maxsize=256)
def span_of(topology: Topology, depth: int, until: int, device: torch.device) -> Span:
    """The nodes more than `depth` and at most `until` deep, when the inner nodes of `depth` were asked about."""
    asked = _inner(topology, depth)
    children = [node for node in range(topology.size) if depth < topology.depths[node] <= until]
    columns = [asked.index(topology.ancestor(node, depth)) for node in children]
    levels = [topology.depths[node] - depth - 1 for node in children]
    ranks = [topology.ranks[node] for node in children]
    return Span(*(torch.tensor(numbers, device=device) for numbers in (children, columns, levels, ranks)))


@lru_cache(maxsize=256)
def inner_nodes(topology: Topology, depth: int, device: torch.device) -> InnerNodes:
    """The inner nodes of a depth, on the device."""
    nodes = _inner(topology, depth)
    parents = [topology.parents[node] for node in nodes]
    above = [_inner(topology, depth - 1).index(parent) for parent in parents] if depth else [0]
    return InnerNodes(*(torch.tensor(numbers, device=device) for numbers in (nodes, parents, above)))


def _inner(topology: Topology, depth: int) -> list[int]:
    """The nodes of a depth that have children."""
    return sorted({parent for parent in topology.parents[1:] if topology.depths[parent] == depth})


class Chain(StaticTree):
    """A fixed number of tokens in a row, each the drafter's likeliest."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a chain needs at least 1 drafted token, got {length}")
        super().__init__(Topology.chain(length))
