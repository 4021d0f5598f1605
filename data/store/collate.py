"""Batches from rows of tokens and states: padded one conversation a row, or packed several to a row.

States are packed as they lie on disk. Codes of eight bits are sent to the device and decoded there: half or a quarter
of the bytes are packed, pinned and copied, and the arithmetic of a number for each state is left to the device. Without
a GPU it is the thread that reads ahead that decodes, not the one that trains.

Shapes: N tokens of a piece, B rows, L positions in a row, F files of states, D hidden size of the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...modules import Features, UserError
from .feature_shards import StateSlice, unpacked

OPEN_BINS = 16  # Rows that wait for a piece that fits


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One conversation, or a window of one."""

    tokens_N: Tensor  # Token ids
    supervised_N: Tensor  # Written by the assistant, bool
    first: int = 0  # Position of the first token in its conversation
    final: StateSlice | None = None  # The target's final states as they are stored; None when a step computes them
    taps: dict[int, StateSlice] = field(default_factory=dict)  # Outputs of the tapped layers by layer index, likewise


class PackedScales(NamedTuple):
    """Scales of the codes of a batch."""

    tokens_BL: Tensor  # Of each token; 0 where there are no states
    channels_FD: Tensor  # Of the channels, for each file
    files_BL: Tensor  # File of each token, int64


@dataclass(frozen=True, kw_only=True)
class PackedStates:
    """States of one kind in the places of their tokens, zero elsewhere."""

    codes_BLD: Tensor  # The states, or their codes
    scales: PackedScales | None = None  # Of codes; None for states

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedStates":
        """A copy with every tensor moved."""
        return PackedStates(codes_BLD=move(self.codes_BLD),
                            scales=None if self.scales is None else PackedScales(*map(move, self.scales)))

    def states(self) -> Tensor:
        """The states, [B, L, D], on the device of the codes."""
        if self.scales is None:
            return self.codes_BLD
        channels_FD = self.scales.channels_FD
        # A row at a time: decoding goes by float32, which of a whole batch would be the largest tensor of a step.
        states_BLD = torch.empty_like(self.codes_BLD, dtype=channels_FD.dtype)
        for row, (codes_LD, tokens_L, files_L) in enumerate(
                zip(self.codes_BLD, self.scales.tokens_BL, self.scales.files_BL, strict=True)):
            states_BLD[row] = unpacked(codes_LD, channels_FD[files_L], tokens_L)
        return states_BLD


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Tokens of a batch and what is stored of the target's states."""

    text: Features  # Without states
    final: PackedStates | None = None  # Final states; None where none are stored
    taps: dict[int, PackedStates]  # Outputs of the tapped layers by layer index

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedBatch":
        """A copy with every tensor moved."""
        return PackedBatch(text=self.text.moved(move), final=None if self.final is None else self.final.moved(move),
                           taps={layer: states.moved(move) for layer, states in self.taps.items()})

    def to(self, device: torch.device | str) -> Features:
        """The batch on a device, its states decoded there."""
        there = torch.device(device)
        move = partial(Tensor.to, device=there, non_blocking=there.type == "cuda")
        return replace(self.text.to(there), final_BLD=None if self.final is None else self.final.moved(move).states(),
                       taps={layer: states.moved(move).states() for layer, states in self.taps.items()})


