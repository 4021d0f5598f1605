"""The queue of train shards that several processes answer: the finished ones, the free ones, and where the data end.

Finished shards are files of the folder `queue`; a shard in work is a lock, which goes with the process that holds it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path

from ...modules import UserError
from ...modules.files.atomic_files import remove_leftovers
from ...modules.files.json_records import read_record
from ..store.feature_shards import StoredFile
from ..store.token_store import Manifest, ShardRecord, write_bytes
from .folder_locks import FolderLocks

QUEUE, LOCKS = "queue", "queue.lock"
"""Folder of the finished shards' records, gone when the data are complete; and the file of the locks, which stays: a
process that has opened it and one that finds it removed would lock two different files."""
MERGE, HELD_OUT, FIRST = 0, 1, 2
"""Locks: of the list of finished shards, of the held-out prompts, and of the first shard's prompts; those of its
answers, and of the shards after it, follow in turn."""
SHARD_FILE = re.compile(r"\.?(?:.+-)?(train-\d{5,}\.safetensors)(?:\.partial)?")
"""Name of a train shard, of a file of its states, or of one of them half-written."""
REMEDY = "delete it, the shard is then answered again"


@dataclass(frozen=True, kw_only=True)
class FinishedShard:
    """Result of one number of the queue."""

    read: int
    """Prompts read or written for it, before filtering; fewer than a shard has where the source ended."""
    fresh: int
    """Prompts of it that could be used."""
    record: ShardRecord | None
    """Its entry in the manifest; None where nothing was answered."""
    states: dict[str, StoredFile]
    """Its files of states."""

    @property
    def supervised(self) -> int:
        """Answer tokens."""
        return 0 if self.record is None else self.record.supervised

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return 0 if self.record is None else self.record.tokens


class ShardQueue:
    """Numbers 0, 1, ... of train shards, each answered by one process at a time.

    Args:
        folder: of the data.
        locks: of that folder.
        size: prompts of a shard.
        budget: answer tokens of its shards; None for no limit.
        first: number of its first shard, after those that the data had before.
    """

    def __init__(self, folder: Path, locks: FolderLocks, size: int, budget: int | None, first: int = 0) -> None:
        self.folder, self.locks, self.size, self.budget, self.first = folder / QUEUE, locks, size, budget, first
        self._finished: dict[int, FinishedShard] = {}

    def finished(self) -> Mapping[int, FinishedShard]:
        """Finished shards by number, those of other processes among them.

        Raises:
            UserError: if the record of one is damaged.
        """
        for file in self.folder.glob("train-*.json"):
            number = int(file.stem.removeprefix("train-"))
            if number >= self.first and number not in self._finished:
                try:
                    self._finished[number] = read_record(FinishedShard, file, REMEDY)
                except UserError:
                    # Another process has completed the data and cleared the queue.
                    if file.exists():
                        raise
        return self._finished

    def end(self) -> int | None:
        """Number after the last shard, once it is known: that of the shard that reaches the budget or the end of the
        source."""
        finished, total, number = self.finished(), 0, self.first
        while self.budget is None or total < self.budget:
            if number not in finished:
                return None
            if finished[number].read < self.size:
                return number + 1
            total, number = total + finished[number].supervised, number + 1
        return number

    def unbroken(self) -> list[FinishedShard]:
        """Finished shards from the first one to the last answered one before any that is missing: those that data whose
        time is up have, so that the next number and the next prompts follow from them when they grow."""
        finished = self.finished()
        found = [finished[number] for number in takewhile(finished.__contains__, count(self.first))]
        while found and found[-1].record is None:
            found.pop()
        return found

    def claim(self, expected: float) -> int | None:
        """Take the first free shard that the data are likely to need; None where there is none.

        Args:
            expected: answer tokens of a shard, as long as none is finished.
        """
        for number in self._wanted(expected):
            if self.locks.take(answers_lock(number)):
                if number not in self.finished():
                    return number
                self.release(number)
        return None

    def _wanted(self, expected: float) -> Iterator[int]:
        """Unfinished shards by number, as far as those before them will probably not reach the budget."""
        finished, total = self.finished(), 0.0
        answered = [one.supervised for one in finished.values() if one.read == self.size]
        each = sum(answered) / len(answered) if answered else expected
        for number in count(self.first):
            one = finished.get(number)
            if self.budget is not None and total >= self.budget:
                return
            if one is None:
                yield number
            elif one.read < self.size:
                return
            total += each if one is None else one.supervised

    def release(self, number: int) -> None:
        """Give a shard back, finished or not."""
        self.locks.drop(answers_lock(number))

    def publish(self, number: int, shard: FinishedShard) -> None:
        """Add a finished shard. Raises UserError if the disk is full."""
        content = json.dumps(asdict(shard), indent=2, sort_keys=True).encode()
        write_bytes(self.folder / f"train-{number:05d}.json", content)
        self._finished[number] = shard

    def idle(self) -> bool:
        """True if no process works on any shard: then all of them are taken, and nobody starts one."""
        return self.locks.take(FIRST, 0)


def prompts_lock(number: int) -> int:
    """Lock of the prompts of a shard."""
    return FIRST + 2 * number


def answers_lock(number: int) -> int:
    """Lock of the answers of a shard."""
    return FIRST + 2 * number + 1


def remove_shards(folder: Path, unwanted: Callable[[str], bool], kept: Set[str] = frozenset()) -> None:
    """Remove unwanted train shards, their states, and what killed processes have left of both.

    Args:
        folder: of the data.
        unwanted: whether a shard is, by the name of its file.
        kept: names of files that stay all the same.
    """
    for file in folder.iterdir():
        found = SHARD_FILE.fullmatch(file.name)
        if found is not None and unwanted(found[1]) and file.name not in kept:
            file.unlink(missing_ok=True)


def clear_queue(folder: Path) -> None:
    """Remove the queue of complete data, shards that do not belong to them, and what killed processes left
    half-written, unless a process still works there or the data have started to grow.

    Raises:
        UserError: if the manifest is damaged.
    """
    if not (folder / LOCKS).exists():
        return
    with closing(FolderLocks(folder / LOCKS)) as locks:
        if locks.take(MERGE, 0) and (manifest := Manifest.load(folder)).complete:
            shutil.rmtree(folder / QUEUE, ignore_errors=True)
            known = {record.file for record in manifest.shards}
            remove_shards(folder, lambda name: name not in known)
            remove_leftovers(folder)
