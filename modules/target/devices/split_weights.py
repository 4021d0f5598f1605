"""Weights that are no plain tensors: those that bitsandbytes or torchao keep in few bits, in classes of their own with
a scale for each block, and those of which each of several processes holds a part.

DeepSpeed's ZeRO-3 divides a frozen model's layers among all processes (arXiv:1910.02054, section 5.3). Each holds a
part of every weight of the layers, on its device or in the machine's memory. A layer is gathered for the moment in
which it runs, while the next one is already on its way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...processes import prepare_deepspeed


def is_quantised(weight: Tensor) -> bool:
    """True for a weight in few bits, which only its own layer or package can multiply with."""
    return type(weight).__module__.partition(".")[0] in ("bitsandbytes", "torchao")


def dequantised(weight: Any) -> Tensor:
    """The values of a weight, whatever it is stored as; plain ones are returned as they are."""
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[no-any-return]
    return weight.dequantize() if is_quantised(weight) else weight  # type: ignore[no-any-return]


def dequantise(model: nn.Module) -> None:
    """Give the layers of a model the plain values of torchao's weights."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if type(weight).__module__.startswith("torchao."):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))


def whole(tensor: Tensor) -> Tensor:
    """All of a weight of which this process holds a part; its processes must call it together. The values of a
    quantised one; others as they are, without a gradient."""
    if hasattr(tensor, "stored"):
        # A layer's, which stays in its file; see the placement `Disk`.
        return tensor.stored()  # type: ignore[no-any-return]
    if hasattr(tensor, "ds_id"):
        return whole_in_zero3(tensor)
    if dist.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            with torch.no_grad():
                return tensor.full_tensor()
    return dequantised(tensor).detach()


def plain_class(model: nn.Module) -> type[Any]:
    """The class of a model as transformers has it: splitting its weights makes another class of it."""
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return type(model)


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
