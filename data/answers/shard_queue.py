"""The queue of train shards: the finished ones, the free ones, where the data end, and the prompts of each.

Finished shards are files of the folder `queue`; a shard in work is a lock, which goes with the process that holds it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count, islice, takewhile
from pathlib import Path

from ...modules import UserError
from ...modules.files.folders import FolderLocks, remove_leftovers
from ...modules.files.json_records import read_record
from ..prompts.prompt import Prompt
from ..prompts.prompt_files import Source
from ..prompts.sources import OwnPrompts, Skipped, Taken
from ..store.feature_shards import StoredFile
from ..store.token_store import Manifest, ShardRecord, write_bytes

QUEUE, LOCKS = "queue", "queue.lock"
"""Folder of the finished shards' records, gone when the data are complete; and the file of the locks, which stays: a
process that has opened it and one that finds it removed would lock two different files."""
MERGE, HELD_OUT, VALIDATION, FIRST = range(4)
"""Locks: of the list of finished shards, of the held-out prompts, of the answers to those of validation, and of the
first shard's prompts; those of its answers, and of the shards after it, follow in turn."""
VALIDATION_PROMPTS = "validation.jsonl"  # The validation prompts; gone when all are answered in complete data
SHARD_FILE = re.compile(r"\.?(?:.+-)?(train-\d{5,}\.safetensors)(?:(?:\.[0-9a-f]{8})?\.partial)?")
"""Name of a train shard, of a file of its states, or of one of them half-written."""
REMEDY = "delete it, the shard is then answered again"


@dataclass(frozen=True, kw_only=True)
class FinishedShard:
    """Result of one number of the queue."""

    read: int  # Prompts read or written for it, before filtering; fewer than a shard has where the source ended
    fresh: int  # Prompts of it that could be used
    repeated: int  # Usable prompts that the data have already
    record: ShardRecord | None  # Its entry in the manifest; None where nothing was answered
    states: dict[str, StoredFile]  # Its files of states
    skipped: tuple[Skipped, ...] = ()  # Rows that were found unusable only now
    cut: bool = False
    """True where the minutes ended before its last prompt was asked: what is read ends at the first such prompt, and
    is read on from there when the data grow."""

    @property
    def supervised(self) -> int:
        """Answer tokens."""
        return 0 if self.record is None else self.record.supervised


class ShardQueue:
    """Numbers of train shards from `first` on, after those that the data had before, each answered by one process at a
    time. A shard has `size` prompts; `budget` answer tokens end them, None is no limit."""

    def __init__(self, folder: Path, locks: FolderLocks, size: int, budget: int | None, first: int = 0) -> None:
        self.folder, self.locks, self.size, self.budget, self.first = folder / QUEUE, locks, size, budget, first
        self._finished: dict[int, FinishedShard] = {}
        self._validation: FinishedShard | None = None

    def finished(self) -> Mapping[int, FinishedShard]:
        """Finished shards by number, those of other processes among them; UserError if the record of one is damaged."""
        for file in self.folder.glob("train-*.json"):
            number = int(file.stem.removeprefix("train-"))
            if number >= self.first and number not in self._finished and (found := _record(file)) is not None:
                self._finished[number] = found
        return self._finished

    def end(self) -> int | None:
        """Number after the last shard, once known: that of the one that reaches the budget or the source's end."""
        finished, total, number = self.finished(), 0, self.first
        while self.budget is None or total < self.budget:
            if number not in finished:
                return None
            if finished[number].read < self.size:
                return None if finished[number].cut else number + 1
            total, number = total + finished[number].supervised, number + 1
        return number

    def unbroken(self) -> list[FinishedShard]:
        """Finished shards from the first one to the last answered one before any that is missing: those that data whose
        time is up have, so that the next number and the next prompts follow from them when they grow."""
        finished = self.finished()
        found = [finished[number] for number in takewhile(finished.__contains__, count(self.first))]
        # Shards without answers at the end would move the first prompt of data that grow, and none of their numbers is
        # in the manifest.
        while found and found[-1].record is None:
            found.pop()
        return found

    def claim(self, expected: float, most: int | None = None) -> int | None:
        """Take the first free shard that the data are likely to need, None where there is none, among the first `most`
        unfinished ones. A shard is expected to have `expected` answer tokens as long as none is finished."""
        # A lock that is free may be of a shard that was finished since the look at the queue.
        for number in islice(self._wanted(expected), most):
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

    def publish(self, number: int | None, shard: FinishedShard) -> None:
        """Add a finished shard; without a number that of validation. Raises UserError if the disk is full."""
        name = "validation-00000" if number is None else f"train-{number:05d}"
        write_bytes(self.folder / f"{name}.json", json.dumps(asdict(shard), indent=2, sort_keys=True).encode())
        if number is not None:
            self._finished[number] = shard

    def validation(self) -> FinishedShard | None:
        """The validation shard, once it is finished. Raises UserError if its record is damaged."""
        self._validation = self._validation or _record(self.folder / "validation-00000.json")
        return self._validation


@dataclass(frozen=True, kw_only=True)
class WrittenPrompts:
    """Usable prompts that the target wrote for one shard, as a file of the queue."""

    read: int  # Number of candidates
    texts: dict[str, str]  # Text of each usable one by its number


