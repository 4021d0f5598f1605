"""Batches that are made ahead by a thread, in their order.

A thread and no process: nearly all of the work is copying out of memory maps, for which torch lets other threads run. A
process would copy every state once more, through shared memory that containers keep small, would start for seconds and
could outlive a killed training.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
AHEAD = 2  # Micro-batches that are read and packed while earlier ones are trained on: more would only fill memory
THREAD = "batches"  # Start of the thread's name


class Prefetched(Generic[T]):
    """The endless batches start, start + 1, ..., which a thread makes by their numbers so many `ahead`, on a CUDA
    device of that number where training is; with 0 each is made when it is due, without a thread.

    The error of a batch is raised where that batch is due, as without a thread. What was made is kept by this process
    alone, and nothing that the thread does depends on its time: ahead or not, the batches are the same."""

    def __init__(self, make: Callable[[int], T], start: int, ahead: int, device: torch.device | None = None) -> None:
        self.make, self.start, self.ahead, self.device = make, start, ahead, device
        self.waited = 0.0  # Seconds that were spent waiting for batches
        self._worker: ThreadPoolExecutor | None = None

    def __iter__(self) -> Iterator[T]:
        batches = self._made_ahead() if self.ahead else map(self.make, count(self.start))
        while True:
            started = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - started
            yield batch

    def close(self) -> None:
        """End the thread once it has made what it is making; nothing where it has ended."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None

    def _made_ahead(self) -> Iterator[T]:
        self.close()
        worker = self._worker = ThreadPoolExecutor(1, THREAD)
        threads = torch.get_num_threads()
        worker.submit(self._prepare).result()
        # A thread that starts later takes the number that was set last; this one has taken its own.
        torch.set_num_threads(threads)
        coming = deque[Future[T]](worker.submit(self.make, self.start + place) for place in range(self.ahead))
        try:
            for number in count(self.start + self.ahead):
                batch = coming.popleft().result()
                coming.append(worker.submit(self.make, number))
                yield batch
        finally:
            worker.shutdown(cancel_futures=True)

    def _prepare(self) -> None:
        """Set what torch keeps for each thread: copies need no second thread, which would be one of the training's."""
        # A thread takes the number that was set last when it first asks, and would do so after this.
        torch.get_num_threads()
        torch.set_num_threads(1)
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
