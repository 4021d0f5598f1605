"""Linear layers packed for oneDNN on CPU: the weights are laid out once, so that a pass of several tokens costs
little more than a pass of one (`tests/benchmarks/pass_cost.py`). Outputs differ from the plain product by rounding
only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

# The op wants a token count to choose a layout for; one layout serves every count.
_TYPICAL_TOKENS = 8


def can_pack(model: nn.Module) -> bool:
    """Whether this build has the packed product and the model is float32 on a CPU, where it pays."""
    parameter = next(model.parameters())
    return (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packed_forward(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> x W^T + b with the weight laid out once; the layout is a copy."""
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_TOKENS)
    return partial(_packed_forward, weight=laid_out, bias=None if bias is None else bias.detach())


class PackedLinears:
    """The packed forms of a model's linear layers, put in place of their plain forward and taken out again.

    The plain weights stay (the model can be saved, hashed and run natively), so the linear layers' memory doubles.

    Args:
        model: whose linear layers they are.
        beside: packed forms of another model, which are shared where a weight is the very same.
    """

    def __init__(self, model: nn.Module, beside: "PackedLinears | None" = None) -> None:
        known = {} if beside is None else {id(layer.weight): form for layer, form in beside.layers.items()}
        self.layers: dict[nn.Module, Callable[[Tensor], Tensor]] = {
            module: known.get(id(module.weight)) or packed_linear(module.weight, module.bias)
            for module in model.modules()
            if type(module) is nn.Linear
        }

    def install(self) -> None:
        """Run the packed form from now on."""
        for module, forward in self.layers.items():
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Run the plain form from now on."""
        for module in self.layers:
            module.__dict__.pop("forward", None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The packed form inside the block alone: for a model that is also trained."""
        self.install()
        try:
            yield
        finally:
            self.remove()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The plain form inside the block."""
        self.remove()
        try:
            yield
        finally:
            self.install()
