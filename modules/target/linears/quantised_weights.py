"""Weights that bitsandbytes or torchao keep in few bits: tensors of classes of their own, a scale for each block."""

from typing import Any

from torch import Tensor, nn


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
