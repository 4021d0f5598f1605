"""Bytes of code that runs on tensors of which only the shape exists.

What a program allocates is what its operations make and what autograd keeps of it, and both follow from shapes.
Weights and states are replaced by tensors that have a shape, a number format and a device but no values (fake tensors
of torch); token ids, labels and segments, which decide how much is computed, stay real. The program itself then runs
as it is, with its chunks, its autocast and its fused attention. The storage of every new tensor counts from its making
until it is freed, on any device and independently of what else the process holds; a view of a tensor that was there
before is no allocation."""

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, strided
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 1 << 16  # Elements from which a new floating-point tensor has no values: smaller ones may be read as numbers
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


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


class CountedWork(CountedStorages):  # type: ignore[no-untyped-call]
    """A block whose bytes are counted: those alive, and their peak. An operation that reads a tensor without values
    gives one without values; all others are performed."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def blank(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU with the shape and number format of this one, and no values."""
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made = FakeTensor(self._shapes, empty, torch.device("cpu"))
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A new tensor on the CPU without values; it is not counted."""
        return self.blank(torch.empty(shape, dtype=dtype, device="meta"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def perform(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation, without values where it reads any without or is large."""
        if func._overloadpacket in _INDEXED:
            # How many places a mask selects depends on its values, which a tensor without values does not tell.
            places: list[Any] = []
            for index in args[1]:
                masked = isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
                places += index.nonzero(as_tuple=True) if masked else [index]
            args = (args[0], places, *args[2:])
        # Made anew, a floating-point tensor of many elements has no values.
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        shape = next((one for one in args if isinstance(one, list | tuple | torch.Size)), ())
        large = dtype.is_floating_point and math.prod(size for size in shape if isinstance(size, int)) >= LARGE
        if not large or any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with self._shapes:
            return func(*args, **kwargs)


def blank_tensors(module: nn.Module, count: CountedWork, made: dict[int, Tensor]) -> None:
    """Replace the tensors of a module on torch's meta device by ones on the CPU without values, for the blocks of
    `count`. `made` are the replacements by the identity of what they replace: shared tensors stay shared."""
    for part in module.modules():
        kinds: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for held in kinds:
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made and tensor.is_floating_point():
                    made[id(tensor)] = count.blank(tensor)
                elif id(tensor) not in made:
                    # A buffer of whole numbers holds the ids of a draft vocabulary: it is read, and all are different.
                    made[id(tensor)] = torch.arange(tensor.numel()).view(tensor.shape).to(tensor.dtype)
                held[name] = made[id(tensor)]
