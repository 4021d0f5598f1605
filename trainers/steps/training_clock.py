"""Course of a training: its time, the part that waits for data, peak memory, and what it has learned between two
measurements on held-out text, and what those measured.
"""

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from ...modules.tuning.tree_search import MeasuredStep


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


@dataclass
class TrainingCurve:
    """The measured steps so far, and the figures of the optimizer steps after the last of them: a checkpoint holds all
    of it, so that a resumed run goes on with the very sums of the interrupted one."""

    steps: list[MeasuredStep] = field(default_factory=list)  # The measured steps, the untrained drafter's first
    labels: int = 0  # Labels that training has read, repeated ones again
    sums: dict[str, list[float]] = field(default_factory=dict)  # Sum and number of each since the last measurement

    def add(self, figures: Mapping[str, float], labels: float) -> None:
        """Count an optimizer step with its figures and its number of labels."""
        self.labels += round(labels)
        for name in ("loss", "head1/top1", "expected_accepted_length"):
            if name in figures:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + figures[name], count + 1]

    def measured(self, step: int, accepted_length: float) -> None:
        """Close the interval that ends with this step by what held-out text has accepted."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.steps.append(MeasuredStep(
            step=step, accepted_length=accepted_length, labels=self.labels, loss=means.get("loss"),
            accuracy=means.get("head1/top1"), expected_accepted_length=means.get("expected_accepted_length")))
        self.sums = {}
