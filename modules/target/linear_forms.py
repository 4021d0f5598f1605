"""Forms of a target's linear layers: plain, packed for oneDNN, or both, chosen by the number of tokens of a pass.

Packed weights are laid out once, so that a pass of several tokens costs little more than a pass of one
(`tests/benchmarks/pass_cost.py`). Whether that pays depends on the processor: with AVX2 for every number of tokens,
with AMX only from about four on. So it is measured when a target is loaded, in about a second: some layers of each
shape, since they are most of a pass, with a handful of token counts. All forms and counts take turns and the fastest
round of each counts, so that other programs slow none of them alone.

Timing never repeats exactly and the forms differ in the last bits. So whatever leaves bytes that must come out the same
(distilled text, stored states, trained weights, the searched tree) runs inside `LinearForms.reproducible`: there the
form is the packed one wherever the build has it, or the one that the user has set. Everything else runs in the measured
form. Within one target the choice depends on the number of tokens alone, so equal passes are rounded alike. Passes of
different sizes never were: the products sum in another order for each size."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .loading.model_parts import is_quantised

Form = Callable[[Tensor], Tensor]  # A linear layer's product, plain or packed
_Stamp = tuple[int, int, float]


def can_pack(module: nn.Module) -> bool:
    """True where this build has the packed product in the number format of a model or a layer, which is on a CPU."""
    weight = next(module.parameters())
    return weight.device.type == "cpu" and has_packed_product(weight.dtype)


def has_packed_product(dtype: torch.dtype) -> bool:
    """True where this build has the packed product, and this processor the instructions for the number format."""
    ops = torch.ops.mkldnn
    return (torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")
            and (dtype == torch.float32 or (dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))))


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that run torch's own product."""
    # Not the class but its forward: subclasses that quantise or adapt a layer compute something else. So do weights.
    return [module for module in model.modules() if isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward and not is_quantised(module.weight)]


