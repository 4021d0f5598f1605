"""Bytes of the tensors that code makes, counted while it runs.

The storage of every new tensor counts from its making until it is freed, on any device and independently of what else
the process holds. A view of a tensor that was there before is no allocation.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, strided
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which the bytes of new storages are counted: those alive, their peak, and the largest one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def restart(self) -> None:
        """Count the peak and the largest storage from here on."""
        self.peak, self.largest = self.live, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._known:
                # Made before the block: freeing it gives back nothing that was counted.
                self._watch(storage, 0)
        answer = self.perform(func, args, kwargs)
        for storage in _storages(answer):
            if storage._cdata not in self._known:
                size = storage.nbytes()
                self.live += size
                self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
                self._watch(storage, size)
        return answer

    def perform(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation."""
        return func(*args, **kwargs)

    def _watch(self, storage: Any, size: int) -> None:
        """Know a storage until it is freed: another may get the same address later."""
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storages(values: Any) -> Iterator[Any]:
    for value in tree_leaves(values):
        # Weights that are packed for oneDNN have no storage that Python can see.
        if isinstance(value, Tensor) and value.layout is strided:
            yield value.untyped_storage()
