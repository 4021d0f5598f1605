"""Linear layers packed for oneDNN on CPU: the weights are laid out once, so that a pass of several tokens costs
little more than a pass of one (`tests/benchmarks/pass_cost.py`). Outputs differ from the plain product by rounding
only.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# The op wants a token count to choose a layout for; one layout serves every count.
_TYPICAL_TOKENS = 8
_Stamp = tuple[int, int, float]


def can_pack(model: nn.Module) -> bool:
    """True where this build has the packed product and the model is float32 on a CPU, where it pays."""
    return can_pack_weight(next(model.parameters()))


def can_pack_weight(weight: Tensor) -> bool:
    """`can_pack` of one weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
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
        model: the owner of the linear layers.
        shared_with: packed forms of another model, which are shared where a weight is the very same.
    """

    def __init__(self, model: nn.Module, shared_with: "PackedLinears | None" = None) -> None:
        known = (
            {} if shared_with is None else {id(layer.weight): form for layer, form in shared_with.layers.items()}
        )
        self.layers: dict[nn.Module, Callable[[Tensor], Tensor]] = {
            module: known.get(id(module.weight)) or packed_linear(module.weight, module.bias)
            for module in model.modules()
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
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


class DecodingLinears:
    """Packed linear layers of a model that may be trained on: packed again when a weight has changed, run in decoding
    alone. A copy of its owner packs its own. Packing cannot be compiled: it belongs in front of a graph."""

    def __init__(self) -> None:
        self._stamp: tuple[_Stamp, ...] = ()
        self._layers: PackedLinears | None = None
        self.output: Callable[[Tensor], Tensor] | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "DecodingLinears":
        return DecodingLinears()

    def refresh(self, model: nn.Module, *, wanted: bool, output_VD: Tensor | None = None) -> None:
        """Pack again where that pays and a weight has changed.

        Args:
            model: the owner of the linear layers.
            wanted: whether its target is packed.
            output_VD: a tied embedding, which is multiplied with as an output layer.
        """
        stamp = tuple(map(_stamp, model.parameters())) if wanted and can_pack(model) else ()
        if stamp == self._stamp:
            return
        self.release()
        if stamp:
            self._stamp, self._layers = stamp, PackedLinears(model)
            self.output = None if output_VD is None else packed_linear(output_VD, None)

    def release(self) -> None:
        """Give the memory of the packed forms back."""
        self._stamp, self._layers, self.output = (), None, None

    def installed(self) -> AbstractContextManager[None]:
        """A block in which the packed forms run."""
        return nullcontext() if self._layers is None else self._layers.installed()


def _stamp(parameter: nn.Parameter) -> _Stamp:
    """Signs that a parameter has changed: its own count of changes, which misses those made through `.data`, and a
    sum over some elements, which misses small ones."""
    flat = parameter.detach().reshape(-1)
    changes = 0 if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), changes, float(flat[:: max(1, len(flat) // 256)].double().sum())
