"""Measured seconds of a model's linear layers, plain and packed for oneDNN: which form pays here, and from how many
tokens on.

Whether packing pays depends on the processor: with AVX2 for every number of tokens, with AMX only from about four on.
So it is measured when a target is loaded, in about a second: some layers of each shape, since they are most of a pass,
with a handful of token counts. All forms and counts take turns and the fastest round of each counts, so that other
programs slow none of them alone.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.nn import functional

from .packed_linear import Form, has_packed_product, linear_layers, packed_linear

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
                begun = time.perf_counter()
                for form in timed:
                    form(x_1ND)
                taken, key = (time.perf_counter() - begun) * scale, (place, dtype, packed, count)
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
