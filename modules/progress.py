"""Progress of one stage of work as a line: on a terminal it is rewritten in place, elsewhere it comes seldom."""

import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

TERMINAL_SECONDS, LOG_SECONDS = 0.1, 10.0  # Least time between two lines on a terminal, and in a log, where each stays
TELLING_SHARE = 0.02  # Share of the work from which its rate says when the rest is done: first passes also fill caches


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """The line of a stage: work done (by an earlier run too), time, time left, rate, and figures of the caller, on
    stderr if `shown`. `total` is None where nobody knows it; `seconds_left` returns what a limit in minutes leaves,
    infinite where none ends the stage."""

    def __init__(self, title: str, total: float | None, unit: str, *, done: float = 0,
                 seconds_left: Callable[[], float] = lambda: math.inf, shown: bool = True) -> None:
        self.title, self.total, self.unit, self.shown, self.seconds_left = title, total, unit, shown, seconds_left
        self.done, self.before, self.figures = done, done, ""
        self.started = self.written = time.monotonic()
        self.width, self.in_place = 0, sys.stderr.isatty()
        self.entitle(title)

    def advance(self, amount: float = 1) -> None:
        """Count more work, and write the line unless the one before is too young."""
        self.done += amount
        now = time.monotonic()
        if now - self.written >= (TERMINAL_SECONDS if self.in_place else LOG_SECONDS):
            self.written = now
            self._write("" if self.in_place else "\n")

    def entitle(self, title: str) -> None:
        """Give the line another title: what comes next may take a minute in which nothing is counted."""
        self.title = title
        if self.in_place:
            self._write("")

    def close(self) -> None:
        """Write the last line; a log gets none too soon after the line before, or after the start."""
        if self.in_place or time.monotonic() - self.written >= LOG_SECONDS:
            self._write("\n")
        self.shown = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        seconds, new = time.monotonic() - self.started, self.done - self.before
        # The time that minutes leave is known from the start; that of the work from its rate.
        left = max(0.0, self.seconds_left())
        if self.total is not None and 0 < new >= TELLING_SHARE * (self.total - self.before):
            left = min(left, max(0.0, self.total - self.done) * seconds / new)
        of = "" if self.total is None else f" of {self.total:,.0f}"
        each = new / max(seconds, 1e-9)
        rate = "" if not new else f"{each:,.1f} {self.unit}/s" if each >= 1 else f"{1 / each:,.1f} s/{self.unit}"
        parts = [f"{self.done:,.0f}{of} {self.unit} in {clock(seconds)}",
                 f"{clock(left)} left" if left < math.inf else "", rate, self.figures]
        return f"{self.title}: {', '.join(part for part in parts if part)}"

    def _write(self, end: str) -> None:
        if not self.shown:
            return
        line = str(self)
        if self.in_place:
            # A line that a terminal breaks in two could not be rewritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            line, self.width = "\r" + line.ljust(self.width), len(line)
        sys.stderr.write(line + end)
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds: 0:07, 3:30, 2:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
