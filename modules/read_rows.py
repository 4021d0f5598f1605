"""Rows that are read whenever they are asked for, so that memory holds those in use alone."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import overload

from .features import Features


class ReadRows(Sequence[Features]):
    """Rows of text with the target's states, none of which is kept: those of long held-out text take more than a device
    has. Each row has a reader, which returns the same row at every call."""

    def __init__(self, read: Iterable[Callable[[], Features]]) -> None:
        self.read = tuple(read)

    def __len__(self) -> int:
        return len(self.read)

    @overload
    def __getitem__(self, place: int) -> Features: ...

    @overload
    def __getitem__(self, place: slice) -> "ReadRows": ...

    def __getitem__(self, place: int | slice) -> "Features | ReadRows":
        if isinstance(place, slice):
            return ReadRows(self.read[place])
        return self.read[place]()

    def mapped(self, change: Callable[[Features], Features]) -> "ReadRows":
        """The same rows, each changed after it is read."""
        return ReadRows(partial(_changed, read, change) for read in self.read)


def _changed(read: Callable[[], Features], change: Callable[[Features], Features]) -> Features:
    return change(read())
