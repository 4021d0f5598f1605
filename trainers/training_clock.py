"""How long a run has trained, and what it took of the machine."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds of training: validation, checkpoints and the time before the first step are left out.

    It stands still until `start`. A resumed run sets `before` to what the interrupted one had spent.
    """

    def __init__(self) -> None:
        self.before = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Let it run, once more after a pause."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Let it stand."""
        self.before, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do something that is no training."""
        self.stop()
        yield
        self.start()


def peak_memory_bytes(device: torch.device) -> int:
    """Greatest memory so far: what this process allocated on a CUDA device, or held resident anywhere else."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but on macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
