"""A low-rank change of a target's linear layers, W' = W + scale · B A (arXiv:2106.09685, eq. 3).

Whatever trained it, an adapter is plain tensors here: it is merged into copies of the layers that it changes, with
torch alone. The unmerged form exists only in training.

Shapes: R rank, I inputs of a layer, O its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..files.json_records import typed_fields
from .loading.model_parts import is_quantised

PREFIX = "adapter."  # Prefix of an adapter's tensors wherever they are stored with others


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The change of one layer."""

    a_RI: Tensor  # Factor A, applied to the layer's input
    b_OR: Tensor  # Factor B, added to the layer's output


class Adapter:
    """Low-rank changes of some linear layers of one target, by the layer's name inside the model. The `scale` is the
    factor of all of them, alpha / rank."""

    def __init__(self, layers: Mapping[str, LowRank], scale: float) -> None:
        self.layers, self.scale = dict(layers), scale

    def describe(self) -> dict[str, Any]:
        """Names and scale, JSON-ready; the weights are `tensors()`."""
        return {"layers": sorted(self.layers), "scale": self.scale}

    def tensors(self) -> dict[str, Tensor]:
        """The weights: `adapter.{layer}.a` [R, I] and `adapter.{layer}.b` [O, R]."""
        named: dict[str, Tensor] = {}
        for name, change in self.layers.items():
            named |= {f"{PREFIX}{name}.a": change.a_RI, f"{PREFIX}{name}.b": change.b_OR}
        return named

    @classmethod
    def rebuild(cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Adapter":
        """The adapter that `describe()` and `tensors()` came from. UserError if a described weight is missing, or one
        is there that is not described; MistypedError if the description is of another kind."""
        known = typed_fields(description, {"layers": tuple[str, ...], "scale": float})
        names = [f"{PREFIX}{layer}.{part}" for layer in known["layers"] for part in ("a", "b")]
        if wrong := sorted(set(names) ^ set(tensors)):
            raise UserError(f"the adapter's description and its weights do not agree about {', '.join(wrong[:3])}; "
                            "copy or train the artifact again")
        return cls({layer: LowRank(a_RI=tensors[f"{PREFIX}{layer}.a"], b_OR=tensors[f"{PREFIX}{layer}.b"])
                    for layer in known["layers"]}, known["scale"])

    @torch.no_grad()
    def merge_into(self, model: nn.Module) -> None:
        """Give each changed layer of `model` a weight of its own, W + scale · B A; the tensor W stays as it was.
        UserError if the model lacks a layer, or has it in another shape. The product is formed in float32 or wider and
        rounded once, to the layer's number format. An output layer that shared its weight with the embedding does so no
        longer."""
        linears = self.require_fitting(model)
        for name, change in self.layers.items():
            weight = linears[name].weight
            # Formed in half precision, the product of small factors would be lost in the rounding of W.
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = change.b_OR.to(weight.device, wide) @ change.a_RI.to(weight.device, wide)
            merged = (weight.to(wide) + self.scale * product).to(weight.dtype)
            linears[name].weight = nn.Parameter(merged, requires_grad=False)

    def require_fitting(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The linear layers of `model` by name. Raises UserError if it lacks one that is changed, or has it in another
        shape."""
        linears = linear_layers(model)
        for name, change in self.layers.items():
            expected = (change.b_OR.shape[0], change.a_RI.shape[1])
            if name not in linears or tuple(linears[name].weight.shape) != expected:
                found = f"in shape {tuple(linears[name].weight.shape)}" if name in linears else "not at all"
                raise UserError(f"the adapter changes {name} of shape {expected}, which this target has {found}; use "
                                "the target that it was trained for")
        return linears


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model by name: an adapter can change these."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def choose_layers(model: nn.Module, wanted: Sequence[str], *, without: nn.Module) -> list[str]:
    """Names of the linear layers that `wanted` stands for: full names, or last parts such as `q_proj`; none stands for
    all but `without`, the output layer. UserError if one stands for no layer, or weights are quantised."""
    linears = linear_layers(model)
    if any(is_quantised(layer.weight) for layer in linears.values()):
        raise UserError("an adapter changes plain weights, and the target's are quantised; choose unquantised ones")
    if not wanted:
        return [name for name, module in linears.items() if module is not without]
    meant = {word: {name for name in linears if name == word or name.endswith(f".{word}")} for word in wanted}
    for word, names in meant.items():
        if not names:
            # Every layer of the model has the same few last parts: a list of full names would fill the screen.
            kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears)) or "none"
            raise UserError(f"the target has no linear layer {word!r}; it has {kinds}: name some of these, or leave "
                            "the list empty for all but the output layer")
    # In the model's order, whatever the order of the words: two spellings of one choice train the same adapter.
    chosen = set().union(*meant.values())
    return [name for name in linears if name in chosen]