def _packed_forward(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The activation after the product is fused too; "none" leaves it out.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def packed_linear(weight: Tensor, bias: Tensor | None) -> Form:
    """x -> x W^T + b with the weight laid out once; the layout is a copy."""
    # The op wants a token count to choose a layout for; one layout serves every count.
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
    return partial(_packed_forward, weight=laid_out, bias=None if bias is None else bias.detach())


def by_tokens(x: Tensor, *, packed: Form, plain: Form, packed_from: int) -> Tensor:
    """The product of the states x [..., D], packed for `packed_from` of them or more, and plain for fewer."""
    return packed(x) if x.numel() >= packed_from * x.shape[-1] else plain(x)


class PackedLinears:
    """The packed forms of a model's linear layers, put in place of their plain forward and taken out again. The plain
    weights stay (the model can be saved, hashed and run natively), so the linear layers' memory doubles. `packed_from`
    are the fewest tokens of a pass that runs packed, at least 1; `install` puts a new number to work. Forms of another
    model, `shared_with`, are shared where a weight is the very same."""

    def __init__(self, model: nn.Module, shared_with: "PackedLinears | None" = None, packed_from: int = 1) -> None:
        self.packed_from = packed_from
        known = {} if shared_with is None else {id(layer.weight): form for layer, form in shared_with.layers.items()}
        # Asked of each layer: some models keep a few layers in another number format.
        self.layers: dict[nn.Linear, Form] = {
            module: known.get(id(module.weight)) or packed_linear(module.weight, module.bias)
            for module in linear_layers(model) if can_pack(module)}

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


TOKENS = (1, 2, 4, 8, 16, 32)  # Tokens of the passes that are timed: plain decoding, chains and trees
GAIN = 0.05
"""Least share by which packing must beat plain layers, for it doubles their memory, and by which a form chosen by the
number of tokens must beat the better single form."""
TRUSTED_LENGTHS = (1.0, 1.3, 1.5, 1.65, 1.8, 1.9)
"""Tokens that a pass of so many nodes (`TOKENS`) yields with a modest draft, such as the quickstart's: they weigh the
token counts where number formats are compared."""
HALF_GAIN = 0.1  # Least share by which bfloat16 must be faster: it has more near-ties; the rest of a pass gains less
SMALLEST_BYTES = 16 * 2**20  # Smaller linear layers stay in a processor's cache, and nothing is measured
SAMPLED_LAYERS, SAMPLED_BYTES = 8, 64 * 2**20
"""Layers of one shape that are timed: at most so many, and after the first one at most so many bytes. Several, because
a layer that is run again and again would be read from the cache, which a pass reads no weight from."""
ROUNDS, LEAST_ROUNDS = 6, 3  # Rounds over all counts and forms: at most and at least


@dataclass(frozen=True, kw_only=True)
class LinearTimes:
    """Seconds of all linear layers of a model in one pass, by form and by tokens of the pass."""

    dtype: str  # Number format, such as float32
    tokens: tuple[int, ...]  # Tokens of the passes, ascending
    plain: tuple[float, ...]  # Seconds of the plain layers for each of them
    packed: tuple[float, ...]  # Seconds of the packed layers

    def __post_init__(self) -> None:
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ValueError(f"tokens of timed passes must ascend from 1 or more, got {list(self.tokens)}")
        for name, seconds in (("plain", self.plain), ("packed", self.packed)):
            if len(seconds) != len(self.tokens) or not min(seconds) > 0:
                raise ValueError(f"{name} must be {len(self.tokens)} times above 0, got {list(seconds)}")

    def seconds(self, packed_from: int) -> tuple[float, ...]:
        """Seconds for each number of tokens when passes of `packed_from` tokens or more run packed; none do with 0."""
        return tuple(packed if 0 < packed_from <= tokens else plain
                     for tokens, plain, packed in zip(self.tokens, self.plain, self.packed, strict=True))

    def excess(self, packed_from: int) -> float:
        """Mean over the token counts of the seconds, in those of the form that is faster for each."""
        ratios = [chosen / min(plain, packed) for chosen, plain, packed in
                  zip(self.seconds(packed_from), self.plain, self.packed, strict=True)]
        return sum(ratios) / len(ratios)

    def fastest(self) -> int:
        """Fewest tokens of a pass that should run packed: 1 for all passes, 0 for none, between them both forms. Plain
        layers alone need half the memory and have one kind of rounding: `GAIN` weighs that against what is faster."""
        single = 1 if self.excess(0) > (1 + GAIN) * self.excess(1) else 0
        mixed = min(self.tokens[1:], key=self.excess, default=single)
        return mixed if self.excess(single) > (1 + GAIN) * self.excess(mixed) else single


def worth_measuring(model: nn.Module) -> bool:
    """True for linear layers that no cache holds, so that reading them from memory takes most of their time."""
    return sum(layer.weight.nbytes for layer in linear_layers(model)) >= SMALLEST_BYTES


@torch.no_grad()
def measure_linears(model: nn.Module, dtypes: Sequence[torch.dtype], *, tokens: Sequence[int] = TOKENS,
                    seconds: float = 1.0) -> dict[torch.dtype, LinearTimes]:
    """Time some linear layers of a model on a CPU for passes of `tokens`, ascending, in number formats that take turns
    (`can_pack_weight` holds); no round starts after `seconds`. No random number is drawn, and only the shapes are read:
    the model may be on torch's meta device."""
    layers: dict[tuple[int, ...], list[nn.Linear]] = defaultdict(list)
    for layer in linear_layers(model):
        layers[tuple(layer.weight.shape)].append(layer)
    # Some layers of each shape: (all of them for each of these, width, forms by format and by whether they are packed).
    samples: list[tuple[float, int, dict[tuple[torch.dtype, bool], list[Form]]]] = []
    for members in layers.values():
        chosen = members[: min(SAMPLED_LAYERS, max(1, SAMPLED_BYTES // members[0].weight.nbytes))]
        forms: dict[tuple[torch.dtype, bool], list[Form]] = defaultdict(list)
        for dtype, layer in product(dtypes, chosen):
            # Other values than the model's, which may have none here: the time of a product does not depend on them.
            weight = torch.full(layer.weight.shape, 0.01, dtype=dtype)
            bias = None if layer.bias is None else torch.full(layer.bias.shape, 0.01, dtype=dtype)
            forms[dtype, False].append(partial(functional.linear, weight=weight, bias=bias))
            forms[dtype, True].append(packed_linear(weight, bias))
        samples.append((len(members) / len(chosen), members[0].in_features, forms))
    best: dict[tuple[int, torch.dtype, bool, int], float] = {}
    started = time.monotonic()
    for turn in range(ROUNDS):
        if turn >= LEAST_ROUNDS and time.monotonic() - started > seconds:
            break
        # Counts, shapes, formats and forms take turns inside a round: what slows the machine for a moment slows all.
        for count, (place, (scale, width, forms)) in product(tokens, enumerate(samples)):
            for (dtype, packed), timed in forms.items():
                x_1ND = torch.full((1, count, width), 0.1, dtype=dtype)
                before = time.perf_counter()
                for form in timed:
                    form(x_1ND)
                taken, key = (time.perf_counter() - before) * scale, (place, dtype, packed, count)
                best[key] = min(best.get(key, taken), taken)
    places = range(len(samples))
    return {dtype: LinearTimes(
        dtype=str(dtype).removeprefix("torch."), tokens=tuple(tokens),
        plain=tuple(sum(best[place, dtype, False, count] for place in places) for count in tokens),
        packed=tuple(sum(best[place, dtype, True, count] for place in places) for count in tokens)) for dtype in dtypes}


def fastest_dtype(model: nn.Module, rows: int | None = None) -> torch.dtype:
    """The number format, float32 or bfloat16, in which decoding with a model (its shape suffices) is fastest on this
    processor: float32 where bfloat16 has no instructions here or gains less than `HALF_GAIN`, and for a model too small
    to be measured. `rows` are decoded at once without drafts; None is drafted decoding of one row."""
    half, full = torch.bfloat16, torch.float32
    if not (has_packed_product(half) and has_packed_product(full) and worth_measuring(model)):
        return full
    times = measure_linears(model, [full, half], tokens=TOKENS if rows is None else (rows,))
    # With drafts: the tokens per second that the linear layers allow with the size of tree that pays best.
    lengths = dict(zip(TOKENS, TRUSTED_LENGTHS, strict=True))
    speeds = {dtype: 1 / found.packed[0] if rows is not None else
              max(lengths.get(count, 1.0) / taken
                  for count, taken in zip(found.tokens, found.seconds(found.fastest()), strict=True))
              for dtype, found in times.items()}
    return half if speeds[half] > (1 + HALF_GAIN) * speeds[full] else full


Pack = int | Literal["auto"]  # Fewest tokens of a pass that runs packed, 0 for no pass; auto measures


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Forms that the passes of a target run in, with the measurement that chose them."""

    packed_from: int  # Fewest tokens of a pass whose linear layers run packed: 1 for all passes, 0 for none
    times: LinearTimes | None = None  # The measurement; None where the form was set, or there was nothing to choose

    def __post_init__(self) -> None:
        if self.packed_from < 0:
            raise ValueError(f"packed_from must be at least 0, got {self.packed_from}")

    @property
    def in_words(self) -> str:
        """The forms for people."""
        forms = {0: "linear layers plain", 1: "linear layers packed for oneDNN"}
        both = f"linear layers packed for oneDNN in passes of {self.packed_from} tokens or more, plain in smaller ones"
        measured = "" if self.times is None else ", which was measured to be fastest here"
        return forms.get(self.packed_from, both) + measured


class LinearForms:
    """The linear layers of a target, in the forms that its passes run. Packed layers are copies next to the plain ones,
    which the model is saved, hashed and run natively with. `shared` are the forms of a target of which this model is a
    copy; packed layers with the very same weight are shared."""

    def __init__(self, model: nn.Module, pack: Pack | Packing, shared: "LinearForms | None" = None) -> None:
        self.model, self._shared = model, None if shared is None else shared.packed
        self.packed: PackedLinears | None = None
        self.packing = Packing(packed_from=0)
        if not can_pack(model):
            self.use(self.packing)
        elif isinstance(pack, Packing):
            self.use(pack)
        elif pack != "auto":
            self.use(Packing(packed_from=pack))
        elif not worth_measuring(model):
            self.use(Packing(packed_from=1))
        else:
            dtype = next(model.parameters()).dtype
            times = measure_linears(model, [dtype])[dtype]
            self.use(Packing(packed_from=times.fastest(), times=times))
        # The other target may go while this one stays: held here, its packed layers would stay with it.
        self._shared = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "LinearForms":
        # A drafter that keeps its target's forms is copied in training; the copy drafts for the same target.
        return self

    def use(self, packing: Packing) -> None:
        """Run these forms from now on; without a packed pass the packed layers' memory is given back."""
        self.packing = packing
        if self.packed is not None:
            self.packed.remove()
        if not packing.packed_from:
            self.packed = None
            return
        if self.packed is None:
            self.packed = PackedLinears(self.model, self._shared)
        self.packed.packed_from = packing.packed_from
        self.packed.install()

    @contextmanager
    def reproducible(self) -> Iterator[None]:
        """A block whose passes are the same in every process of this machine: no measurement decides their form."""
        before = self.packing
        # Where there are times, they decided. Packed for all passes is what comes out without them.
        self.use(before if before.times is None else replace(before, packed_from=1))
        try:
            yield
        finally:
            self.use(before)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """A block in which the plain layers run: as transformers made them, and with gradients."""
        if self.packed is not None:
            self.packed.remove()
        try:
            yield
        finally:
            if self.packed is not None:
                self.packed.install()
