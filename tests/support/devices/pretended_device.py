"""A device that is not there: tensors that are held on the CPU and say that they are elsewhere, and a record of every
read from there and upload to there.

Code that asks for a tensor's device takes the branch of an accelerator. No tensor gets from one side to the other
without an operation that is seen here, so nothing that would make the host wait for a real device is missed:

* a read is a copy to the host, one number of it (`item`, `bool`, `int`), or an operation whose result has a size that
  depends on the values (`nonzero`, an index of marks);
* an upload is a copy from the host, a list among them, or an operation that takes a tensor of each side. On a real
  device it waits too, because a list is not in pinned memory.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from draftsmith.modules.target.attention.tree_attention import attend_apart
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("privateuseone", 0)
INSIDE = {attend_apart._opoverload: attend_apart._init_fn}
"""Operations of this package, by what they stand for: functions of torch's own operations."""
_CPU = torch.device("cpu")
_ROOT = Path(__file__).resolve().parents[3]
_MARKS = (torch.bool, torch.uint8)


class _Guard(torch._C._acc.DeviceGuard):
    """The only thing that torch must have of a device; it has none of its own here."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


_GUARD = _Guard()


class Pretended(Tensor):
    """A tensor on the device that is not there."""

    held: Tensor  # Its values, on the CPU

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE, requires_grad=held.requires_grad)
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran on the pretended device outside its block")


@dataclass
class Waits:
    """Crossings between the host and the device, by the place in the code."""

    reads: Counter[str] = field(default_factory=Counter)  # Reads from the device: the host waits for all its work
    uploads: Counter[str] = field(default_factory=Counter)  # Copies of host memory to the device
    operations: int = 0  # Operations on the device, views of tensors left out

    def copy(self) -> "Waits":
        """The counts as they are now."""
        return Waits(self.reads.copy(), self.uploads.copy(), self.operations)

    def clear(self) -> None:
        """Start a new count."""
        self.reads.clear()
        self.uploads.clear()
        self.operations = 0


class _Device(TorchDispatchMode):
    """Runs operations of pretended tensors on the tensors that they hold."""

    # Under a mode of fake tensors torch does not look for the device.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (inside := INSIDE.get(func)) is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        kwargs, given = dict(kwargs or {}), list[Tensor]()
        held = _held(args, given)
        held_kwargs = {name: _held(value, given) for name, value in kwargs.items()}
        here = any(isinstance(value, Pretended) for value in given)
        asked = kwargs.get("device")
        there = here if asked is None else torch.device(asked).type == DEVICE.type
        written = kwargs.get("out", args[0] if args else None) if _changes(func) else None
        if written is not None:
            there = isinstance(written, Pretended)
        self._count(func, args, given, here, there)
        if asked is not None:
            held_kwargs["device"] = _CPU
        result = func(*held, **held_kwargs)
        if written is not None:
            return written
        return _wrapped(result) if there else result

    def _count(self, func: Any, args: Any, given: list[Tensor], here: bool, there: bool) -> None:
        if not here and not there:
            return
        self.waits.operations += not func.is_view
        if here and (not there or reads(func, args)):
            self.waits.reads[place()] += 1
        elif there and not all(isinstance(value, Pretended) for value in given):
            self.waits.uploads[place()] += 1


class _Methods(TorchFunctionMode):
    """Methods that torch refuses to subclasses of its tensors."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], Pretended):
            self.waits.reads[place()] += 1
            return func(args[0].held, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended_device() -> Iterator[Waits]:
    """A block in which tensors can be moved to `DEVICE`; all that crosses between host and device is counted."""
    torch._C._acc.register_python_privateuseone_device_guard(_GUARD)
    waits, lifts = Waits(), torch._C._only_lift_cpu_tensors()
    # A tensor made of a list is then made on the CPU and copied by an operation that is seen.
    torch._C._set_only_lift_cpu_tensors(True)
    # What torch.autocast and torch.manual_seed want to see of a device.
    module = SimpleNamespace(get_amp_supported_dtype=lambda: [torch.bfloat16], _is_in_bad_fork=lambda: False,
                             manual_seed_all=lambda _seed: None)
    try:
        with patch.object(torch, DEVICE.type, module, create=True), _Methods(waits), _Device(waits):
            yield waits
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


def place(above: int = 1) -> str:
    """The innermost line of this repository that runs, from that many calls above on and this file's excepted:
    "modules/decoding/loop.py:12"."""
    frame = sys._getframe(above)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file != Path(__file__) and _ROOT in file.parents and ".venv" not in file.parts:
            return f"{file.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def files(places: Counter[str]) -> Counter[str]:
    """The counts by file."""
    counts: Counter[str] = Counter()
    for where, count in places.items():
        counts[where.rpartition(":")[0]] += count
    return counts


def _held(value: Any, given: list[Tensor]) -> Any:
    """The argument with the tensors that pretended ones hold; all tensors in it are added to the list."""
    if isinstance(value, Tensor):
        given.append(value)
        return value.held if isinstance(value, Pretended) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_held(one, given) for one in value)
    return value


def _wrapped(result: Any) -> Any:
    """The result with its tensors on the pretended device."""
    if isinstance(result, Tensor):
        return Pretended(result)
    return type(result)(_wrapped(one) for one in result) if isinstance(result, (list, tuple)) else result


@cache
def _changes(func: Any) -> bool:
    """True if the operation writes to its first argument or to `out`, and returns that."""
    return bool(func._schema.returns) and all(
        value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns)


@cache
def _depends(func: Any) -> bool:
    """True if the result of the operation, or its size, is something the host has to know."""
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def reads(func: Any, args: Any) -> bool:
    """True if the host has to read values to know the result."""
    if func._schema.name in ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_"):
        return any(index is not None and index.dtype in _MARKS for index in args[1])
    return _depends(func)
