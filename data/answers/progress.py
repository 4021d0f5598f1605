"""Progress of a distillation: one line for each of its stages, which counts in the stage's own unit.

Next to it stand the tokens per second and the share of slots without an answer.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...modules.progress import ProgressLine


@dataclass(kw_only=True)
class Progress:
    """Line of the current stage. Counts in another unit than the line's only appear as a rate next to it."""

    shown: bool
    seconds_left: Callable[[], float] = lambda: math.inf  # Of a limit in minutes for all stages; infinite without one
    line: ProgressLine | None = None  # None between two stages
    tokens: int = 0  # Tokens of the stage
    busy: int = 0  # Slots with an answer, summed over its passes
    slots: int = 0  # All slots, likewise

    @contextmanager
    def stage(self, title: str, total: float | None, unit: str, done: float = 0) -> Iterator[None]:
        """Show a line for the block; `done` counts work of an earlier run."""
        self.tokens = self.busy = self.slots = 0
        with ProgressLine(title, total, unit, done=done, shown=self.shown, seconds_left=self.seconds_left) as self.line:
            yield
        self.line = None

    def advance(self, unit: str, amount: int) -> None:
        """Count `amount` more of a unit."""
        if self.line is None:
            return
        if unit == "tok":
            self.tokens += amount
        self.line.figures = self._rates(self.line)
        self.line.advance(amount if unit == self.line.unit else 0)

    def settle(self, unit: str, found: int) -> None:
        """Let the line end with the number that the data have: work that they do without was counted too."""
        if self.line is not None and unit == self.line.unit:
            self.line.done = found

    def count_slots(self, busy: int, slots: int) -> None:
        """Count a pass with answers in `busy` of its slots."""
        self.busy, self.slots = self.busy + busy, self.slots + slots

    def _rates(self, line: ProgressLine) -> str:
        """Tokens per second, unless they are the line's own unit, and the idle share of the slots, as text."""
        seconds = max(time.monotonic() - line.started, 1e-9)
        rate = [f"{self.tokens / seconds:.0f} tok/s"] if line.unit != "tok" and self.tokens else []
        idle = [f"{1 - self.busy / self.slots:.0%} of slots idle"] if self.slots else []
        return ", ".join(rate + idle)
