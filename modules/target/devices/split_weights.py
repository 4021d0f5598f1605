"""Weights of which each of several processes holds a part."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..linears.quantised_weights import dequantised
from .zero3_weights import whole_in_zero3


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
