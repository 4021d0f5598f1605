"""Stored states of token shards, read from memory-mapped files slice by slice, and their number formats: those of
torch, and eight bits with scales.

A few channels of a language model's states hold half of their energy or nearly all of it, and a few tokens are many
times larger than others. Of int8 one scale for a token leaves seven bits to its largest channel and few to all others;
one for a channel is set by its largest token. There are therefore both: x = code * token * channel. A number of fp8
has an exponent of its own, and the scale of a token alone is better.

Shapes: T tokens of a shard, N tokens of a slice, D hidden size of the target.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from ...modules import UserError
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
    done = read_features(folder).get("files", {})
    for record in records:
        for name in state_names(taps):
            file = folder / state_file(record, name)
            entry = done.get(file.name)
            if entry is None or entry["tokens"] != record.sha256:
                raise UserError(
                    f"{folder} holds no states {name} for {record.file}; {REMEDY}, or train with batch.states: computed"
                )
            if hash_file(file) != entry["sha256"]:
                raise UserError(f"{file} is corrupted (its content is not what was written); {REMEDY}")
    return [FeatureShard(folder, record, taps) for record in records]


def unlisted(folder: Path, manifest: Manifest, taps: Sequence[int], form: StateFormat) -> list[ShardRecord]:
    """The shards of which not all states of a drafter are listed as stored in a number format; no file is read but the
    list. Raises UserError if that is damaged."""
    content = read_features(folder)
    if (content.get("target"), content.get("dtype")) != (manifest.target.weights_hash, form.name):
        return list(manifest.shards)
    listed = {name: entry["tokens"] for name, entry in content["files"].items()}
    return [record for record in manifest.shards
            if any(listed.get(state_file(record, name)) != record.sha256 for name in state_names(taps))]


def read_features(folder: Path) -> dict[str, Any]:
    """Content of a folder's list of states; empty where it has none. Raises UserError if it is damaged."""
    file = folder / FEATURES
    if not file.exists():
        return {}
    return asdict(read_record(StoredStates, file, f"{REMEDY}; delete the file first"))
