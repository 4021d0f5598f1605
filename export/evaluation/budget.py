"""Budget of an evaluation: work is dealt out piece by piece while the next one fits into the minutes."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from ...modules.progress import ProgressLine

T = TypeVar("T")
CLOSING_SHARE = 0.1
"""Share of the minutes that is kept for what follows decoding: comparisons and the report."""


class Budget:
    """Minutes of an evaluation, and the line that shows how much is done.

    Args:
        minutes: for everything from now on; None sets no limit.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = math.inf if minutes is None else 60 * minutes
        """Seconds of the whole evaluation."""
        self.clock, self.started = clock, clock()
        self.line = ProgressLine("evaluate", None, "answer", shown=False)
        """Counts answers."""

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    def fitting(self, pieces: Sequence[T], *, least: int, share: float = 1.0,
                sort: Callable[[T], Hashable] = lambda _: None) -> Iterator[T]:
        """Yield the pieces in order, until the next one would not end within a share of the minutes.

        The caller works on a piece before it asks for the next one; the mean seconds of those so far, of the same sort,
        are expected of the next. So the work ends one piece before or after the limit, however the machine's speed
        changes on the way.

        Args:
            pieces: work, what matters most first.
            least: number of pieces that are done whatever time it is.
            share: of the minutes, counted from the start of the evaluation.
            sort: pieces that take about as long as one another.
        """
        seconds: dict[Hashable, list[float]] = {}
        for place, piece in enumerate(pieces):
            # The first of a sort also warms up caches and compilers, for minutes perhaps: it says little of the next.
            known = seconds.setdefault(sort(piece), [])[1:]
            expected = sum(known) / len(known) if known else 0.0
            if place >= least and self.elapsed + expected > share * self.limit:
                return
            started = self.elapsed
            yield piece
            seconds[sort(piece)].append(self.elapsed - started)

    @property
    def seconds_left(self) -> float:
        """Seconds that the limit leaves; infinite without one."""
        return self.limit - self.elapsed

    def answered(self, count: int) -> None:
        """Count answers on the line."""
        self.line.advance(count)
