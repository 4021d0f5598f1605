"""Linear layers packed for oneDNN on CPU: the weights are laid out once, so that a pass of several tokens costs
little more than a pass of one (`tests/benchmarks/pass_cost.py`). Outputs differ from the plain product by rounding
only. Whether that pays on a machine is measured, see `linear_times`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .quantised_weights import is_quantised

Form = Callable[[Tensor], Tensor]  # A linear layer's product, plain or packed
# The op wants a token count to choose a layout for; one layout serves every count.
_TYPICAL_TOKENS = 8
_Stamp = tuple[int, int, float]


def can_pack(module: nn.Module) -> bool:
    """True where this build has the packed product in the number format of a model or a layer, which is on a CPU."""
    weight = next(module.parameters())
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
    # Not the class but its forward: subclasses that quantise or adapt a layer compute something else. So do weights.
    return [module for module in model.modules() if isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward and not is_quantised(module.weight)]


def _packed_forward(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The activation after the product is fused too; "none" leaves it out.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def packed_linear(weight: Tensor, bias: Tensor | None) -> Form:
    """x -> x W^T + b with the weight laid out once; the layout is a copy."""
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_TOKENS)
    return partial(_packed_forward, weight=laid_out, bias=None if bias is None else bias.detach())


def by_tokens(x: Tensor, *, packed: Form, plain: Form, packed_from: int) -> Tensor:
    """The product of the states x [..., D], packed for `packed_from` of them or more, and plain for fewer."""
    return packed(x) if x.numel() >= packed_from * x.shape[-1] else plain(x)


class PackedLinears:
    """The packed forms of a model's linear layers, put in place of their plain forward and taken out again. The plain
    weights stay (the model can be saved, hashed and run natively), so the linear layers' memory doubles.

    `packed_from` are the fewest tokens of a pass that runs packed, at least 1; `install` puts a new number to work.
    Forms of another model, `shared_with`, are shared where a weight is the very same."""

    def __init__(self, model: nn.Module, shared_with: "PackedLinears | None" = None, packed_from: int = 1) -> None:
        self.packed_from = packed_from
        known = (
            {} if shared_with is None else {id(layer.weight): form for layer, form in shared_with.layers.items()}
        )
        # Asked of each layer: some models keep a few layers in another number format.
        self.layers: dict[nn.Linear, Form] = {
            module: known.get(id(module.weight)) or packed_linear(module.weight, module.bias)
            for module in linear_layers(model)
            if can_pack(module)
        }

    def install(self) -> None:
        """Run the packed form from now on, in passes of `packed_from` tokens or more."""
        for module, packed in self.layers.items():
            # The packed form stands alone where no pass is plain: a choice costs time in every layer of every pass.
            module.__dict__["forward"] = packed if self.packed_from <= 1 else partial(
                by_tokens, packed=packed, plain=partial(nn.Linear.forward, module), packed_from=self.packed_from)

    def remove(self) -> None:
        """Run the plain form from now on."""
        for module in self.layers:
            module.__dict__.pop("forward", None)


class DecodingLinears:
    """Packed linear layers of a model that may be trained on: packed again when a weight has changed, run in decoding
    alone. A copy of its owner packs its own. Packing cannot be compiled: it belongs in front of a graph."""

    output: Form | None = None  # The product with a tied embedding; None where none is packed
    _stamp: tuple[int, tuple[_Stamp, ...]] = 0, ()
    _layers: PackedLinears | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "DecodingLinears":
        return DecodingLinears()

    def refresh(self, model: nn.Module, *, packed_from: int, output_VD: Tensor | None = None) -> None:
        """Pack again where a weight or the number of tokens has changed. `packed_from` is that of the target, 0 for
        none; a tied embedding `output_VD` is multiplied with as an output layer."""
        wanted = packed_from > 0 and can_pack(model)
        signs: list[_Stamp] = []
        for parameter in model.parameters() if wanted else ():
            # A parameter's own count of changes misses those made through `.data`, and the sum over some elements
            # misses small ones. Tensors of inference mode keep no count.
            flat = parameter.detach().reshape(-1)
            changes = 0 if parameter.is_inference() else parameter._version
            signs.append((parameter.data_ptr(), changes, float(flat[:: max(1, len(flat) // 256)].double().sum())))
        stamp = (packed_from if wanted else 0, tuple(signs))
        if stamp == self._stamp:
            return
        # First, or for a moment both the old and the new copies of all weights would be in memory.
        self.release()
        if wanted:
            self._stamp, self._layers = stamp, PackedLinears(model, packed_from=packed_from)
            self.output = None if output_VD is None else partial(
                by_tokens, packed=packed_linear(output_VD, None), plain=partial(functional.linear, weight=output_VD),
                packed_from=packed_from)

    def release(self) -> None:
        """Give the memory of the packed forms back."""
        self._stamp, self._layers, self.output = (0, ()), None, None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which the packed forms run: the model is also trained, and packed forms have no gradient."""
        if (layers := self._layers) is None:
            yield
            return
        layers.install()
        try:
            yield
        finally:
            layers.remove()
