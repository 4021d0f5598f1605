"""An engine that takes its requests from a folder: the plain contract, which the guide to clusters tells.

A request is NAME.asked, a safetensors file with `tokens` (int32 [T]: all rows, one after another), `starts` (int64: the
first token of each row, and T) and `taps` (int64: layers). An engine renames it to NAME.taken and leaves NAME.states
with `final` and `tap_I` of each layer I, [T, D] each.
"""

import hashlib
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ...modules import Target, UserError
from ...modules.files.atomic_files import make_folder
from ..store.feature_shards import FINAL
from ..store.token_store import write_bytes
from .state_engine import AGAIN, StateEngine

TAKEN_SECONDS = 60.0  # Longest time without a request that is taken
ANSWER_SECONDS = 600.0  # Longest time without an answer, while an engine has a request
POLL_SECONDS = 0.05  # Time between two looks


class FolderEngine(StateEngine):
    """An engine, or several, at work in a folder, on a disk or in shared memory. Raises UserError if the folder cannot
    be made."""

    # One is computed while the other is read: states of a large target fill gigabytes.
    width = 2
    request_tokens = 4096

    def __init__(self, place: str, target: Target) -> None:
        super().__init__(place, target)
        self.folder = Path(place)
        make_folder(self.folder)
        self._lived = time.monotonic()

    def _asked(self, rows: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        taps = [int(name.removeprefix("tap_")) for name in names if name != FINAL]
        # Named by its content, so that a command that goes on finds what an engine has left for a killed one.
        content = repr([self.target.identity.weights_hash, taps, [row.tolist() for row in rows]])
        name = hashlib.sha256(content.encode()).hexdigest()[:32]
        asked, taken, given = (self.folder / f"{name}.{end}" for end in ("asked", "taken", "states"))
        if not given.exists():
            # A file of a request that an engine took and died with would count as one at work.
            taken.unlink(missing_ok=True)
            write_bytes(asked, save({"tokens": torch.cat(list(rows)).int(), "taps": torch.tensor(taps).long(),
                                     "starts": torch.tensor([0, *accumulate(map(len, rows))])}))
        started, was_taken = time.monotonic(), False
        while not given.exists():
            if not was_taken and not asked.exists():
                was_taken, self._lived = True, time.monotonic()
            # While it is at work on one request, others wait.
            busy = next(self.folder.glob("*.taken"), None) is not None
            limit = ANSWER_SECONDS if busy else TAKEN_SECONDS
            if time.monotonic() - max(started, self._lived) > limit:
                for file in (asked, taken):
                    file.unlink(missing_ok=True)
                raise UserError(f"no engine {'answers' if busy else 'takes'} requests in {self.folder} (for {limit:g} "
                                f"seconds none did); {AGAIN}")
            time.sleep(POLL_SECONDS)
        self._lived = time.monotonic()
        try:
            states: dict[str, Tensor] = load_file(given)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{given} cannot be read as a safetensors file ({error}); an engine writes it under "
                            "another name and then renames it: mend that and start again") from error
        finally:
            given.unlink(missing_ok=True)
        return states
