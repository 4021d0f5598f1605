"""The target's states at every token of a token shard, written once; `feature_shards` reads them slice by slice.

Each kind of state has a file of its own, so that drafters which read different layers share what they have in common.
Where the target has decoded a shard, its states are recorded meanwhile and stored with it (`ShardStates`), before the
manifest names the shard: a killed run makes both again, with the same bytes. `Encoding` is a second pass of the target
over what has none: given text, layers that another drafter reads, lost files. Both give the same states within
rounding, not the same bytes. The room that states take on the disk is compared with what is free before any work.

Shapes: B rows of a pass, T tokens of a shard, N tokens of a slice or a row, D hidden size of the target."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...modules import Target, UserError
from ...modules.decoding.recorders import RecordedStates
from ...modules.files.folders import sole_writer
from ...modules.progress import ProgressLine
from .feature_shards import (
    FEATURES,
    FINAL,
    Piece,
    StateFormat,
    StoredFile,
    StoredStates,
    format_named,
    pad,
    read_features,
    state_file,
    state_names,
    tap,
)
from .token_store import FORMAT_VERSION, Manifest, ShardRecord, TokenShard, hash_file, write_bytes, write_tensors


def require_room(folder: Path, needed: int, what: str) -> str:
    """Compare bytes to be written, `what` says of what, with those that the disk of a folder, there or to come, has
    free; returns both in words. UserError if there is less."""
    disk = shutil.disk_usage(nearest(folder))
    free = disk.free
    # A file system without a size is none to write files to, which the first of them says better.
    if disk.total and needed > free:
        raise UserError(f"{what} take {in_words(needed)}, and the disk of {folder} has {in_words(free)} free; make "
                        "room, choose another --out, or set batch.states: computed")
    return f"{what} take {in_words(needed)}, {in_words(free)} are free"


def nearest(folder: Path) -> Path:
    """The folder, or where it is not there yet, the nearest one above it that is."""
    here = folder.absolute()
    while not here.exists():
        here = here.parent
    return here


def in_words(count: int) -> str:
    """Bytes in readable units."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


PASS_TOKENS = 1024  # Tokens of one pass of the target, padding included; a longer row is a pass of its own
StateReader = Callable[..., dict[int, dict[str, Tensor]]]  # `read_rows` with its target, or an engine's reader


@dataclass(frozen=True, kw_only=True)
class WantedStates:
    """States that the training of a drafter reads from disk."""

    taps: tuple[int, ...] = ()  # Layers whose outputs it reads, next to the final states
    form: str | None = None  # Name of their number format on disk; None is the target's own

    def bytes(self, tokens: int, target: Target) -> int:
        """Bytes on disk of the states of so many tokens of this target."""
        width = format_named(self.form, target.dtype).token_bytes(target.hidden_size)
        return tokens * width * len(state_names(self.taps))


class StateStore:
    """The files of states in a folder of `distill`, of the target that made its shards, and their list in
    features.json. Files of another target or number format are forgotten and written anew. UserError if the list is
    damaged."""

    def __init__(self, folder: Path, target: Target, form: StateFormat) -> None:
        self.folder, self.hidden_size, self.form = folder, target.hidden_size, form
        self.dtype = target.dtype if form.largest else form.dtype  # Of states in memory, until they are written
        self.empty = StoredStates(format_version=FORMAT_VERSION, target=target.identity.weights_hash, dtype=form.name,
                                  files={})
        self.files = self.listed()

    def listed(self) -> dict[str, StoredFile]:
        """The files in the list. Raises UserError if it is damaged."""
        # States of another target or number format are others: their files are written over.
        found = read_features(self.folder)
        return {} if found is None or replace(found, files={}) != self.empty else found.files

    def write(self, record: ShardRecord, names: Sequence[str], rows: Sequence[Mapping[str, Tensor]]
              ) -> dict[str, StoredFile]:
        """Write the named states of a shard, each [N, D] a row, one kind after the other; returns the hashes of the
        files by name, and `add` lists them. UserError if the disk is full."""
        written = {}
        for name in names:
            states_TD = torch.empty(record.tokens, self.hidden_size, dtype=self.dtype)
            if rows:
                torch.cat([row[name] for row in rows], out=states_TD)
            file = state_file(record, name)
            sha256 = write_tensors(self.folder / file, self.form.packed(states_TD))
            written[file] = StoredFile(tokens=record.sha256, sha256=sha256)
        return written

    def add(self, files: Mapping[str, StoredFile]) -> None:
        """List finished files. Raises UserError if the disk is full."""
        with sole_writer(self.folder / FEATURES):
            # Another recipe may store other states of the same data meanwhile.
            self.files |= {**self.listed(), **files}
            listed = asdict(replace(self.empty, files=self.files))
            write_bytes(self.folder / FEATURES, json.dumps(listed, indent=2, sort_keys=True).encode())

    def holds(self, name: str, tokens: str) -> bool:
        """True if a file is stored as it was written for data of this hash."""
        file, entry = self.folder / name, self.files.get(name)
        # A file that is listed may have been lost or replaced since.
        return entry is not None and entry.tokens == tokens and file.exists() and hash_file(file) == entry.sha256


