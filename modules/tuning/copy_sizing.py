"""Sizes of a copied chain next to a draft's tree: replayed acceptance and the cost model say what is fastest.

Prompt lookup copies where the text repeats itself and the draft guesses elsewhere, so that what both accept nearly adds
up. What a pass with both costs depends on how often there is something to copy, which the replay counts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..baselines.joined_policies import LONGEST_COPY, LOOKUP, PolicyName, copying, joined_drafter
from ..decoding.loop import decode
from ..decoding.requests import DecodeSettings, Generation, Request
from ..features import Features
from ..interfaces.drafter import Drafter
from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from ..policies.registry import MOST, STATIC
from ..policies.static_tree import StaticTree
from ..target.model import Target
from ..token_tree import TokenTree, Topology
from ..verification.tree_walk import Accepted
from .cost_model import CostModel
from .replay_target import Replay

COPIED = (7, 4, LONGEST_COPY)
"""Lengths of the copied chain that are tried, in tokens, in this order."""
ANSWERS = 12
"""Held-out answers that are replayed by default."""
SECONDS = 60.0
"""Time after which no further length is tried; the first one always is."""


@dataclass(frozen=True, kw_only=True)
class CopyTrial:
    """One size of both parts, replayed on held-out answers."""

    copied: int
    """Most tokens copied; 0 for the draft's tree alone."""
    extra: int
    """Nodes that a pass may have beyond those of the draft's tree alone."""
    accepted_length: float
    """Tokens emitted per pass, the bonus included."""
    nodes: float
    """Mean nodes of a pass with one row, the root included."""

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
    """Replayed trials of a copied chain next to one tree of the draft."""

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
        """Predicted speed-up over plain decoding of so many rows, answered as the replayed ones were.

        Of several rows one copies in most passes, so that each pass is counted with all the nodes it may have.
        """
        nodes = trial.nodes if batch == 1 else self.tree_size + trial.extra
        below = int(nodes)
        low, high = (cost.pass_seconds(size, batch) for size in (below, below + 1))
        seconds = low + (high - low) * (nodes - below) + cost.draft_seconds(self.tree_size, batch)
        seconds += self.copy_seconds if trial.copied else 0.0
        return trial.accepted_length * cost.pass_seconds(1, batch) / seconds

    def best(self, cost: CostModel, batch: int = 1) -> CopyTrial:
        """The trial with copies that is predicted to be the fastest."""
        return max(self.trials, key=lambda trial: self.speedup(trial, cost, batch))

    def pays(self, cost: CostModel) -> bool:
        """True if one row is predicted to be decoded faster with copies than by the draft alone."""
        return self.speedup(self.best(cost), cost) > self.speedup(self.alone, cost)


def size_copies(
    drafter: Drafter, target: Target, features: Sequence[Features], topology: Topology, *, answers: int = ANSWERS
) -> CopySizing:
    """Replay held-out answers, greedy or drawn, with chains of some lengths next to a draft's tree.

    Args:
        drafter: bound to the target, on the features' device.
        target: the target that wrote the answers.
        features: encoded rows, one conversation each.
        topology: the draft's tree, as it is used here.
        answers: most that are replayed, spread over all.
    """
    started, source, own = time.monotonic(), Replay(target, features, drafter=drafter), StaticTree(topology)
    # What there is to copy differs from one kind of prompt to the next.
    requests = source.requests[:: -(-len(source.requests) // answers) or 1]
    joined = joined_drafter(PolicyName(own=STATIC, partner=LOOKUP), drafter, target)
    alone = _Replayed.of(source, requests, drafter, own)
    tried: dict[tuple[int, int], _Replayed] = {}
    for copied in COPIED:
        if not tried or time.monotonic() - started < SECONDS:
            tried |= {(copied, extra): _Replayed.of(source, requests, joined, copying(own, copied, extra))
                      for extra in sorted({max(0, copied + 1 - topology.size), copied})}
    usual = sorted(found.draft_seconds for found in tried.values())[len(tried) // 2]
    return CopySizing(
        tree_size=topology.size,
        alone=alone.trial(0, 0),
        trials=tuple(found.trial(*sizes) for sizes, found in tried.items()),
        copy_seconds=max(0.0, usual - alone.draft_seconds),
    )


@dataclass(frozen=True)
class _Replayed:
    """Counts of a replay: tokens and nodes of a pass, seconds of its drafting."""

    accepted_length: float
    nodes: float
    draft_seconds: float

    @classmethod
    def of(cls, source: Replay, requests: Sequence[Request], drafter: Proposer, policy: Policy) -> "_Replayed":
        """Decode the answers one by one, as for one user."""
        sizes: list[int] = []

        def note(tree: TokenTree, _accepted: Accepted, _slots: Sequence[Generation]) -> None:
            sizes.append(tree.size)

        found = decode(source, requests, DecodeSettings(), drafter=drafter, policy=policy, observer=note)
        passes = max(1, len(sizes))
        return cls(max(1.0, found.accepted_length), max(1.0, sum(sizes) / passes), found.stats.draft_seconds / passes)

    def trial(self, copied: int, extra: int) -> CopyTrial:
        """The counts without the seconds, with the sizes that were tried."""
        return CopyTrial(copied=copied, extra=extra, accepted_length=self.accepted_length, nodes=self.nodes)
