"""Feature shards: the target's states at every token of a token shard, stored once and read slice by slice.

Each kind of state has a file of its own, so that drafters which read different layers share what they have in common.

Shapes: B rows of a pass, N tokens of a slice, D hidden size of the target.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from ..modules import Target, UserError
from ..modules.json_records import read_record
from .collate import Piece, pad
from .token_store import (
    FORMAT_VERSION,
    Manifest,
    ShardRecord,
    TokenShard,
    hash_file,
    write_bytes,
    write_tensors,
)

FEATURES = "features.json"
FINAL, STATES = "final", "states"
"""The states after the last norm; the one tensor of each file."""
PASS_TOKENS = 1024
"""Tokens of one pass of the target, padding included; a longer row is a pass of its own."""
GIB = 2**30
"""Bytes of a GiB."""
REMEDY = "run draftsmith distill with the same recipe, which makes them again"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Hashes of one file of states."""

    tokens: str
    """Of the token shard that they belong to."""
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
    """Stored states of one token shard, read from disk slice by slice."""

    def __init__(self, folder: Path, record: ShardRecord, taps: Sequence[int]) -> None:
        self._final = _open(folder / state_file(record, FINAL))
        self._taps = {layer: _open(folder / state_file(record, tap(layer))) for layer in taps}

    def final(self, start: int, stop: int) -> Tensor:
        """Final states of tokens start to stop - 1, [N, D]."""
        states: Tensor = self._final[start:stop]
        return states

    def taps(self, start: int, stop: int) -> dict[int, Tensor]:
        """Tapped states of tokens start to stop - 1 by layer, each [N, D]."""
        return {layer: states[start:stop] for layer, states in self._taps.items()}


def _open(file: Path) -> Any:
    try:
        opened: Any = safe_open(file, framework="pt")
        return opened.get_slice(STATES)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} holds no states ({error}); {REMEDY}") from error


def tap(layer: int) -> str:
    """Name of the output states of a layer."""
    return f"tap_{layer}"


def state_file(record: ShardRecord, name: str) -> str:
    """Name of the file with some states of a token shard: one for each kind, since drafters read different ones."""
    return f"{name}-{record.file}"


def state_names(taps: Sequence[int]) -> tuple[str, ...]:
    """Names of all states that a drafter with these taps reads."""
    return (FINAL, *(tap(layer) for layer in sorted(set(taps))))


def affordable(
    manifest: Manifest, taps: Sequence[int], dtype: torch.dtype, room: int | None
) -> tuple[ShardRecord, ...]:
    """The first shards of the data, as many as have room on disk for the states that a drafter reads.

    They follow from the data alone, not from what else is stored: a resumed run reads the same states from disk.

    Args:
        taps: layers whose outputs the drafter reads.
        dtype: of the stored states.
        room: bytes; None for no limit.

    Raises:
        UserError: if there is no room for the first one.
    """
    if room is None:
        return manifest.shards
    width = len(state_names(taps)) * manifest.target.hidden_size * dtype.itemsize
    ends = list(accumulate(record.tokens * width for record in manifest.shards))
    found = tuple(record for record, end in zip(manifest.shards, ends, strict=True) if end <= room)
    if not found:
        raise UserError(f"batch.store_gib {room / GIB:.3g} has no room for the states of the first shard, which take "
                        f"{ends[0] / GIB:.3g} GiB; raise it, or set batch.states: computed")
    return found