class ShardPrompts:
    """Candidates start + (number - first) * size and following, without repetitions, for each shard; those before
    `start` were tried for held-out prompts or earlier shards, which when their minutes were over answered the
    candidates `answered` all the same.

    A prompt belongs to the first shard in which it occurs. Prompts of a file are read by each process; those that the
    target writes become files of the queue, each written by the first process that needs it. `held` are the keys, by
    `asked_key`, of the held-out prompts, whatever their answers; `seen` those of earlier shards' rows, by `key` of
    number and prompt."""

    def __init__(self, source: Source, folder: Path, locks: FolderLocks, *, start: int, size: int,
                 answered: Set[int] = frozenset(), held: Set[int], seen: Set[int], asked_key: Callable[[Prompt], int],
                 key: Callable[[int, Prompt], int], first: int = 0) -> None:
        self.source, self.folder, self.locks, self.start, self.size = source, folder / QUEUE, locks, start, size
        self.first, self.answered, self.held, self.seen = first, answered, held, seen
        self.asked_key, self.key = asked_key, key
        self._keys: dict[int, list[int]] = {}

    def fresh(self, number: int, end: int | None = None) -> Taken:
        """Candidates of a shard, or those of them before the number `end`, that no earlier shard and no held-out prompt
        has. UserError if the source cannot be read, a file of the queue is damaged, or the disk is full."""
        if isinstance(self.source, OwnPrompts):
            # Its own first: while it waits for those of earlier shards, it would write nothing.
            self._candidates(number)
        seen = set(self.seen)
        for earlier in range(self.first, number):
            if earlier not in self._keys:
                self._candidates(earlier)
            seen.update(self._keys[earlier])
        taken, found = self._candidates(number, end), []
        for one, key in zip(taken.prompts, self._keys[number], strict=True):
            if key not in seen and self.asked_key(one[1]) not in self.held:
                seen.add(key)
                found.append(one)
        return replace(taken, prompts=found, repeated=len(taken.prompts) - len(found))

    def _candidates(self, number: int, end: int | None = None) -> Taken:
        """Candidates of a shard up to an end; those that the target writes come from their file."""
        start = self.start + (number - self.first) * self.size
        size = self.size if end is None else end - start
        if not isinstance(self.source, OwnPrompts):
            taken = self.source.take(start, size)
        else:
            file = self.folder / f"prompts-{number:05d}.json"
            if not file.is_file():
                with self.locks.holding(FIRST + 2 * number):
                    # Another process may have written them while this one waited.
                    if not file.is_file():
                        new = self.source.take(start, self.size)
                        texts = {str(place): prompt.question for place, prompt in new.prompts}
                        content = json.dumps(asdict(WrittenPrompts(read=new.read, texts=texts)), ensure_ascii=False)
                        write_bytes(file, content.encode())
            written = read_record(WrittenPrompts, file, "delete it, the prompts are then written again")
            prompts = [(int(place), Prompt.from_turns(text, id=place, category="own"))
                       for place, text in written.texts.items() if int(place) < start + size]
            taken = Taken(prompts=sorted(prompts, key=lambda one: one[0]), read=min(written.read, size))
        taken = replace(taken, prompts=[one for one in taken.prompts if one[0] not in self.answered])
        self._keys[number] = [self.key(*one) for one in taken.prompts]
        return taken


def _record(file: Path) -> FinishedShard | None:
    """The record of a finished shard; None where it is not finished, or another process has cleared the queue."""
    try:
        return read_record(FinishedShard, file, REMEDY)
    except UserError:
        if file.exists():
            raise
        return None


def remove_cut(folder: Path, every: bool) -> None:
    """Remove the records of shards that the end of the minutes cut, which are then answered anew; or those of every
    shard and its prompts, where complete data grow from another prompt on."""
    for file in (folder / QUEUE).glob("*-*.json"):
        if every or (not file.name.startswith("prompts-") and read_record(FinishedShard, file, REMEDY).cut):
            file.unlink()


def answers_lock(number: int) -> int:
    """Lock of the answers of a shard."""
    return FIRST + 2 * number + 1


def remove_shards(folder: Path, unwanted: Callable[[str], bool], kept: Set[str] = frozenset()) -> None:
    """Remove train shards that are unwanted by the names of their files, their states, and what killed processes have
    left of both, but for the files `kept`."""
    for file in folder.iterdir():
        found = SHARD_FILE.fullmatch(file.name)
        if found is not None and unwanted(found[1]) and file.name not in kept:
            file.unlink(missing_ok=True)


def clear_queue(folder: Path) -> None:
    """Remove the queue of complete data, shards that do not belong to them, and what killed processes left
    half-written, unless a process still works there or the data have started to grow. UserError if the manifest is
    damaged."""
    if not (folder / LOCKS).exists():
        return
    with closing(FolderLocks(folder / LOCKS)) as locks:
        if locks.take(MERGE, 0) and (manifest := Manifest.load(folder)).complete:
            shutil.rmtree(folder / QUEUE, ignore_errors=True)
            if manifest.total("validation", "prompts") >= manifest.recipe["distill"]["validation_prompts"]:
                (folder / VALIDATION_PROMPTS).unlink(missing_ok=True)
            known = {record.file for record in manifest.shards}
            remove_shards(folder, lambda name: name not in known)
            remove_leftovers(folder)
