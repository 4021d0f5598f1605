"""Training time, its part that waits for data, and peak memory of a run."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass
class Clock:
    """A clock of training seconds, without validation, checkpoints and the time before the first step: it is stopped
    until `start`. A resumed run sets `before` to the seconds of the interrupted one."""

    before: float = 0.0  # Seconds up to the last stop
    _since: float | None = field(default=None, init=False)

    def start(self) -> None:
        """Start or restart the clock."""
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the clock is stopped."""
        self.before, self._since = self.seconds, None
        yield
        self.start()


@runtime_checkable
class TimedBatches(Protocol):
    """Batches that know how long training has waited for them."""

    waited: float  # Seconds so far


@dataclass
class DataWait:
    """Seconds that a training waits for its batches, at most: the host waits, and a GPU may be at work meanwhile. A
    resumed run sets `before` to those of the interrupted one."""

    before: float = 0.0  # Seconds that are not those of these batches
    _batches: TimedBatches | None = field(default=None, init=False)

    def start(self, batches: object) -> None:
        """Count from here, where the batches know."""
        self._batches = batches if isinstance(batches, TimedBatches) else None
        if self._batches is not None:
            # The batches count from their own start, which may be before this training.
            self.before -= self._batches.waited

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + (0.0 if self._batches is None else self._batches.waited)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a CUDA device, or resident for any other device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, except on macOS, where the unit is bytes.
    return peak if sys.platform == "darwin" else peak * 1024