def plan_bins(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """The pieces of each row of `row_length` tokens by index, every piece in exactly one: in order, each goes into the
    fullest open row that has room. UserError if a piece is longer than a row."""
    if max(lengths, default=0) > row_length:
        raise UserError(f"row_length {row_length} is shorter than a piece of {max(lengths)} tokens; raise it")
    closed: list[list[int]] = []
    still_open: list[tuple[int, list[int]]] = []
    for index, length in enumerate(lengths):
        fitting = [place for place, (used, _) in enumerate(still_open) if used + length <= row_length]
        if fitting:
            used, row = still_open.pop(max(fitting, key=lambda place: still_open[place][0]))
        else:
            used, row = 0, []
            if len(still_open) == OPEN_BINS:
                closed.append(still_open.pop(max(range(OPEN_BINS), key=lambda place: still_open[place][0]))[1])
        row.append(index)
        still_open.append((used + length, row))
    return closed + [row for _, row in still_open]


def packed(rows: Sequence[Sequence[Piece]], row_length: int | None = None) -> PackedBatch:
    """Lay the pieces of each row one after another as isolated segments, padded on the right to `row_length`, by
    default the longest row (UserError if one does not fit). A row may be empty, but not all of them; all pieces bring
    states, or none does (ValueError)."""
    used = max(sum(len(piece.tokens_N) for piece in row) for row in rows)
    width = used if row_length is None else row_length
    if used > width:
        raise UserError(f"row_length {width} is shorter than a row of {used} tokens; raise it")
    shape = (len(rows), width)
    tokens_BL = torch.zeros(shape, dtype=torch.int64)
    supervised_BL = torch.zeros(shape, dtype=torch.bool)
    segments_BL = torch.full(shape, -1, dtype=torch.int64)
    positions_BL = torch.zeros(shape, dtype=torch.int64)
    # Of each piece: its row, its tokens there, and itself.
    places = list[tuple[int, slice, Piece]]()
    for row, pieces in enumerate(rows):
        start = 0
        for segment, piece in enumerate(pieces):
            stop = start + len(piece.tokens_N)
            here = (row, slice(start, stop))
            tokens_BL[here] = piece.tokens_N
            supervised_BL[here] = piece.supervised_N
            segments_BL[here] = segment
            # A window goes on at its place in the conversation, as the stored states were computed.
            positions_BL[here] = torch.arange(piece.first, piece.first + stop - start)
            places.append((*here, piece))
            start = stop
    text = Features(tokens_BL=tokens_BL, supervised_BL=supervised_BL, segments_BL=segments_BL,
                    positions_BL=positions_BL)
    final = [piece.final for _, _, piece in places if piece.final is not None]
    if not final:
        return PackedBatch(text=text, taps={})
    # Zeros in place of states would train without an error.
    if len(final) < len(places):
        raise ValueError(f"{len(final)} of {len(places)} pieces of a batch bring states; give those of all, or of none")
    kinds = {layer: [piece.taps[layer] for _, _, piece in places] for layer in places[0][2].taps}
    return PackedBatch(text=text, final=_pack_states(places, final, shape),
                       taps={layer: _pack_states(places, slices, shape) for layer, slices in kinds.items()})


def pad(pieces: Sequence[Piece]) -> Features:
    """One piece a row, padded on the right to the longest, its states decoded on the host."""
    return packed([[piece] for piece in pieces]).to("cpu")


def _pack_states(places: Sequence[tuple[int, slice, Piece]], slices: Sequence[StateSlice], shape: tuple[int, int]
                 ) -> PackedStates:
    """The states of one kind of pieces, in the places of their tokens."""
    codes_BLD = torch.zeros(*shape, slices[0].codes_ND.shape[1], dtype=slices[0].codes_ND.dtype)
    for (row, place, _), one in zip(places, slices, strict=True):
        codes_BLD[row, place] = one.codes_ND
    scales = [one.scales for one in slices if one.scales is not None]
    if not scales:
        return PackedStates(codes_BLD=codes_BLD)
    # The pieces of a file have one tensor of channels' scales.
    files = {id(channels_D): channels_D for channels_D, _ in scales}
    numbers = {key: number for number, key in enumerate(files)}
    tokens_BL, files_BL = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    for (row, place, _), (channels_D, tokens_N) in zip(places, scales, strict=True):
        tokens_BL[row, place], files_BL[row, place] = tokens_N, numbers[id(channels_D)]
    return PackedStates(codes_BLD=codes_BLD, scales=PackedScales(
        tokens_BL=tokens_BL, channels_FD=torch.stack(list(files.values())), files_BL=files_BL))