class Encoding:
    """The second pass of the target that made the data, or else UserError, over their folder: it reads whatever has no
    stored states, or `read` does.

    `form` names the number format of the stored states, such as float16 or int8; None keeps the target's. The outputs
    of the layers `taps` are stored too."""

    def __init__(self, target: Target, folder: Path, taps: tuple[int, ...] = (), *, form: str | None = None,
                 read: StateReader | None = None) -> None:
        manifest = Manifest.load(folder)
        manifest.target.require_same(target.identity)
        self.target, self.folder, self.names = target, folder, state_names(taps)
        self.read: StateReader = partial(read_rows, target) if read is None else read
        self.store = StateStore(folder, target, format_named(form, target.dtype))
        self.records = manifest.shards
        lacking = {record: [name for name in self.names
                            if not self.store.holds(state_file(record, name), record.sha256)]
                   for record in self.records}
        self.missing = {record: names for record, names in lacking.items() if names}
        self.tokens = sum(record.tokens for record in self.missing)  # Number of tokens that have to be read
        width, stored = target.hidden_size, self.store.form
        # Scales of channels, in the target's own number format, stand once in a file.
        channels = width * target.dtype.itemsize if stored.largest else 0
        self.bytes = sum((record.tokens * stored.token_bytes(width) + channels) * len(names)
                         for record, names in self.missing.items())  # Bytes of the states that will be written

    def run(self, *, progress: bool = True) -> list[Path]:
        """Read them and store their states; returns the files that hold the states of all shards. UserError if a shard
        is corrupted, or the disk has no room."""
        require_room(self.folder, self.bytes, f"the states of {self.tokens:,} tokens")
        shown = progress and bool(self.missing)
        with self.target.reproducible(), ProgressLine("target states", self.tokens, "tok", shown=shown) as line:
            for record, names in self.missing.items():
                shard = TokenShard.read(self.folder / record.file, record.sha256)
                read = self.read(shard, range(shard.num_rows), names, self.store.dtype, line.advance)
                self.store.add(self.store.write(record, names, [read[row] for row in range(shard.num_rows)]))
        return [self.folder / state_file(record, name) for record in self.records for name in self.names]


def read_rows(target: Target, shard: TokenShard, rows: Sequence[int], names: Sequence[str], dtype: torch.dtype,
              advance: Callable[[int], object] | None = None) -> dict[int, dict[str, Tensor]]:
    """The named states of these rows of a shard by number, each [N, D] on the CPU, by a pass of the target over the
    rows; `advance` gets the number of tokens of each pass."""
    taps = {name: int(name.removeprefix("tap_")) for name in names if name != FINAL}
    found: dict[int, dict[str, Tensor]] = {}
    # Rows of like length share a pass, at most PASS_TOKENS with their padding. They are not packed: a packed row of
    # 1,024 tokens spends a third of its pass on attention between strangers.
    lengths = {row: shard.span(row)[1] - shard.span(row)[0] for row in rows}
    groups: list[list[int]] = []
    for row in sorted(lengths, key=lambda row: lengths[row]):
        if not groups or lengths[row] * (len(groups[-1]) + 1) > PASS_TOKENS:
            groups.append([])
        groups[-1].append(row)
    for group in groups:
        spans = [slice(*shard.span(row)) for row in group]
        pieces = [Piece(tokens_N=shard.tokens_T[span], supervised_N=shard.supervised_T[span]) for span in spans]
        encoded = target.encode(pad(pieces), tuple(taps.values()))
        kinds = {name: encoded.taps[taps[name]] if name in taps else encoded.final() for name in names}
        for place, (row, piece) in enumerate(zip(group, pieces, strict=True)):
            count = len(piece.tokens_N)
            found[row] = {name: kind[place, :count].to("cpu", dtype, copy=True) for name, kind in kinds.items()}
        if advance is not None:
            advance(sum(len(piece.tokens_N) for piece in pieces))
    return found


class ShardStates:
    """The states of the shards of one distillation, `wanted` by every training that will read them from disk. UserError
    if the folder's list of states is damaged, or the trainings want states in several number formats.

    Those of one shard are in memory, in the target's number format: tokens x hidden size x (1 + number of taps) x bytes
    of a number, and one kind of state once more while its file is written."""

    def __init__(self, target: Target, folder: Path, wanted: Sequence[WantedStates]) -> None:
        self.target, self.wanted = target, tuple(wanted)
        forms = {format_named(one.form, target.dtype) for one in wanted}
        if len(forms) > 1:
            raise UserError("trainings on the same data ask for states in the number formats "
                            f"{', '.join(sorted(form.name for form in forms))}; set batch.states_format of all to one "
                            "of them")
        self.store = StateStore(folder, target, forms.pop()) if forms else None
        self.taps = tuple(sorted({layer for one in wanted for layer in one.taps})) if wanted else None
        """Layers to be recorded next to the final states; None where nothing is stored."""
        self.seconds = 0.0  # Time spent on reading what was not recorded, and on writing

    def write(self, record: ShardRecord, shard: TokenShard, rows: Sequence[RecordedStates | None]
              ) -> dict[str, StoredFile]:
        """Write the states of a shard; returns the hashes of the files by name, and `add` lists them. Rows without
        recorded states are read by the target; a shard without any is left to `encode`. UserError if the disk is
        full."""
        if self.store is None or all(one is None for one in rows):
            return {}
        started = time.monotonic()
        names = tuple(sorted({name for one in self.wanted for name in state_names(one.taps)}))
        missing = [row for row, one in enumerate(rows) if one is None]
        found = read_rows(self.target, shard, missing, names, self.store.dtype)
        for row, one in enumerate(rows):
            if one is not None:
                found[row] = {FINAL: one.final_LD, **{tap(layer): tapped_LD for layer, tapped_LD in one.taps.items()}}
        files = self.store.write(record, names, [found[row] for row in range(len(rows))])
        self.seconds += time.monotonic() - started
        return files

    def add(self, files: Mapping[str, StoredFile]) -> None:
        """List files that `write` has written. Raises UserError if the disk is full."""
        if self.store is not None and files:
            self.store.add(files)
