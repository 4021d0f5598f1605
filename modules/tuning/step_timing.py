"""Seconds of decoding steps on this machine, by rows and nodes of a tree, and their timing.

All kinds of steps take turns, so that contention affects every one alike. Of each kind the shortest time counts, since
other programs only add to it.

Shapes: B rows, N nodes or tokens read, D hidden size, V vocabulary."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch

from ..baselines.registry import COPIED, LOOKUP, PolicyName, joined_drafter, joined_policy
from ..decoding.rounds import for_host, observation, read, verified
from ..interfaces.proposer import AheadStates, Observation, Proposer, Verified, started
from ..policies.base import Policy
from ..policies.registry import STATIC
from ..policies.trees import StaticTree
from ..target.model import Target
from ..token_tree import Topology
from ..verification.acceptance_rules import down_to
from ..verification.sampling import argmax

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Nodes of the trees that are timed, the largest one only where the draft's tree has more than the one before."""
BATCHES, SLOTS, CONTEXT = (1, 2, 4, 8, 16), 64, 192
"""Rows that are timed at once, with trees of at most so many nodes in all rows together, after so many tokens."""
MOST_EXCESS = 0.15  # Largest excess of timed steps without other programs: a quiet machine repeats a step within it
LEAST_SECONDS = 1e-9  # Fewest seconds of a pass: no machine is faster
MOST_SECONDS = 86_400.0  # Longest step that a table may hold: beyond it a speed-up could overflow
_JOINED = PolicyName(own=STATIC, partner=LOOKUP, size=COPIED)


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Seconds of one step of so many rows, by nodes of its tree."""

    batch: int  # Rows
    sizes: tuple[int, ...]  # Numbers of nodes, ascending from 1
    pass_seconds: tuple[float, ...]  # Seconds of a verifying pass of so many nodes, commit included
    draft_seconds: tuple[float, ...]  # Seconds to grow a tree of so many nodes and observe the pass; 0 for 1 node

    def __post_init__(self) -> None:
        if self.sizes[:1] != (1,) or list(self.sizes) != sorted(set(self.sizes)) or self.batch < 1:
            raise ValueError(f"sizes of a cost curve must ascend from 1, for 1 row or more, got {list(self.sizes)} for "
                             f"{self.batch}")
        for name in ("pass_seconds", "draft_seconds"):
            seconds = getattr(self, name)
            if len(seconds) != len(self.sizes):
                raise ValueError(f"{name} of a cost curve must be {len(self.sizes)} numbers, got {len(seconds)}")
            if wrong := [one for one in seconds if not 0 <= one <= MOST_SECONDS]:
                raise ValueError(f"{name} of a cost curve must lie between 0 and {MOST_SECONDS:g} s, got {wrong[0]:g}")
        if not min(self.pass_seconds) >= LEAST_SECONDS:
            raise ValueError(f"a pass must take {LEAST_SECONDS:g} s or more by a cost curve")


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of steps of one row, and of several."""

    curves: tuple[CostCurve, ...]  # By rows, ascending; those of the next larger number hold for others
    copy_seconds: float = 0.0  # Seconds that copying from the text adds to the drafting of a step
    excess: float = 0.0  # Share by which half of the steps took longer than the shortest of their kind; the median

    def __post_init__(self) -> None:
        if not self.curves or not 0 <= self.copy_seconds <= MOST_SECONDS:
            raise ValueError(f"a cost table needs a curve, and copy_seconds from 0 to {MOST_SECONDS:g}, got "
                             f"{len(self.curves)} and {self.copy_seconds:g}")

    @property
    def contended(self) -> bool:
        """True where other programs slowed the steps down while they were timed."""
        return self.excess > MOST_EXCESS

    @property
    def largest(self) -> int:
        """Nodes of the largest tree that was timed."""
        return self.curves[0].sizes[-1]

    def curve(self, batch: int = 1) -> CostCurve:
        """The seconds of so many rows."""
        return next((one for one in self.curves if one.batch >= batch), self.curves[-1])

    def pass_seconds(self, nodes: float, batch: int = 1) -> float:
        """Seconds of a verifying pass; a mean number of nodes need not be whole."""
        found = self.curve(batch)
        return along(found.sizes, found.pass_seconds, nodes)

    def draft_seconds(self, nodes: float, batch: int = 1) -> float:
        """Seconds of growing trees of so many nodes and observing their pass; 0 for 1 node, which is not drafted."""
        found = self.curve(batch)
        return along(found.sizes, found.draft_seconds, nodes)

    def step_seconds(self, nodes: int, batch: int = 1) -> float:
        """Seconds of drafting and verifying trees of so many nodes; more rows than were timed take as long as larger
        trees of fewer rows."""
        more = max(1.0, batch / self.curves[-1].batch)
        return self.pass_seconds(more * nodes, batch) + more * self.draft_seconds(nodes, batch)

    def overlapped(self, chance: float) -> tuple[int, float]:
        """(tokens of a pass, speed-up over the best chain that is drafted before its pass) of drafting on a device of
        its own while the target verifies (PEARL, arXiv:2408.11850), one row whose tokens have this chance.

        After a pass in which all was accepted the next tokens are there already, and the first of them is verified with
        those before them; after any other one they have to be drafted anew, while the target verifies their first."""
        chance, step = min(max(chance, 0.001), 0.999), max(self.draft_seconds(2), LEAST_SECONDS)
        ahead = min(max(1, round(self.pass_seconds(1) / step)), SIZES[-1])
        whole = chance**ahead
        share = chance / (chance + 1 - whole)
        tokens = 1 - share + share * (1 - whole) / (1 - chance)
        rate = tokens / max(ahead * step, self.pass_seconds(ahead))
        best = max((1 - chance ** (1 + count)) / (1 - chance) / (self.pass_seconds(1 + count) + count * step)
                   for count in range(SIZES[-1]))
        return ahead, rate / best

    def predict(self, accepted_length: float, nodes: float, batch: int = 1, *, drafted: float | None = None,
                copies: bool = False) -> float:
        """Speed-up over plain decoding of so many rows, if a pass of so many nodes emits `accepted_length` tokens for
        each, after drafting as many nodes or `drafted` ones, and copying from the text too where it `copies`."""
        seconds = self.pass_seconds(nodes, batch) + self.draft_seconds(nodes if drafted is None else drafted, batch)
        return accepted_length * self.pass_seconds(1, batch) / (seconds + self.copy_seconds * copies)


