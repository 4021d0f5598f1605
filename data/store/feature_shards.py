"""Stored states of token shards, read from memory-mapped files slice by slice; their number formats, those of torch and
eight bits with scales; and batches of rows, padded one conversation a row, or packed several to a row.

A few channels of a language model's states hold half of their energy or nearly all of it, and a few tokens are many
times larger than others. Of int8 one scale for a token leaves seven bits to its largest channel and few to all others;
one for a channel is set by its largest token. There are therefore both: x = code * token * channel. A number of fp8
has an exponent of its own, and the scale of a token alone is better.

States are packed as they lie on disk. Codes of eight bits are sent to the device and decoded there: half or a quarter
of the bytes are packed, pinned and copied, and the arithmetic of a number for each state is left to the device. Without
a GPU it is the thread that reads ahead that decodes, not the one that trains.

Shapes: T tokens of a shard, N tokens of a slice or a piece, B rows, L positions in a row, F files of states, D hidden
size of the target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from ...modules import Features, UserError
from ...modules.files.json_records import read_record
from .token_store import Manifest, ShardRecord, hash_file

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

    def token_bytes(self, width: int) -> int:
        """Bytes on disk of a token's state of `width` numbers; the channels' scales, once in a file, come on top."""
        return width * self.dtype.itemsize + (SCALE_BYTES if self.largest else 0)

    def packed(self, states_TD: Tensor) -> dict[str, Tensor]:
        """The tensors of a file with these states."""
        if not self.largest:
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
    """States [N, D] of codes and their scales, in the format of the channels' scales, which may be each token's own."""
    return (codes_ND.float() * tokens_N[:, None] * channels_D.float()).to(channels_D.dtype)


FEATURES = "features.json"
FINAL = "final"  # The states after the last norm
REMEDY = "run draftsmith distill with the same recipe, which makes them again"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Hashes of one file of states."""

    tokens: str  # Of the token shard, or of all data, that it belongs to
    sha256: str  # Of the file itself


@dataclass(frozen=True, kw_only=True)
class StoredStates:
    """Content of features.json."""

    format_version: int  # Layout of the files
    target: str  # Hash of the target's weights
    dtype: str  # Number format of the states
    files: dict[str, StoredFile]  # Finished files by name


class FeatureShard:
    """Stored states of one token shard, read from disk slice by slice, by one thread at a time; UserError if a file
    holds none."""

    def __init__(self, folder: Path, record: ShardRecord, taps: Sequence[int]) -> None:
        self._taps = tuple(taps)
        # Of each kind: the file, its mark, states or codes, which stay on disk, and scales of channels and all tokens.
        self._files: list[tuple[Path, tuple[int, int, int], Any, tuple[Tensor, Tensor] | None]] = []
        for name in (FINAL, *map(tap, taps)):
            file = folder / state_file(record, name)
            try:
                mark = _mark(file)
                found: Any = safe_open(file, framework="pt")
                scaled = CHANNELS in found.keys()  # noqa: SIM118
                scales = (found.get_tensor(CHANNELS), found.get_tensor(TOKENS)) if scaled else None
                self._files.append((file, mark, found.get_slice(STATES), scales))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} holds no states ({error}); {REMEDY}") from error

    def slices(self, start: int, stop: int) -> tuple[StateSlice, dict[int, StateSlice]]:
        """(final states, tapped states by layer) of tokens start to stop - 1, as they lie on disk. UserError if a file
        is no longer the one that was opened."""
        found = []
        for file, mark, codes, scales in self._files:
            # A map of a file shows what others do to it meanwhile: unseen, training would go on with other states.
            try:
                now = _mark(file)
            except OSError as error:
                raise UserError(f"{file} is gone while training reads it ({error.strerror}); {REMEDY}") from error
            if now != mark:
                raise UserError(f"{file} was altered while training reads it; {REMEDY}")
            here = None if scales is None else (scales[0], scales[1][start:stop])
            found.append(StateSlice(codes[start:stop], here))
        return found[0], dict(zip(self._taps, found[1:], strict=True))


def _mark(file: Path) -> tuple[int, int, int]:
    """Inode, size and time of change of a file: one of them differs once it is written or replaced."""
    # The content is not hashed again: that would read all of it at every batch.
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def tap(layer: int) -> str:
    """Name of the output states of a layer."""
    return f"tap_{layer}"


def state_file(record: ShardRecord, name: str) -> str:
    """Name of the file with some states of a token shard: one for each kind, since drafters read different ones."""
    return f"{name}-{record.file}"


def state_names(taps: Sequence[int]) -> tuple[str, ...]:
    """Names of all states that a drafter with these taps reads."""
    return (FINAL, *(tap(layer) for layer in sorted(set(taps))))


def open_features(folder: Path, records: Sequence[ShardRecord], taps: Sequence[int]) -> list[FeatureShard]:
    """Open the states of shards after checking hashes; UserError if some are missing, of other tokens, or corrupted."""
    listed = {} if (found := read_features(folder)) is None else found.files
    for record in records:
        for name in state_names(taps):
            file = folder / state_file(record, name)
            entry = listed.get(file.name)
            if entry is None or entry.tokens != record.sha256:
                raise UserError(f"{folder} holds no states {name} for {record.file}; {REMEDY}, or train with "
                                "batch.states: computed")
            if hash_file(file) != entry.sha256:
                raise UserError(f"{file} is corrupted (its content is not what was written); {REMEDY}")
    return [FeatureShard(folder, record, taps) for record in records]


def unlisted(folder: Path, manifest: Manifest, taps: Sequence[int], form: StateFormat) -> list[ShardRecord]:
    """The shards of which not all states of a drafter are listed as stored in a number format; no file is read but the
    list. Raises UserError if that is damaged."""
    found = read_features(folder)
    if found is None or (found.target, found.dtype) != (manifest.target.weights_hash, form.name):
        return list(manifest.shards)
    listed = {name: entry.tokens for name, entry in found.files.items()}
    return [record for record in manifest.shards
            if any(listed.get(state_file(record, name)) != record.sha256 for name in state_names(taps))]


def read_features(folder: Path) -> StoredStates | None:
    """A folder's list of states; None where it has none. Raises UserError if it is damaged."""
    file = folder / FEATURES
    return read_record(StoredStates, file, f"{REMEDY}; delete the file first") if file.exists() else None


# Batches --------------------------------------------------------------------------------------------------------------


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


def _pack_states(places: Sequence[tuple[int, slice, Piece]], slices: Sequence[StateSlice],
                 shape: tuple[int, int]) -> PackedStates:
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
