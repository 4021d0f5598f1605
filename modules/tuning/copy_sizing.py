"""Sizes of a copied chain next to a draft's tree: acceptance on held-out text and the cost model say what is fastest.

Prompt lookup copies where the text repeats itself and the draft guesses elsewhere, so that what both accept nearly adds
up. What a pass with both costs depends on how often there is something to copy, which is counted along the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..baselines.joined_policies import LONGEST_COPY, LOOKUP, PolicyName, copying, joined_drafter
from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings
from ..features import Features
from ..interfaces.drafter import Drafter
from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from ..policies.registry import MOST, STATIC
from ..policies.static_tree import StaticTree
from ..target.model import Target
from ..token_tree import Topology
from .copied_acceptance import Counted, copied_text
from .cost_model import CostModel
from .held_out_ranks import ProposedText
from .replay_target import Replay

COPIED = (7, 4, LONGEST_COPY)
"""Lengths of the copied chain that are tried, in tokens."""
TIMED, TIMED_TOKENS = 4, 24
"""Answers, and tokens of each, that are decoded to measure the time that copying takes."""


@dataclass(frozen=True, kw_only=True)
class CopyTrial:
    """One size of both parts, counted on held-out answers."""

    copied: int
    """Most tokens copied; 0 for the draft's tree alone."""
    extra: int
    """Nodes that a pass may have beyond those of the draft's tree alone."""
    accepted_length: float
    """Tokens emitted per pass, the bonus included."""
    nodes: float
    """Mean nodes of a pass with one row, the root included."""
    predicted: Counted | None = None
    """Tokens and nodes on answers that chose nothing; None without such answers."""

    def __post_init__(self) -> None:
        for name, most in (("copied", LONGEST_COPY), ("extra", MOST)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} of a trial must lie between 0 and {most}, got {getattr(self, name)}")
        if not 1 <= self.nodes <= 2 * MOST:
            raise ValueError(f"nodes of a trial must lie between 1 and {2 * MOST}, got {self.nodes}")
        if not 1 <= self.accepted_length <= 2 * MOST:
            raise ValueError(f"accepted_length of a trial must lie between 1 and {2 * MOST}, got "
                             f"{self.accepted_length}")


@dataclass(frozen=True, kw_only=True)
class CopySizing:
    """Trials of a copied chain next to one tree of the draft."""

    tree_size: int
    """Nodes of the draft's tree in every trial, the root included."""
    alone: CopyTrial
    """The draft's tree without copies."""
    trials: tuple[CopyTrial, ...]
    """Copied chains next to it."""
    copy_seconds: float
    """Seconds that copying and joining add to the drafting of a step."""

    def __post_init__(self) -> None:
        if not 1 <= self.tree_size <= MOST or not self.trials or min(trial.copied for trial in self.trials) < 1:
            raise ValueError(f"tree_size must lie between 1 and {MOST} and some trials must copy, got {self.tree_size} "
                             f"and {len(self.trials)} trials")
        if self.copy_seconds < 0:
            raise ValueError(f"copy_seconds must be at least 0, got {self.copy_seconds}")

    def speedup(self, trial: CopyTrial, cost: CostModel, batch: int = 1) -> float:
        """Predicted speed-up over plain decoding of so many rows, answered as the held-out ones were.

        Of several rows one copies in most passes, so that each pass is counted with all the nodes it may have.
        """
        seconds = self.seconds(trial, cost, batch)
        return trial.accepted_length * cost.pass_seconds(1, batch) / seconds

    def seconds(self, trial: CopyTrial, cost: CostModel, batch: int = 1) -> float:
        """Seconds of a step of so many rows, drafting and copying included."""
        # Between two whole numbers of nodes the seconds are interpolated: a pass with a copy has more of them.
        nodes = trial.nodes if batch == 1 else self.tree_size + trial.extra
        below = int(nodes)
        low, high = (cost.pass_seconds(size, batch) for size in (below, below + 1))
        seconds = low + (high - low) * (nodes - below) + cost.draft_seconds(self.tree_size, batch)
        return seconds + (self.copy_seconds if trial.copied else 0.0)

    def best(self, cost: CostModel, batch: int = 1) -> CopyTrial:
        """The trial with copies that is predicted to be the fastest."""
        return max(self.trials, key=lambda trial: self.speedup(trial, cost, batch))


def size_copies(
    drafter: Drafter, target: Target, features: Sequence[Features], text: ProposedText, topology: Topology,
    fresh: ProposedText | None = None, other: Topology | None = None,
) -> CopySizing:
    """Count what chains of some lengths bring next to a draft's tree along held-out answers, greedy or drawn.

    Args:
        drafter: bound to the target, on the features' device.
        target: the target that wrote the answers.
        features: encoded rows, one conversation each.
        text: what the drafter proposes along them.
        topology: the draft's tree, as it is used here.
        fresh: what it proposes along answers that choose nothing; None predicts nothing.
        other: a tree of that size that was searched on other answers than these; None for the tree itself.
    """
    copies = copied_text(text, LONGEST_COPY)
    unseen = None if fresh is None or not len(fresh.left_P) else copied_text(fresh, LONGEST_COPY)

    def tried_out(copied: int, extra: int) -> CopyTrial:
        found = copies.count(topology, copied, extra)
        return CopyTrial(copied=copied, extra=extra, accepted_length=found.accepted_length, nodes=found.nodes,
                         predicted=None if unseen is None else unseen.count(other or topology, copied, extra))

    tried = [(copied, extra) for copied in COPIED for extra in sorted({max(0, copied + 1 - topology.size), copied})]
    return CopySizing(
        tree_size=topology.size,
        alone=tried_out(0, 0), trials=tuple(tried_out(copied, extra) for copied, extra in tried),
        copy_seconds=_copy_seconds(drafter, target, features, topology),
    )


def _copy_seconds(drafter: Drafter, target: Target, features: Sequence[Features], topology: Topology) -> float:
    """Seconds that copying adds to the drafting of a pass: some answers are replayed with and without, in turn."""
    source, own = Replay(target, features, TIMED, drafter), StaticTree(topology)
    joined = joined_drafter(PolicyName(own=STATIC, partner=LOOKUP), drafter, target)
    ways: list[tuple[Proposer, Policy]] = [(drafter, own), (joined, copying(own, COPIED[0], COPIED[0]))]
    seconds: list[list[float]] = [[] for _ in ways]
    for request in source.requests:
        short = replace(request, max_new_tokens=min(request.max_new_tokens, TIMED_TOKENS))
        for way, (one, policy) in enumerate(ways):
            found = decode(source, [short], DecodeSettings(), drafter=one, policy=policy)
            seconds[way].append(found.stats.draft_seconds / max(1, found.stats.target_calls))
    # The shortest time is the least disturbed one.
    alone, both = (min(way, default=0.0) for way in seconds)
    return max(0.0, both - alone)
