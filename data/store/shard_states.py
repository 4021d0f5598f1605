"""States of decoded rows: recorded while the target writes a shard, and stored with it.

The files of a shard's states are written before the manifest names the shard, and they are a pure function of the same
decoding as its tokens: a killed run makes shard and states again, with the same bytes.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...modules import Target, UserError
from ...modules.decoding.state_recorder import RecordedStates
from .feature_shards import FINAL, StoredFile, state_names, tap
from .feature_store import StateStore, WantedStates, read_rows
from .state_formats import format_named
from .token_store import ShardRecord, TokenShard


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
