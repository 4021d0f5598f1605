"""Search for the best static tree of a drafter, and its expected accepted length.

Shapes: K draft steps, P places where a draft starts.
"""

from collections import Counter
from heapq import heappop, heappush

from torch import Tensor

from ..token_tree import Topology
from .held_out_ranks import MAX_RANK

_SHRINKAGE = 20.0
"""Weight of the independent estimate of a path, as a number of observations."""


class PathEstimate:
    """Probability that the true continuation takes a path of ranks, estimated on held-out text.

    Counted jointly, since easy passages are easy for all heads, and shrunk towards the product of exactly-
    rank-i accuracies (arXiv:2401.10774, 2.3.3) where a path was seen rarely: P(path) = P(parent) (n(path) + s
    a_k(rank)) / (n(parent) + s).
    """

    def __init__(self, table_PK: Tensor, max_rank: int = MAX_RANK) -> None:
        self.steps = table_PK.shape[1]
        self.max_rank = max_rank
        total = max(1, table_PK.shape[0])
        self.accuracy = [
            [float((table_PK[:, step] == rank).sum()) / total for rank in range(max_rank)] for step in range(self.steps)
        ]
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.counts[()] = table_PK.shape[0]
        for ranks in table_PK.tolist():
            for step, rank in enumerate(ranks):
                # No tree of these ranks goes on from here.
                if rank >= max_rank:
                    break
                self.counts[tuple(ranks[: step + 1])] += 1

    def step(self, path: tuple[int, ...]) -> float:
        """Probability of the last rank of a path, given the ranks before it."""
        own = self.accuracy[len(path) - 1][path[-1]]
        return (self.counts[path] + _SHRINKAGE * own) / (self.counts[path[:-1]] + _SHRINKAGE)


def search_tree(table_PK: Tensor, max_nodes: int, max_rank: int = MAX_RANK) -> tuple[Topology, tuple[float, ...]]:
    """The static tree that maximises the expected accepted length, nodes in best-first order.

    A node's probability is never above its parent's, so taking the most probable remaining node each time is optimal
    and every prefix of the tree is the best tree of its size.

    Returns:
        The tree of at most `max_nodes` nodes, and for each size from 1 the expected accepted length, the bonus
        included.

    Raises:
        ValueError: if `max_nodes` is below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    probability = PathEstimate(table_PK, max_rank)
    paths: list[tuple[int, ...]] = []
    expected = [0.0]
    # Minus the probability of a path: the heap gives its smallest entry first.
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    # Of all nodes whose parent is in the tree the most probable one comes next.
    while heap and len(paths) < max_nodes:
        chance, path = heappop(heap)
        paths.append(path)
        expected.append(expected[-1] - chance)
        for rank in range(max_rank) if len(path) < probability.steps else ():
            if (child := chance * probability.step((*path, rank))) < 0:
                heappush(heap, (child, (*path, rank)))
    return Topology.from_paths(paths), tuple(expected[1:])
