"""The processes of one training: which of them this is, how they divide work and join their results; and DeepSpeed,
which an extra of its own installs: where it is missing, and before it is used.
"""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """A process among those that work together."""

    rank: int = 0  # Number of this process, from 0
    world: int = 1  # Their number

    @classmethod
    def launched(cls) -> "Processes":
        """Those that torchrun has started, before they have a group; this one alone where it has started none."""
        # RANK alone says nothing: other launchers set it too, for processes that do not train together.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        return cls(rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]))

    @classmethod
    def grouped(cls) -> "Processes":
        """Those of the process group, whoever started them; this one alone where there is no group."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(rank=dist.get_rank(), world=dist.get_world_size())

    def share(self, items: Sequence[T], together: int = 1) -> list[T]:
        """The items that fall to this process, dealt in groups of `together` neighbours."""
        return [item for place, item in enumerate(items) if place // together % self.world == self.rank]

    def largest_share(self, count: int, together: int = 1) -> int:
        """The most items of `count` that `share` gives to any process: to the first, of whole groups."""
        return len(Processes(world=self.world).share(range(count), together))

    def gather(self, value: T) -> list[T]:
        """The value of each process in their order, in all of them; all must call it, with values of any size."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


ALONE = Processes()  # This process, which works with no other


def local_rank() -> int:
    """Number of this process on its machine, by which it takes its device; 0 where no launcher has given one."""
    # Not the rank modulo the devices: launchers may give a machine fewer processes than it has devices.
    return int(os.environ.get("LOCAL_RANK", "0"))


@cache
def destroy_group_at_exit() -> None:
    """Destroy the process group when the program ends, before Python does: threads of gloo may still hold tensors of
    the last collective, and abort a program that has done its work (https://github.com/pytorch/pytorch/issues/190489).
    Lightning destroys only groups of NCCL."""
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def require_deepspeed(setting: str, instead: str, *, on_cpu: bool = False) -> None:
    """Refuse a `setting`, a key and its value, that needs DeepSpeed where it is not installed (UserError, with what
    does `instead`), and prepare its first import; `on_cpu` if it must work there although there is an accelerator."""
    if find_spec("deepspeed") is None:
        raise UserError(f"{setting} needs DeepSpeed, which is not installed; run pip install 'draftsmith[deepspeed]', "
                        f"or set {instead}")
    name_deepspeeds_device(on_cpu=on_cpu)


def name_deepspeeds_device(*, on_cpu: bool = False) -> None:
    """Name the CPU as DeepSpeed's device where there is no other, before any import of it: libraries import it wherever
    it is installed, and it says on the screen that it has found none."""
    if on_cpu or not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def prepare_deepspeed() -> None:
    """Let processes on a CPU join by gloo as it is: DeepSpeed would compile an extension for a minute, and fail
    without a compiler."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
