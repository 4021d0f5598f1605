"""Number formats of stored states: those of torch, and eight bits with scales.

A few channels of a language model's states hold half of their energy or nearly all of it, and a few tokens are many
times larger than others. Of int8 one scale for a token leaves seven bits to its largest channel and few to all others;
one for a channel is set by its largest token. There are therefore both: x = code * token * channel. A number of fp8
has an exponent of its own, and the scale of a token alone is better (`tests/benchmarks/state_formats.py`).

Shapes: T tokens of a shard, N tokens of a slice, D hidden size of the target.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...modules import UserError

FormatName = Literal["float16", "bfloat16", "float32", "float64", "int8", "fp8"]  # Names of formats in a recipe
STATES, CHANNELS, TOKENS = "states", "channels", "tokens"
"""The tensors of a file: states or their codes, the scales of channels in the states' own number format, in which they
are read back, and those of tokens in float32."""
SCALE_BYTES = 4  # Bytes of a token's scale


@dataclass(frozen=True)
class StateFormat:
    """A number format on disk."""

    name: str  # Name in `batch.states_format`
    dtype: torch.dtype  # Of a number on disk
    largest: float = 0.0  # Largest code; 0 for formats without scales
    by_channel: bool = False  # True if channels have scales of their own, next to tokens

    @property
    def scaled(self) -> bool:
        """True if numbers are codes with scales."""
        return self.largest > 0

    def token_bytes(self, width: int) -> int:
        """Bytes on disk of a token's state of `width` numbers; the channels' scales, once in a file, come on top."""
        return width * self.dtype.itemsize + (SCALE_BYTES if self.scaled else 0)

    def packed(self, states_TD: Tensor) -> dict[str, Tensor]:
        """The tensors of a file with these states."""
        if not self.scaled:
            return {STATES: states_TD.to(self.dtype)}
        wide_TD = states_TD.float()
        channels_D = torch.ones(wide_TD.shape[1])
        if self.by_channel:
            # Root mean square over tokens at equal size: at their own sizes a single large token would decide, and one
            # that is not finite decides nothing.
            equal_TD = functional.normalize(wide_TD, dim=1).nan_to_num(0.0)
            sizes_D = equal_TD.square().mean(0).sqrt()
            channels_D = sizes_D.where(sizes_D > 0, 1.0)
        # The scales are rounded before they are used, as those that decode find them.
        channels_D = channels_D.to(states_TD.dtype)
        even_TD = wide_TD / channels_D.float()
        tokens_T = even_TD.abs().amax(1) / self.largest
        # A token of zeros has no size to divide by.
        tokens_T = tokens_T.where(tokens_T != 0, 1.0)
        # Rounding of the channels' scales may take the largest number of a token past the largest code.
        codes_TD = (even_TD / tokens_T[:, None]).clamp(-self.largest, self.largest)
        codes_TD = codes_TD if self.dtype.is_floating_point else codes_TD.round()
        return {STATES: codes_TD.to(self.dtype), CHANNELS: channels_D, TOKENS: tokens_T}


FORMATS = {one.name: one for one in (
    StateFormat("float16", torch.float16), StateFormat("bfloat16", torch.bfloat16),
    StateFormat("float32", torch.float32), StateFormat("float64", torch.float64),
    StateFormat("int8", torch.int8, 127.0, by_channel=True), StateFormat("fp8", torch.float8_e4m3fn, 448.0),
)}  # Every format by name


def format_named(name: str | None, own: torch.dtype) -> StateFormat:
    """The format of this name, or for None the target's own number format. Raises UserError if there is none."""
    name = str(own).removeprefix("torch.") if name is None else name
    if name not in FORMATS:
        raise UserError(f"batch.states_format must be null or one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


@dataclass(frozen=True)
class StateSlice:
    """States of some tokens as they lie in a file."""

    codes_ND: Tensor  # The states, or their codes
    scales: tuple[Tensor, Tensor] | None = None  # Of codes: [D] of the channels of the whole file, [N] of these tokens

    def states(self) -> Tensor:
        """The states, [N, D]."""
        if self.scales is None:
            return self.codes_ND
        channels_D, tokens_N = self.scales
        return unpacked(self.codes_ND, channels_D, tokens_N)


def unpacked(codes_ND: Tensor, channels_D: Tensor, tokens_N: Tensor) -> Tensor:
    """States of codes and their scales, in the number format of the channels' scales, which may be those of each token,
    [N, D]."""
    return (codes_ND.float() * tokens_N[:, None] * channels_D.float()).to(channels_D.dtype)
