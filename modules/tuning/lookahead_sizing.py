"""The number of nodes, virtual ones included, with which trees by number of guesses decode fastest (PPD,
arXiv:2405.18628, section 4.2): for greedy rows by the chances of the ranks, for sampled rows by replays.

Shapes: K depths, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..decoding.loop import decode
from ..decoding.requests import DecodeSettings
from ..features import Features
from ..interfaces.drafter import Drafter
from ..policies.lookahead_trees import LookaheadTrees, ahead_trees, tokens_per_pass
from ..target.model import Target
from .cost_model import MOST_NODES, CostCurve, TreeChoice, interpolate
from .replay_target import Replay

ANSWERS = 12
"""Drawn answers that are replayed for each size."""


@dataclass(frozen=True, kw_only=True)
class PassTrial:
    """Trees by number of guesses of one size, replayed on held-out answers."""

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
    sizes = _sizes(len(chances_KR) + 2, cost.sizes[-1] * (1 + virtual_nodes))
    lengths = ((size, tokens_per_pass(ahead_trees(chances_KR, size))) for size in sizes)
    return _fastest(lengths, cost, virtual_nodes)


def choose_trial(trials: Sequence[PassTrial], cost: CostCurve, virtual_nodes: int) -> TreeChoice:
    """The replayed size with the most predicted tokens per second; 1 where drafting does not pay."""
    return _fastest(((trial.size, trial.accepted_length) for trial in trials), cost, virtual_nodes)


def replay_pass_sizes(
    drafter: Drafter, target: Target, features: Sequence[Features], tree_nodes: int, *, answers: int = ANSWERS
) -> tuple[PassTrial, ...]:
    """Replay held-out answers with trees of some sizes, each twice the one before; none without virtual nodes.

    Args:
        drafter: bound to the target, on the features' device, its ranks counted.
        target: the target that wrote the answers.
        features: encoded rows, one conversation each.
        tree_nodes: nodes of the largest tree, virtual ones not included.
        answers: most that are replayed, spread over all.
    """
    chances_KR = drafter.rank_chances
    if chances_KR is None:
        return ()
    source = Replay(target, features, drafter=drafter)
    requests = source.requests[:: -(-len(source.requests) // answers) or 1]
    found, size = [], len(chances_KR) + 2
    while size <= tree_nodes * (1 + drafter.virtual_nodes):
        policy = LookaheadTrees(ahead_trees(chances_KR, size))
        result = decode(source, requests, DecodeSettings(batch_size=8), drafter=drafter, policy=policy)
        found.append(PassTrial(size=size, accepted_length=max(1.0, result.accepted_length)))
        size *= 2
    return tuple(found)


def _fastest(lengths: Iterator[tuple[int, float]], cost: CostCurve, virtual_nodes: int) -> TreeChoice:
    """The fastest of some (nodes of a pass, tokens of a pass)."""
    nodes = [1, *(size * (1 + virtual_nodes) for size in cost.sizes[1:])]
    seconds = [cost.step_seconds(size) for size in cost.sizes]
    best = TreeChoice(size=1, expected_accepted_length=1.0, predicted_speedup=1.0)
    for size, length in lengths:
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