def encode(
    target: Target,
    folder: str | Path,
    taps: tuple[int, ...] = (),
    *,
    dtype: str = "auto",
    room: int | None = None,
    progress: bool = True,
) -> list[Path]:
    """Store the target's final states (and taps) at every token next to the token shards, skipping stored ones.

    States stored for another drafter stay: drafters with different taps share a folder.

    Args:
        target: the one that the shards were made with.
        folder: of `distill`.
        taps: layers whose outputs are stored too.
        dtype: of the stored states, such as float16; auto keeps the target's.
        room: bytes that the states of this drafter may take: the first shards that fit are stored; None stores all.
        progress: show a progress bar.

    Returns:
        The files that hold them.

    Raises:
        UserError: if the target is another, a shard is corrupted, the disk is full, or there is no room for one shard.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    manifest.target.require_same(target.identity)
    stored = target.dtype if dtype == "auto" else _dtype(dtype)
    key = {
        "format_version": FORMAT_VERSION,
        "target": target.identity.weights_hash,
        "dtype": str(stored).removeprefix("torch."),
    }
    done, records = _known_features(folder, key), affordable(manifest, taps, stored, room)
    wanted = {record: [name for name in state_names(taps) if not _is_encoded(folder, record, name, done)]
              for record in records}
    missing = {record: names for record, names in wanted.items() if names}
    total = sum(record.tokens for record in missing)
    with target.reproducible(), tqdm(total=total, desc="target states", unit="tok", disable=not progress) as bar:
        for record, names in missing.items():
            shard = TokenShard.read(folder / record.file, record.sha256)
            for name, states in _states(target, shard, names, stored, bar).items():
                file = folder / state_file(record, name)
                write_tensors(file, {STATES: states})
                done[file.name] = {"tokens": record.sha256, "sha256": hash_file(file)}
            write_bytes(folder / FEATURES, json.dumps({**key, "files": done}, indent=2, sort_keys=True).encode())
    return [folder / state_file(record, name) for record in records for name in state_names(taps)]


def open_features(folder: Path, records: Sequence[ShardRecord], taps: Sequence[int]) -> list[FeatureShard]:
    """Open the states of shards after checking their hashes.

    Raises:
        UserError: if states are missing, of other tokens, or corrupted.
    """
    done = _read_features(folder).get("files", {})
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


def stored_dtype(folder: Path) -> torch.dtype:
    """Number format of the states in a folder.

    Raises:
        UserError: if it holds none.
    """
    content = _read_features(folder)
    if "dtype" not in content:
        raise UserError(f"{folder} holds no states; {REMEDY}, or train with batch.states: computed")
    return _dtype(content["dtype"])


def _dtype(name: str) -> torch.dtype:
    known = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    if name not in known:
        raise UserError(f"dtype of stored states must be auto or one of {sorted(known)}, got {name!r}")
    return known[name]


def _read_features(folder: Path) -> dict[str, Any]:
    file = folder / FEATURES
    if not file.exists():
        return {}
    return asdict(read_record(StoredStates, file, f"{REMEDY}; delete the file first"))


def _known_features(folder: Path, key: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Finished files of this very target and number format; none when they were made with others."""
    content = _read_features(folder)
    files: dict[str, dict[str, str]] = content.pop("files", {})
    return files if content == dict(key) else {}


def _is_encoded(folder: Path, record: ShardRecord, name: str, done: Mapping[str, Mapping[str, str]]) -> bool:
    file = folder / state_file(record, name)
    entry = done.get(file.name)
    return (
        entry is not None and entry["tokens"] == record.sha256 and file.exists() and hash_file(file) == entry["sha256"]
    )


def _states(
    target: Target, shard: TokenShard, names: Sequence[str], dtype: torch.dtype, bar: Any
) -> dict[str, Tensor]:
    """The named states of all tokens of a shard, each [N, D]."""
    spans = [shard.span(row) for row in range(shard.num_rows)]
    taps = {name: int(name.removeprefix("tap_")) for name in names if name != FINAL}
    states = {name: torch.empty(len(shard.tokens_T), target.hidden_size, dtype=dtype) for name in names}
    for group in _alike([stop - start for start, stop in spans]):
        pieces = [
            Piece(tokens_N=shard.tokens_T[start:stop], supervised_N=shard.supervised_T[start:stop])
            for start, stop in (spans[row] for row in group)
        ]
        encoded = target.encode(pad(pieces), tuple(taps.values()))
        for name in names:
            states_BND = encoded.taps[taps[name]] if name in taps else encoded.final()
            for place, row in enumerate(group):
                start, stop = spans[row]
                states[name][start:stop] = states_BND[place, : stop - start].to("cpu", dtype)
        bar.update(sum(len(piece.tokens_N) for piece in pieces))
    return states


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups of like length and at most PASS_TOKENS tokens, padding included.

    Not packed: a packed row of 1,024 tokens spends a third of its pass on attention between strangers.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if not groups or lengths[row] * (len(groups[-1]) + 1) > PASS_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return groups
