"""The number of nodes, virtual ones included, with which trees by number of guesses decode fastest (PPD,
arXiv:2405.18628, section 4.2).

Shapes: K depths, R ranks.
"""

from collections.abc import Sequence

from ..policies.lookahead_trees import ahead_trees, tokens_per_pass
from .cost_model import CostCurve, TreeChoice, interpolate


def choose_pass_nodes(chances_KR: tuple[tuple[float, ...], ...], cost: CostCurve, virtual_nodes: int) -> TreeChoice:
    """The size with the most predicted tokens per second; 1 where drafting does not pay.

    Args:
        chances_KR: probability that the guess of a rank is right at a depth.
        cost: seconds measured with all virtual nodes after every node of a tree.
        virtual_nodes: how many these are.
    """
    nodes = [1, *(size * (1 + virtual_nodes) for size in cost.sizes[1:])]
    seconds = [cost.step_seconds(size) for size in cost.sizes]
    best = TreeChoice(size=1, expected_accepted_length=1.0, predicted_speedup=1.0)
    for size in _sizes(len(chances_KR) + 2, nodes[-1]):
        length = tokens_per_pass(ahead_trees(chances_KR, size))
        speedup = length * cost.plain_seconds / interpolate(nodes, seconds, size)
        if speedup > best.predicted_speedup:
            best = TreeChoice(size=size, expected_accepted_length=length, predicted_speedup=speedup)
    return best


def _sizes(least: int, most: int) -> Sequence[int]:
    """Sizes that are tried: all small ones, then every eighth more."""
    sizes, size = [], least
    while size <= most:
        sizes.append(size)
        size += max(1, size // 8)
    return sizes
