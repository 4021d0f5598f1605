"""What a pass costs on this machine, and the tree size that pays.

Seconds are medians of repeated passes over all sizes in turn, so that a busy moment of the machine hits every size
alike.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .drafter import Observation, Proposer
from .policies import StaticTree
from .target import Target, TargetRows
from .tree import TokenTree, Topology

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Nodes of the passes that are timed."""


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Measured seconds of one decoding step, by nodes of its tree."""

    sizes: tuple[int, ...]
    """Nodes, ascending, the first 1."""
    pass_seconds: tuple[float, ...]
    """Seconds of a verifying pass of so many nodes, commit included."""
    draft_seconds: tuple[float, ...]
    """Seconds the drafter needs to grow a tree of so many nodes and observe the pass; 0 for 1 node."""
    context: int
    """Tokens already in the cache."""

    def step_seconds(self, size: int) -> float:
        """Seconds of a drafted step with a tree of `size` nodes, interpolated between the sizes measured."""
        return _interpolate(self.sizes, self.pass_seconds, size) + _interpolate(self.sizes, self.draft_seconds, size)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a pass of one token."""
        return self.pass_seconds[0]

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {
            "sizes": list(self.sizes),
            "pass_seconds": list(self.pass_seconds),
            "draft_seconds": list(self.draft_seconds),
            "context": self.context,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "CostCurve":
        """Read what `to_dict` wrote."""
        return cls(
            sizes=tuple(fields["sizes"]),
            pass_seconds=tuple(fields["pass_seconds"]),
            draft_seconds=tuple(fields["draft_seconds"]),
            context=int(fields["context"]),
        )


@dataclass(frozen=True, kw_only=True)
class TreeChoice:
    """The size that maximises predicted tokens per second."""

    size: int
    """Nodes of the tree, the root included; 1 when drafting does not pay."""
    expected_accepted_length: float
    """Tokens per pass that the calibration expects of it."""
    predicted_speedup: float
    """Predicted tokens per second over plain decoding."""


def choose_size(expected_lengths: Sequence[float], cost: CostCurve) -> TreeChoice:
    """Pick the prefix of a best-first tree with the most predicted tokens per second.

    Args:
        expected_lengths: expected accepted length of each size from 1 on, the bonus included.
        cost: measured seconds.
    """
    best = TreeChoice(size=1, expected_accepted_length=1.0, predicted_speedup=1.0)
    for size, length in enumerate(expected_lengths, start=1):
        if 1 < size <= cost.sizes[-1]:
            speedup = length * cost.plain_seconds / cost.step_seconds(size)
            if speedup > best.predicted_speedup:
                best = TreeChoice(size=size, expected_accepted_length=length, predicted_speedup=speedup)
    return best


@torch.no_grad()
def measure_cost(
    target: Target,
    drafter: Proposer,
    topology: Topology,
    *,
    context: int = 192,
    repeats: int = 9,
    sizes: Sequence[int] = SIZES,
) -> CostCurve:
    """Time verifying passes and draft steps with the prefixes of a best-first tree, one row, on this machine.

    Args:
        target: the target.
        drafter: bound to it.
        topology: best-first order of the tree.
        context: tokens already in the cache; at most what the target's context allows.
        repeats: passes of each size, after one round of warm-up.
        sizes: nodes to try; those above the tree's are left out.
    """
    tried = tuple(size for size in sizes if size <= topology.size)
    context = min(context, target.context_length - topology.size - 1)
    rows = target.start(1, context + topology.size, drafter.taps)
    prompt_BN = (torch.arange(context, device=target.device) % target.vocab_size)[None]
    counts_B = torch.tensor([context], device=target.device)
    rows.run(TokenTree.prompts(prompt_BN, counts_B), select_BM=counts_B[:, None] - 1)
    rows.commit(torch.arange(context, device=target.device)[None], counts_B, [context], moved=False)
    passes: dict[int, list[float]] = {size: [] for size in tried}
    drafts: dict[int, list[float]] = {size: [] for size in tried}
    for repeat in range(repeats + 1):
        for size in tried:
            pass_time, draft_time = _time_step(rows, drafter, topology.prefix(size))
            if repeat > 0:
                passes[size].append(pass_time)
                drafts[size].append(draft_time)
    return CostCurve(
        sizes=tried,
        pass_seconds=tuple(median(passes[size]) for size in tried),
        draft_seconds=tuple(median(drafts[size]) if size > 1 else 0.0 for size in tried),
        context=context,
    )


def _time_step(rows: TargetRows, drafter: Proposer, topology: Topology) -> tuple[float, float]:
    """(seconds of the pass, seconds of the drafter) of one step whose tokens are then forgotten."""
    target, device = rows.target, rows.target.device
    policy, state = StaticTree(topology), drafter.start(1, rows.cache.capacity)
    one_B = torch.ones(1, dtype=torch.long, device=device)
    root_B = torch.zeros(1, dtype=torch.long, device=device)
    began = _now(device)
    output = rows.run(topology.plant(root_B[:, None].expand(-1, topology.size)))
    # Reading the choices on the host is part of every pass.
    output.logits_BMV.argmax(-1).tolist()
    middle = _now(device)
    drafter.clear(state, root_B)
    drafter.observe(
        state,
        root_B,
        Observation(
            tokens_BN=root_B[:, None],
            counts_B=one_B,
            final_BND=output.final_BND[:, :1],
            taps={k: v[:, :1] for k, v in output.taps.items()},
            roots_B=root_B,
        ),
    )
    if topology.size > 1:
        policy.grow(drafter, state, root_B)
    ended = _now(device)
    rows.commit(torch.zeros(1, 1, dtype=torch.long, device=target.device), one_B * 0, [0], moved=False)
    return middle - began, ended - middle


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Piecewise linear, constant beyond the last point."""
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[0] if x <= xs[0] else ys[-1]
