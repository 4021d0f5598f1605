"""A batch as it is read from disk, with the target's states in their stored number format.

Codes of eight bits are sent to the device and decoded there: half or a quarter of the bytes are packed, pinned and
copied, and the arithmetic of a number for each state is left to the device. Without a GPU it is the thread that reads
ahead that decodes, not the one that trains.

Shapes: B rows, L positions in a row, F files that the batch is read from, D hidden size of the target.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...modules import Features
from .state_formats import unpacked


@dataclass(frozen=True, kw_only=True)
class PackedScales:
    """Scales of the codes of a batch."""

    tokens_BL: Tensor
    """Of each token; 0 where there are no states."""
    channels_FD: Tensor
    """Of the channels, for each file."""
    files_BL: Tensor
    """File of each token, int64."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedScales":
        """The same with every tensor moved."""
        return PackedScales(**{name: move(tensor) for name, tensor in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class PackedStates:
    """States of one kind in the places of their tokens, zero elsewhere."""

    codes_BLD: Tensor
    """The states, or their codes."""
    scales: PackedScales | None = None
    """Of codes; None for states."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedStates":
        """The same with every tensor moved."""
        return PackedStates(codes_BLD=move(self.codes_BLD),
                            scales=None if self.scales is None else self.scales.moved(move))

    def states(self) -> Tensor:
        """The states, [B, L, D], on the device of the codes. Float32 numbers are formed of one row at a time."""
        if self.scales is None:
            return self.codes_BLD
        channels_FD = self.scales.channels_FD
        states_BLD = torch.empty_like(self.codes_BLD, dtype=channels_FD.dtype)
        for row, (codes_LD, tokens_L, files_L) in enumerate(
                zip(self.codes_BLD, self.scales.tokens_BL, self.scales.files_BL, strict=True)):
            states_BLD[row] = unpacked(codes_LD, channels_FD[files_L], tokens_L)
        return states_BLD


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Tokens of a batch and what is stored of the target's states."""

    text: Features
    """Without states."""
    final: PackedStates | None = None
    """Final states; None where none are stored."""
    taps: dict[int, PackedStates]
    """Outputs of the tapped layers by layer index."""
    missing_BL: Tensor | None = None
    """See `Features.missing_BL`."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedBatch":
        """The same with every tensor moved."""
        return PackedBatch(
            text=self.text.moved(move), final=None if self.final is None else self.final.moved(move),
            taps={layer: states.moved(move) for layer, states in self.taps.items()},
            missing_BL=None if self.missing_BL is None else move(self.missing_BL))

    def pin_memory(self) -> "PackedBatch":
        """The same in page-locked memory, from which a GPU copies while the host goes on."""
        return self.moved(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> Features:
        """The batch on a device, its states decoded there."""
        there = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(there, non_blocking=there.type == "cuda")

        return replace(self.text.to(there), final_BLD=None if self.final is None else self.final.moved(move).states(),
                       taps={layer: states.moved(move).states() for layer, states in self.taps.items()},
                       missing_BL=None if self.missing_BL is None else move(self.missing_BL))
