"""Prompts of the shards of a queue: those of each are found without the answers of any other."""

import json
from collections.abc import Set
from dataclasses import asdict, dataclass
from pathlib import Path

from ...modules.files.json_records import read_record
from ..prompts.self_prompting import OwnPrompts
from ..prompts.sources import Prompt, Source, Taken
from ..store.token_store import write_bytes
from .folder_locks import FolderLocks
from .shard_queue import QUEUE, prompts_lock

REMEDY = "delete it, the prompts are then written again"


@dataclass(frozen=True, kw_only=True)
class WrittenPrompts:
    """Usable prompts that the target wrote for one shard, as a file of the queue."""

    read: int
    """Number of candidates."""
    texts: dict[str, tuple[str, ...]]
    """User turns of each usable one by its number."""

    def taken(self) -> Taken:
        """The same as candidates."""
        prompts = [(int(number), Prompt(turns=turns, id=number, category="own"))
                   for number, turns in self.texts.items()]
        return Taken(prompts=sorted(prompts, key=lambda one: one[0]), read=self.read)


class QueuedPrompts:
    """Candidates start + (number - first) * size and following, without repetitions.

    A prompt belongs to the first shard in which it occurs. Prompts of a file are read by each process; those that the
    target writes become files of the queue, each written by the first process that needs it.

    Args:
        source: of candidates.
        folder: of the data.
        locks: of that folder.
        start: number of the first candidate that was not tried, for the held-out prompts or earlier shards.
        size: candidates of a shard.
        held: keys of the prompts that were tried.
        first: number of the queue's first shard.
    """

    def __init__(self, source: Source, folder: Path, locks: FolderLocks, *, start: int, size: int,
                 held: Set[int], first: int = 0) -> None:
        self.source, self.folder, self.locks = source, folder / QUEUE, locks
        self.start, self.size, self.held, self.first = start, size, held, first
        self._keys: dict[int, list[int]] = {}

    def fresh(self, number: int) -> Taken:
        """Candidates of a shard that no earlier shard and no held-out prompt has.

        Raises:
            UserError: if the source cannot be read, a file of the queue is damaged, or the disk is full.
        """
        if isinstance(self.source, OwnPrompts):
            # Its own first: while it waits for those of earlier shards, it would write nothing.
            self._candidates(number)
        seen = set(self.held)
        for earlier in range(self.first, number):
            if earlier not in self._keys:
                self._candidates(earlier)
            seen.update(self._keys[earlier])
        taken, found = self._candidates(number), []
        for place, prompt in taken.prompts:
            if prompt.key not in seen:
                seen.add(prompt.key)
                found.append((place, prompt))
        return Taken(prompts=found, read=taken.read)

    def _candidates(self, number: int) -> Taken:
        taken = self._written(number) if isinstance(self.source, OwnPrompts) else self._take(number)
        self._keys[number] = [prompt.key for _, prompt in taken.prompts]
        return taken

    def _take(self, number: int) -> Taken:
        return self.source.take(self.start + (number - self.first) * self.size, self.size)

    def _written(self, number: int) -> Taken:
        """Candidates that the target writes, from their file."""
        file = self.folder / f"prompts-{number:05d}.json"
        if not file.is_file():
            with self.locks.holding(prompts_lock(number)):
                if not file.is_file():
                    taken = self._take(number)
                    texts = {str(place): prompt.turns for place, prompt in taken.prompts}
                    content = json.dumps(asdict(WrittenPrompts(read=taken.read, texts=texts)), ensure_ascii=False)
                    write_bytes(file, content.encode())
        return read_record(WrittenPrompts, file, REMEDY).taken()
