"""How a tree grows: written once, for every family, over `Proposer.expand`. The interface, and trees of fixed shape.

Trees that are sampled are in `sampled.py`, those that follow the drafter's confidence in `dynamic.py`, chains that stop
early in `stopped.py`.

Shapes: B rows, N nodes, F frontier nodes, O nodes the drafter was asked about, H depths answered at once, Q draft
vocabulary, R ranks used.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .acceptance import Accepted
from .drafter import DraftState, Frontier, Proposals, Proposer
from .errors import UserError
from .streams import Draws
from .tree import TokenTree, Topology


class Policy(ABC):
    """Decides which guesses of a drafter are verified."""

    @property
    @abstractmethod
    def max_size(self) -> int:
        """Most nodes of a tree, the root included: cache slots a pass may need."""

    @abstractmethod
    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        """Build one tree a row below its root. It may look at nothing but what the drafter knows so far.

        Args:
            drafter: asked for scores, level by level.
            state: what it knows about the rows.
            roots_B: the last token of each row.
            draws: random numbers for policies that sample; None when every row is greedy.
        """

    def check(self, drafter: Proposer) -> None:  # noqa: B027
        """Raise UserError when the policy makes no sense with a family; most serve all, recurrent or one-shot."""

    def learn(self, tree: TokenTree, accepted: Accepted) -> None:  # noqa: B027
        """What the target accepted of the last tree, for policies that adapt; nothing by default."""


@dataclass(frozen=True)
class Level:
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

    def check(self, drafter: Proposer) -> None:
        """Refuse a tree deeper than a one-shot family answers."""
        if drafter.reach is not None and self.topology.depth > drafter.reach:
            raise UserError(
                f"the tree is {self.topology.depth} tokens deep, but this {drafter.family} drafter answers "
                f"{drafter.reach}; choose a tree of at most that depth"
            )

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
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

    def _ask(self, drafter: Proposer, state: DraftState, level: Level, tokens_BN: Tensor) -> Proposals:
        """Proposals of the level's inner nodes by rank."""
        return drafter.expand(state, self._frontier(level, tokens_BN)).best(self.topology.width)

    def _frontier(self, level: Level, tokens_BN: Tensor) -> Frontier:
        batch = tokens_BN.shape[0]
        nodes_BF = _row(level.parents, tokens_BN).expand(batch, -1)
        above = [self.topology.parents[node] for node in level.parents]
        parents_BF = _row(above, tokens_BN).expand(batch, -1)
        return Frontier(nodes_BF=nodes_BF, parents_BF=parents_BF, tokens_BF=tokens_BN.gather(1, nodes_BF))


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


def _row(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _level(topology: Topology, depth: int) -> Level:
    children = tuple(node for node in range(topology.size) if topology.depths[node] == depth + 1)
    child_parents = tuple(topology.parents[node] for node in children)
    return Level(
        parents=tuple(sorted(set(child_parents))),
        children=children,
        child_parents=child_parents,
        child_ranks=tuple(topology.ranks[node] for node in children),
    )