def along(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """The value at x of a piecewise linear function through these points, of which the last piece goes on."""
    if len(xs) == 1:
        return ys[0]
    place = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low, high = xs[place - 1], xs[place]
    # Falling seconds fall no further: they would end at none, or below.
    return max(min(ys[place - 1 : place + 1]), ys[place - 1] + (ys[place] - ys[place - 1]) * (x - low) / (high - low))


@torch.no_grad()
def measure_cost(target: Target, drafter: Proposer, topology: Topology, *, context: int = CONTEXT, repeats: int = 5,
                 seconds: float = 15.0) -> CostTable:
    """Time steps with the prefixes of a best-first tree, after `context` tokens at most: `repeats` of each kind after a
    round of warm-up. No further round starts after `seconds`; two are always timed, so that contention shows."""
    context = min(context, target.context_length - room(topology.size, 1, drafter.virtual_nodes) - 1)
    benches = [_Bench(target, drafter, topology, batch, context, timed_sizes(topology.size, batch), repeats)
               for batch in BATCHES]
    joined = joined_drafter(_JOINED, drafter, target)
    benches.append(_Bench(target, joined, topology, 1, context, [2], repeats, copies=True))
    times: dict[tuple[_Bench, int], list[tuple[float, float]]] = defaultdict(list)
    started = time.monotonic()
    # The first turn warms up.
    for turn in range(repeats + 1):
        if turn > 2 and time.monotonic() - started > seconds:
            break
        for bench in benches:
            for size in bench.sizes:
                found = bench.step(size)
                if turn > 0:
                    times[bench, size].append(found)
    steps = {kind: [passed + drafted for passed, drafted in found] for kind, found in times.items()}
    shortest = {kind: tuple(map(min, zip(*found, strict=True))) for kind, found in times.items()}
    *alone, last = benches
    return CostTable(
        curves=tuple(CostCurve(batch=bench.batch, sizes=tuple(bench.sizes),
                               # Other programs only add to a time: no pass takes as long as a larger one was seen to.
                               pass_seconds=tuple(accumulate(
                                   (shortest[bench, size][0] for size in reversed(bench.sizes)), min))[::-1],
                               draft_seconds=tuple(accumulate((shortest[bench, size][1] for size in bench.sizes), max)))
                     for bench in alone),
        copy_seconds=max(0.0, shortest[last, 2][1] - shortest[alone[0], 2][1]),
        excess=median(median(found) / min(found) - 1 for found in steps.values()))


def timed_sizes(nodes: int, batch: int) -> list[int]:
    """Nodes of the trees that are timed with so many rows, of a draft tree of `nodes`."""
    found = {nodes, *(size for size in SIZES if size <= max(SIZES[-2], nodes))}
    return sorted(size for size in found if size * batch <= SLOTS)


def room(nodes: int, batch: int, virtual: int) -> int:
    """Slots of a row's cache for the timed trees and copies, next to its context."""
    return (timed_sizes(nodes, batch)[-1] + COPIED) * (1 + virtual)


def timed_slots(nodes: int, virtual: int, context: int = CONTEXT) -> int:
    """Slots of the target's cache that timing takes, for a draft tree of `nodes`."""
    # One row more copies too.
    return sum(rows * (context + room(nodes, rows, virtual)) for rows in (1, *BATCHES))


class _Bench:
    """Rows that have a context of arbitrary tokens, with the drafter's state. The cost of a pass does not depend on its
    tokens, so nothing is computed for the context."""

    def __init__(self, target: Target, drafter: Proposer, topology: Topology, batch: int, context: int,
                 sizes: Sequence[int], repeats: int, copies: bool = False) -> None:
        self.target, self.drafter, self.topology, self.copies = target, drafter, topology, copies
        self.batch, self.sizes = batch, sizes
        self.policies: dict[int, Policy] = {
            size: StaticTree(topology.prefix(min(size, topology.size))) for size in sizes}
        if copies:
            self.policies = {size: joined_policy(_JOINED, own, target) for size, own in self.policies.items()}
        # The target's cache is rewound after each step; the drafter's text grows by one token.
        steps = (repeats + 1) * len(sizes)
        largest = sizes[-1] + COPIED
        self.rows = target.start(batch, context + room(topology.size, batch, drafter.virtual_nodes), drafter.taps)
        self.rows.cache.assume(context)
        self.state = started(drafter, self.rows, batch, context + steps + largest)
        self.rows_B = torch.arange(batch, device=target.device)
        self.roots_B = torch.zeros_like(self.rows_B)
        # The drafter observes the context.
        shape = (batch, context)
        tokens_BN = torch.arange(context, device=target.device).expand(shape) % target.vocab_size
        states_BND = torch.zeros(*shape, target.hidden_size, dtype=target.dtype, device=target.device)
        last_B1 = torch.full_like(self.roots_B, context - 1)[:, None]
        answers = Verified(
            tokens_BM=tokens_BN[:, -1:], real_BM=torch.ones_like(last_B1, dtype=torch.bool),
            logits_BMV=torch.zeros(batch, 1, target.vocab_size, dtype=target.dtype, device=target.device),
            places_BM=last_B1)
        ahead = None
        if count := drafter.virtual_nodes:
            states_BSD = states_BND[:, :1].expand(-1, count, -1)
            ahead = AheadStates(states_BSD=states_BSD,
                                present_BS=torch.ones_like(states_BSD[..., 0], dtype=torch.bool))
        drafter.observe(self.state, self.rows_B, Observation(
            tokens_BN=tokens_BN, counts_B=last_B1[:, 0] + 1, final_BND=states_BND,
            taps=dict.fromkeys(drafter.taps, states_BND), roots_B=self.roots_B,
            verified=answers if drafter.reads_logits else None, ahead=ahead, host_rows=list(range(batch)),
            host_counts=[context] * batch))

    def step(self, size: int) -> tuple[float, float]:
        """(seconds of the pass, seconds of the drafter) of one step in which nothing is accepted."""
        started = _now(self.target.device)
        # Root tokens in all nodes take as long to verify, where a drafter has no guess or no tree of so many nodes.
        tree = Topology.chain(size - 1).plant(self.roots_B[:, None].expand(-1, size))
        drafts = 1 < size <= self.topology.size or self.copies
        if drafts:
            grown = self.policies[size].grow(self.drafter, self.state, self.roots_B)
            tree = grown if grown.size >= size else tree
        drafted = _now(self.target.device)
        sent = self.drafter.extended(self.state, tree) if drafts else tree
        select_BM = None if sent.virtual is None else torch.arange(tree.size, device=tree.tokens_BN.device)
        output = self.rows.run(sent, select_BM=None if select_BM is None else select_BM.expand_as(tree.tokens_BN))
        accepted = down_to(tree, self.roots_B, argmax(output.logits_BMV)[:, 0])
        _, counts, _ = read(for_host(tree, accepted, self.roots_B).tolist())
        self.rows.commit(accepted.path_BK, accepted.counts_B, counts, moved=size > 1)
        passed = _now(self.target.device)
        # The next step finds the same context; the drafter's text grows, for which its state has room.
        cache = self.rows.cache
        cache.lengths_B[: self.batch] -= 1
        cache.host_lengths[: self.batch] = [length - 1 for length in cache.host_lengths[: self.batch]]
        if not drafts:
            return passed - drafted, 0.0
        answers = verified(tree, accepted, output) if self.drafter.reads_logits else None
        resumed = _now(self.target.device)
        self.drafter.observe(self.state, self.rows_B, observation(sent, accepted, output, counts, answers))
        return passed - drafted, drafted - started + _now(self.target.device) - resumed


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
