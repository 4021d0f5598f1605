"""One progress bar at a time, with rate and time left, that any stage can advance in its own unit.

Next to it stand the tokens per second and the share of slots without an answer.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm


@dataclass(kw_only=True)
class Progress:
    """Progress bar of the current stage. Counts in another unit than the bar's only appear as a rate next to it."""

    shown: bool
    bar: Any = None
    """That of tqdm; None between two stages."""
    unit: str = ""
    """Unit of the bar."""
    base: float = 0.0
    """Work of earlier runs, in that unit."""
    started: float = 0.0
    """Value of `time.monotonic()` at the start of the stage."""
    tokens: int = 0
    """Tokens of the stage."""
    busy: int = 0
    """Slots with an answer, summed over its passes."""
    slots: int = 0
    """All slots, likewise."""

    @contextmanager
    def stage(self, title: str, total: float | None, unit: str, done: float = 0) -> Iterator[None]:
        """Show a bar for the block. The unit "s" counts time itself; `done` counts work of an earlier run."""
        self.unit, self.started, self.tokens = unit, time.monotonic(), 0
        self.busy = self.slots = 0
        self.bar = tqdm(desc=title, total=total, unit=unit, initial=done, disable=not self.shown, smoothing=0.05)
        self.base = done
        try:
            yield
        finally:
            self.bar.set_postfix_str(self._rates(), refresh=False)
            self.bar.close()
            self.bar = None

    def advance(self, unit: str, amount: int) -> None:
        """Count `amount` more of a unit."""
        if self.bar is None:
            return
        if unit == "tok":
            self.tokens += amount
        # tqdm counts what it is given: of time, that is the part since its last call.
        if self.unit == "s":
            self.bar.update(round(self.base + time.monotonic() - self.started - self.bar.n, 1))
        elif unit == self.unit:
            self.bar.update(amount)
        if self.shown:
            self.bar.set_postfix_str(self._rates(), refresh=False)

    def count_slots(self, busy: int, slots: int) -> None:
        """Count a pass with answers in `busy` of its slots."""
        self.busy, self.slots = self.busy + busy, self.slots + slots

    def _rates(self) -> str:
        """Tokens per second, unless they are the bar's own unit, and the idle share of the slots, as text."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = [f"{self.tokens / seconds:.0f} tok/s"] if self.unit != "tok" and self.tokens else []
        idle = [f"{1 - self.busy / self.slots:.0%} of slots idle"] if self.slots else []
        return ", ".join(rate + idle)
