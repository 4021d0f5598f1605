"""A recorder of torch's operations that stands in for CUDA graphs: it repeats them on the very same tensors.

Like a graph it runs no Python code again: numbers that the host knew while recording stay what they were, and a result
is written where it was written then. Nor does recording change anything: tensors that were there before get back what
they held. What would make the host wait, which no graph can hold, is refused: a read, and on the pretended device
(`pretended_device.py`) an upload too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from draftsmith.modules import Loop, Proposer, Target
from support.devices.pretended_device import INSIDE, Pretended, Waits, reads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Records:
    """Records of computations, and how often each was repeated."""

    made: list["Record"] = field(default_factory=list)
    waits: Waits | None = None  # What crosses between the host and the pretended device, where there is one
    repeating: bool = False  # Whether a record is being repeated now
    operations: int = 0  # Operations on the pretended device in all repetitions

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record a computation."""
        before = None if self.waits is None else self.waits.copy()
        record = Record()
        try:
            with record:
                body()
            if self.waits is not None and before is not None:
                places = (self.waits.reads - before.reads) + (self.waits.uploads - before.uploads)
                if places:
                    raise RuntimeError(f"{', '.join(places)} makes the host wait, which a graph cannot hold")
        finally:
            record.restore()
        self.made.append(record)
        return lambda: self._repeat(record)

    def _repeat(self, record: "Record") -> None:
        before = 0 if self.waits is None else self.waits.operations
        self.repeating = True
        try:
            record.replay()
        finally:
            self.repeating = False
        if self.waits is not None:
            self.operations += self.waits.operations - before

    @property
    def replays(self) -> int:
        """Repetitions of all records."""
        return sum(record.replays for record in self.made)


class Record(TorchDispatchMode):
    """The operations inside the block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0
        self._own: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (inside := INSIDE.get(func)) is not None:
            # A graph holds the kernels of the operations inside it.
            with self:
                return inside(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # Inside such an operation they come whole: a `reshape` that copies says that it is a view.
            with self:
                return func.decompose(*args, **kwargs)
        if reads(func, args):
            raise RuntimeError(f"{func} makes the host wait, which a graph cannot hold")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(value)
        given = _storages((args, kwargs))
        result = func(*args, **kwargs)
        self._own |= _storages(result) - given
        if not func.is_view:
            self.operations.append((func, args, kwargs, _tensors(result)))
        return result

    def _save(self, written: Tensor) -> None:
        """Keep what a tensor of before the block holds."""
        key = _storage(written)
        if key not in self._own and key not in self._before:
            held = _held(written)
            whole = held.as_strided((held.untyped_storage().nbytes() // held.element_size(),), (1,), 0)
            self._before[key] = whole, whole.clone()

    def restore(self) -> None:
        """Give the tensors of before the block what they held."""
        with torch.no_grad():
            for whole, values in self._before.values():
                whole.copy_(values)
        self._before.clear()

    def replay(self) -> None:
        """Run them again, and put what they make where it was."""
        self.replays += 1
        for func, args, kwargs, written in self.operations:
            for place, value in zip(written, _tensors(func(*args, **kwargs)), strict=True):
                if address(value) != address(place):
                    place.copy_(value)


def address(tensor: Tensor) -> int:
    """The address of a tensor's first value."""
    return _held(tensor).data_ptr()


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, Pretended) else tensor


def _storage(tensor: Tensor) -> int:
    return int(_held(tensor).untyped_storage()._cdata)


def _storages(values: Any) -> set[int]:
    """Weights that are packed for oneDNN have no storage that Python can see."""
    return {_storage(tensor) for tensor in _tensors(values) if tensor.layout is torch.strided}


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


_LEFT_OUT = ("target", "decoder", "drafter")  # Attributes that lead to weights
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # Address, shape and strides


def held_tensors(loop: Loop) -> dict[str, Place]:
    """Place of every tensor of the loop's batch: cache, draft state, random numbers, roots, and what a drafter without
    weights stores."""
    found: dict[str, Place] = {}
    seen: set[int] = set()
    drafters = [loop.drafter, *getattr(loop.drafter, "parts", ())]
    stores = {f"store {number}": vars(one) for number, one in enumerate(drafters)
              if isinstance(one, Proposer) and not isinstance(one, nn.Module)}
    for path, tensor in _walk({"batch": loop.batch, "recorded": loop.recorded, **stores}, "", seen):
        found[path] = address(tensor), tuple(tensor.shape), tuple(tensor.stride())
    return found


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in seen or isinstance(value, (Target, nn.Module, type, str, int, float)) or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside = [(str(name), one) for name, one in value.items()]
    elif isinstance(value, (list, tuple, set)):
        inside = [(str(place), one) for place, one in enumerate(value)]
    elif type(value).__module__.startswith("draftsmith."):
        inside = list(vars(value).items())
    else:
        return
    for name, one in inside:
        if name not in _LEFT_OUT:
            yield from _walk(one, f"{path}.{name}" if path else name, seen)
