"""The number of nodes, virtual ones included, with which trees by number of guesses decode fastest (PPD,
arXiv:2405.18628, section 4.2): for greedy rows by the chances of the ranks, for sampled rows along answers.

Shapes: K depths, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..interfaces.drafter import Drafter
from ..interfaces.optional_parts import GuessesInPasses, virtual_nodes
from ..policies.lookahead_trees import AheadTree, ahead_trees, tokens_per_pass
from .cost_model import MOST_NODES, CostCurve, TreeChoice, interpolate
from .held_out_ranks import RankedText
from .rank_walk import last_nodes


@dataclass(frozen=True, kw_only=True)
class PassTrial:
    """Trees by number of guesses of one size, counted along held-out answers."""

    size: int
    """Nodes of a pass, virtual ones included."""
    accepted_length: float
    """Tokens emitted per pass, the bonus included."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MOST_NODES:
            raise ValueError(f"size of a trial must lie between 2 and {MOST_NODES}, got {self.size}")


def choose_pass_nodes(chances_KR: tuple[tuple[float, ...], ...], cost: CostCurve, virtual_nodes: int) -> TreeChoice:
    """The size with the most predicted tokens per second; 1 where drafting does not pay.

    Args:
        chances_KR: probability that the guess of a rank is right at a depth.
        cost: seconds measured with all virtual nodes after every node of a tree.
        virtual_nodes: how many these are.
    """
    # All small sizes are tried, then every eighth more.
    sizes, size = list[int](), len(chances_KR) + 2
    while size <= cost.sizes[-1] * (1 + virtual_nodes):
        sizes.append(size)
        size += max(1, size // 8)
    lengths = ((size, tokens_per_pass(ahead_trees(chances_KR, size))) for size in sizes)
    return _fastest(lengths, cost, virtual_nodes)


def choose_trial(trials: Sequence[PassTrial], cost: CostCurve, virtual_nodes: int) -> TreeChoice:
    """The tried size with the most predicted tokens per second; 1 where drafting does not pay."""
    return _fastest(((trial.size, trial.accepted_length) for trial in trials), cost, virtual_nodes)


def try_pass_sizes(drafter: Drafter, text: RankedText, tree_nodes: int) -> tuple[PassTrial, ...]:
    """Count along held-out answers what trees of some sizes accept, each twice the one before; none without virtual
    nodes.

    Args:
        drafter: its ranks counted.
        text: ranks of the answers' tokens among its proposals.
        tree_nodes: nodes of the largest tree, virtual ones not included.
    """
    chances_KR = drafter.rank_chances if isinstance(drafter, GuessesInPasses) else None
    if chances_KR is None:
        return ()
    found, size = [], len(chances_KR) + 2
    # Doubling: each trial walks the whole text, and the speed changes slowly with the size.
    while size <= tree_nodes * (1 + virtual_nodes(drafter)):
        found.append(PassTrial(size=size, accepted_length=length_of(text, ahead_trees(chances_KR, size))))
        size *= 2
    return tuple(found)


def length_of(text: RankedText, trees: Sequence[AheadTree]) -> float:
    """Tokens of a pass along held-out answers, the target's own included; 1 without text.

    An answer starts with all guesses; afterwards a row has as many as there are virtual nodes after the node that was
    accepted last.

    Args:
        text: ranks of the answers' tokens.
        trees: by the number of guesses that a row has.
    """
    left, emitted, place, guesses = text.left_P.tolist(), [], 0, len(trees) - 1
    nodes = [last_nodes(text.ranks_PK, tree.topology).tolist() for tree in trees]
    while place < len(left):
        if left[place]:
            tree, node = trees[guesses], nodes[guesses][place]
            emitted.append(min(tree.topology.depths[node] + 1, left[place]))
            # As many as virtual nodes followed the node that was accepted last; the next answer starts with all.
            guesses = tree.counts[node] if emitted[-1] < left[place] else len(trees) - 1
        place += max(1, emitted[-1] if left[place] else 1)
    return sum(emitted) / len(emitted) if emitted else 1.0


def _fastest(lengths: Iterator[tuple[int, float]], cost: CostCurve, virtual_nodes: int) -> TreeChoice:
    """The fastest of some (nodes of a pass, tokens of a pass)."""
    # The seconds were measured with all virtual nodes after every node of a tree.
    nodes = [1, *(size * (1 + virtual_nodes) for size in cost.sizes[1:])]
    seconds = [cost.step_seconds(size) for size in cost.sizes]
    best = TreeChoice(size=1, expected_accepted_length=1.0, predicted_speedup=1.0)
    for size, length in lengths:
        speedup = length * cost.pass_seconds[0] / interpolate(nodes, seconds, size)
        if speedup > best.predicted_speedup:
            best = TreeChoice(size=size, expected_accepted_length=length, predicted_speedup=speedup)
    return best
