"""The processes of one training: which of them this is, how they divide work and join their results; and DeepSpeed,
which an extra of its own installs.

Its ZeRO-3 divides a frozen model's layers among all processes (arXiv:1910.02054, section 5.3). Each holds a part of
every weight of the layers, on its device or in the machine's memory. A layer is gathered for the moment in which it
runs, while the next one is already on its way."""

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    atexit.register(lambda: dist.destroy_process_group() if dist.is_available() and dist.is_initialized() else None)


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


DTYPES = {torch.float32: None, torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Number formats of weights that ZeRO-3 divides, and the sections of DeepSpeed's settings that choose them."""


def zero3_settings(dtype: torch.dtype, *, offload: bool) -> dict[str, Any]:
    """DeepSpeed's settings of a model whose weights, of one of `DTYPES`, are divided; `offload` keeps parts in the
    memory."""
    # The efficient form of linear layers would replace torch's own for everything in this process, until its end.
    divided: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    if offload:
        divided["offload_param"] = {"device": "cpu", "pin_memory": torch.accelerator.is_available()}
    section = DTYPES[dtype]
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": divided,
            **({} if section is None else {section: {"enabled": True}})}


@contextmanager
def read_divided(settings: dict[str, Any]) -> Iterator[None]:
    """A block in which transformers divides what it reads: the first process reads and sends each weight in turn."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    prepare_deepspeed()
    # transformers itself refers to it weakly.
    held = HfDeepSpeedConfig(settings)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        del held
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


def whole_in_zero3(weight: Tensor) -> Tensor:
    """All of a divided weight; all processes must call it."""
    from deepspeed import zero

    with zero.GatheredParameters([weight]):
        return weight.detach().clone()


def gather_by_layer(model: Any, divided: str, settings: dict[str, Any]) -> None:
    """Give every weight outside the layers a place of its own, whole, in each process, and let each layer of the list
    at the path `divided` be gathered when it is called, in passes of the decoder or alone."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import set_z3_leaf_module
    from deepspeed.utils.timer import NoopTimer

    # By its identity: an output layer that is the embedding stays that.
    found: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if path == divided or path.startswith(f"{divided}."):
            continue
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in found:
                found[id(weight)] = nn.Parameter(whole_in_zero3(weight), requires_grad=False)
            module._parameters[name] = found[id(weight)]
    layers = model.get_submodule(divided)
    for layer in layers:
        # At once, and whole: which of its experts a layer calls depends on the rows of a process.
        set_z3_leaf_module(layer, True)
    chosen = DeepSpeedConfig(settings).zero_config
    # A divided weight has no elements of its own here; DeepSpeed keeps the number of all of them next to it.
    largest = max(sum(weight.ds_numel for weight in layer.parameters()) for layer in layers)
    gathering = DeepSpeedZeRoOffload(
        module=layers, timers=NoopTimer(), ds_config=settings, overlap_comm=True, prefetch_bucket_size=largest,
        max_live_parameters=2 * largest, max_reuse_distance=0, param_persistence_threshold=0,
        offload_param_config=chosen.offload_param)
    # It starts its record of the order of the layers anew with each pass; a list of layers has no pass of its own.
    decoder = model.get_submodule(divided.rpartition(".")[0])
    decoder.register_forward_pre_hook(lambda *_: gathering.get_param_coordinator().reset_step())
