"""Stored states of token shards, read from memory-mapped files slice by slice.

Shapes: T tokens of a shard, N tokens of a slice, D hidden size of the target.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...modules import UserError
from ...modules.files.json_records import read_record
from .state_formats import CHANNELS, STATES, TOKENS, StateFormat, StateSlice
from .token_store import Manifest, ShardRecord, hash_file

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


@dataclass(frozen=True)
class _OpenFile:
    """A file with the states of one kind, as it was when it was opened."""

    path: Path
    mark: tuple[int, int, int]  # See `_mark`
    codes: Any  # States or codes, which stay on disk
    scales: tuple[Tensor, Tensor] | None  # Of codes: those of channels, and those of all tokens


class FeatureShard:
    """Stored states of one token shard, read from disk slice by slice, by one thread at a time; UserError if a file
    holds none."""

    def __init__(self, folder: Path, record: ShardRecord, taps: Sequence[int]) -> None:
        self._taps, self._files = tuple(taps), list[_OpenFile]()
        for name in (FINAL, *map(tap, taps)):
            file = folder / state_file(record, name)
            try:
                mark = _mark(file)
                found: Any = safe_open(file, framework="pt")
                scaled = CHANNELS in found.keys()  # noqa: SIM118
                scales = (found.get_tensor(CHANNELS), found.get_tensor(TOKENS)) if scaled else None
                self._files.append(_OpenFile(file, mark, found.get_slice(STATES), scales))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} holds no states ({error}); {REMEDY}") from error

    def slices(self, start: int, stop: int) -> tuple[StateSlice, dict[int, StateSlice]]:
        """(final states, tapped states by layer) of tokens start to stop - 1, as they lie on disk. UserError if a file
        is no longer the one that was opened."""
        found = []
        for file in self._files:
            # A map of a file shows what others do to it meanwhile: unseen, training would go on with other states.
            try:
                now = _mark(file.path)
            except OSError as error:
                raise UserError(f"{file.path} is gone while training reads it ({error.strerror}); {REMEDY}") from error
            if now != file.mark:
                raise UserError(f"{file.path} was altered while training reads it; {REMEDY}")
            scales = None if file.scales is None else (file.scales[0], file.scales[1][start:stop])
            found.append(StateSlice(file.codes[start:stop], scales))
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
    """Open the states of shards after checking their hashes; UserError if some are missing, of other tokens, or
    corrupted."""
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
