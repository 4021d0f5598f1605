"""Stored states of token shards, read from memory-mapped files slice by slice.

Shapes: T tokens of a shard, N tokens of a slice, D hidden size of the target.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...modules import UserError
from ...modules.files.json_records import read_record
from .state_formats import CHANNELS, STATES, TOKENS, StateFormat, StateSlice
from .token_store import Manifest, ShardRecord, hash_file

FEATURES = "features.json"
FINAL = "final"
"""The states after the last norm."""
REMEDY = "run draftsmith distill with the same recipe, which makes them again"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Hashes of one file of states."""

    tokens: str
    """Of the token shard, or of all data, that it belongs to."""
    sha256: str
    """Of the file itself."""


@dataclass(frozen=True, kw_only=True)
class StoredStates:
    """Content of features.json."""

    format_version: int
    """Layout of the files."""
    target: str
    """Hash of the target's weights."""
    dtype: str
    """Number format of the states."""
    files: dict[str, StoredFile]
    """Finished files by name."""


class FeatureShard:
    """Stored states of one token shard, read from disk slice by slice, by one thread at a time."""

    def __init__(self, folder: Path, record: ShardRecord, taps: Sequence[int]) -> None:
        self._final = _StoredKind(folder / state_file(record, FINAL))
        self._taps = {layer: _StoredKind(folder / state_file(record, tap(layer))) for layer in taps}

    def slices(self, start: int, stop: int) -> tuple[StateSlice, dict[int, StateSlice]]:
        """(final states, tapped states by layer) of tokens start to stop - 1, as they lie on disk.

        Raises:
            UserError: if a file is no longer the one that was opened.
        """
        return self._final.slice(start, stop), {layer: kind.slice(start, stop) for layer, kind in self._taps.items()}


class _StoredKind:
    """The states of one file, whose codes stay on disk while the scales of their tokens are in memory.

    Raises:
        UserError: if the file holds none.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.opened = _mark(file)
            found: Any = safe_open(file, framework="pt")
            scaled = CHANNELS in found.keys()  # noqa: SIM118
            self.scales = (found.get_tensor(CHANNELS), found.get_tensor(TOKENS)) if scaled else None
            self.codes: Any = found.get_slice(STATES)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} holds no states ({error}); {REMEDY}") from error

    def slice(self, start: int, stop: int) -> StateSlice:
        """States of tokens start to stop - 1.

        Raises:
            UserError: if the file is no longer the one that was opened.
        """
        # A map of a file shows what others do to it meanwhile: unseen, training would go on with other states.
        try:
            now = _mark(self.file)
        except OSError as error:
            raise UserError(f"{self.file} is gone while training reads it ({error.strerror}); {REMEDY}") from error
        if now != self.opened:
            raise UserError(f"{self.file} was altered while training reads it; {REMEDY}")
        if self.scales is None:
            return StateSlice(self.codes[start:stop])
        channels_D, tokens_T = self.scales
        return StateSlice(self.codes[start:stop], (channels_D, tokens_T[start:stop]))


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
    """Open the states of shards after checking their hashes.

    Raises:
        UserError: if states are missing, of other tokens, or corrupted.
    """
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
