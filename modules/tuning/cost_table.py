"""Seconds of decoding steps on this machine: the smallest that were measured, by rows and nodes of a tree."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MOST_EXCESS = 0.15
"""Share above which the excess of timed steps speaks of other programs: a quiet machine repeats a step within it."""
MOST_SECONDS = 86_400.0
"""Longest step that a table may hold: beyond it a speed-up could overflow."""


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Seconds of one step of so many rows, by nodes of its tree."""

    batch: int
    """Rows."""
    sizes: tuple[int, ...]
    """Numbers of nodes, ascending from 1."""
    pass_seconds: tuple[float, ...]
    """Seconds of a verifying pass of so many nodes, commit included; first those of plain decoding, a token a pass."""
    draft_seconds: tuple[float, ...]
    """Seconds the drafter needs to grow a tree of so many nodes and observe the pass; 0 for 1 node."""

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
        if not min(self.pass_seconds) > 0:
            raise ValueError("a pass must take some time by a cost curve")


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of steps of one row, and of several."""

    curves: tuple[CostCurve, ...]
    """By rows, ascending; those of the next larger number hold for others."""
    copy_seconds: float = 0.0
    """Seconds that copying from the text adds to the drafting of a step."""
    excess: float = 0.0
    """Share by which half of the timed steps took longer than the shortest of their kind; the median over the kinds."""

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
    return max(0.0, ys[place - 1] + (ys[place] - ys[place - 1]) * (x - low) / (high - low))
