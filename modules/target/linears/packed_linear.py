"""Linear layers packed for oneDNN on CPU: the weights are laid out once, so that a pass of several tokens costs
little more than a pass of one (`tests/benchmarks/pass_cost.py`). Outputs differ from the plain product by rounding
only. Whether that pays on a machine is measured, see `linear_times`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The op wants a token count to choose a layout for; one layout serves every count.
_TYPICAL_TOKENS = 8
_Stamp = tuple[int, int, float]


def can_pack(model: nn.Module) -> bool:
    """True where this build has the packed product in the model's number format, and the model is on a CPU."""
    return can_pack_weight(next(model.parameters()))


def can_pack_weight(weight: Tensor) -> bool:
    """`can_pack` of one weight."""
    return weight.device.type == "cpu" and has_packed_product(weight.dtype)


def has_packed_product(dtype: torch.dtype) -> bool:
    """True where this build has the packed product, and this processor the instructions for the number format."""
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported())))
    )


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that run torch's own product."""
    return [module for module in model.modules()
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward]


def _packed_forward(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _plain_forward(x: Tensor, *, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> x W^T + b with the weight laid out once; the layout is a copy."""
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_TOKENS)
    return partial(_packed_forward, weight=laid_out, bias=None if bias is None else bias.detach())


def by_tokens(packed: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor],
              packed_from: int) -> Callable[[Tensor], Tensor]:
    """One product that runs packed for `packed_from` rows or more, and plain for fewer."""
    return packed if packed_from <= 1 else partial(_by_tokens, packed=packed, plain=plain, packed_from=packed_from)


def _by_tokens(x: Tensor, *, packed: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor],
               packed_from: int) -> Tensor:
    return packed(x) if x.numel() >= packed_from * x.shape[-1] else plain(x)


class PackedLinears:
    """The packed forms of a model's linear layers, put in place of their plain forward and taken out again.

    The plain weights stay (the model can be saved, hashed and run natively), so the linear layers' memory doubles.

    Args:
        model: the owner of the linear layers.
        shared_with: packed forms of another model, which are shared where a weight is the very same.
        packed_from: fewest tokens of a pass that runs packed, at least 1; `install` puts a new number to work.
    """

    def __init__(self, model: nn.Module, shared_with: "PackedLinears | None" = None, packed_from: int = 1) -> None:
        self.packed_from = packed_from
        known = (
            {} if shared_with is None else {id(layer.weight): form for layer, form in shared_with.layers.items()}
        )
        self.layers: dict[nn.Linear, Callable[[Tensor], Tensor]] = {
            module: known.get(id(module.weight)) or packed_linear(module.weight, module.bias)
            for module in linear_layers(model)
            if can_pack_weight(module.weight)
        }

    def install(self) -> None:
        """Run the packed form from now on, in passes of `packed_from` tokens or more."""
        for module, packed in self.layers.items():
            module.__dict__["forward"] = by_tokens(packed, partial(nn.Linear.forward, module), self.packed_from)

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


class DecodingLinears:
    """Packed linear layers of a model that may be trained on: packed again when a weight has changed, run in decoding
    alone. A copy of its owner packs its own. Packing cannot be compiled: it belongs in front of a graph."""

    def __init__(self) -> None:
        self._stamp: tuple[int, tuple[_Stamp, ...]] = 0, ()
        self._layers: PackedLinears | None = None
        self.output: Callable[[Tensor], Tensor] | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "DecodingLinears":
        return DecodingLinears()

    def refresh(self, model: nn.Module, *, packed_from: int, output_VD: Tensor | None = None) -> None:
        """Pack again where a weight or the number of tokens has changed.

        Args:
            model: the owner of the linear layers.
            packed_from: fewest tokens of a pass that its target runs packed; 0 for none.
            output_VD: a tied embedding, which is multiplied with as an output layer.
        """
        wanted = packed_from > 0 and can_pack(model)
        stamp = (packed_from, tuple(map(_stamp, model.parameters()))) if wanted else (0, ())
        if stamp == self._stamp:
            return
        self.release()
        if wanted:
            self._stamp, self._layers = stamp, PackedLinears(model, packed_from=packed_from)
            self.output = None if output_VD is None else by_tokens(
                packed_linear(output_VD, None), partial(_plain_forward, weight=output_VD), packed_from)

    def release(self) -> None:
        """Give the memory of the packed forms back."""
        self._stamp, self._layers, self.output = (0, ()), None, None

    def installed(self) -> AbstractContextManager[None]:
        """A block in which the packed forms run."""
        return nullcontext() if self._layers is None else self._layers.installed()


def _stamp(parameter: nn.Parameter) -> _Stamp:
    """Signs that a parameter has changed: its own count of changes, which misses those made through `.data`, and a
    sum over some elements, which misses small ones."""
    flat = parameter.detach().reshape(-1)
    changes = 0 if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), changes, float(flat[:: max(1, len(flat) // 256)].double().sum())
