"""Timer of the pieces of the decoding loop on their device: on CUDA a launch returns before its work is done."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceTimer:
    """Adds up the seconds of pieces of work, and never makes the host wait while they run: on CUDA an event before and
    one after each piece are read later; elsewhere the host's clock is read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        yield
        end.record(stream)
        self._pieces.append((start, end))

    def read(self) -> float:
        """Seconds since the last reading. It waits for the pieces: read where the host has waited for the device."""
        for start, end in self._pieces:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._pieces.clear()
        return seconds
