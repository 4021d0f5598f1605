"""Distillation by several processes: each takes shards from one queue in the folder of the data.

A shard is a pure function of the recipe and its number: its prompts are found without the answers of other shards, it
has a fixed size, and the token budget counts whole shards in the order of their numbers. So the data have the same
bytes whatever the number of processes and whichever of them end early. A process that dies costs the shard that it was
answering, which another takes over.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...modules import Target, UserError
from ...modules.files.json_records import read_record
from ..prompts.chat import ChatTemplate
from ..prompts.sources import PromptConfig
from ..store.feature_shards import StoredFile, state_file
from ..store.feature_store import WantedStates
from ..store.shard_states import ShardStates
from ..store.token_store import MANIFEST, Manifest, write_bytes
from .answered_shards import shard_file, shard_number, shard_of, states_of
from .distill import BARREN_CANDIDATES, Distillation, barren_error, nothing_supervised
from .distill_config import DistillConfig
from .distill_stats import added, read_stats, write_stats
from .folder_locks import FolderLocks
from .queued_prompts import QueuedPrompts
from .shard_queue import HELD_OUT, LOCKS, MERGE, QUEUE, FinishedShard, ShardQueue, clear_queue, remove_shards
from .writers import Writer

POLL_SECONDS = 0.5
"""Time between two looks at the queue while other processes answer the last shards."""
CHECK_SECONDS = 2.0
"""Time between two looks, while answering, whether the data are complete without this shard."""


STATES = "states.json"
"""File of the queue with the states that all processes store."""


@dataclass(frozen=True, kw_only=True)
class AgreedStates:
    """Content of the file of states."""

    wanted: tuple[WantedStates, ...]
    """Those of each training."""


class MergedError(Exception):
    """The data are complete without the shard that this process is answering."""


def distill_from_queue(
    target: Target,
    prompts: PromptConfig,
    config: DistillConfig,
    template: ChatTemplate,
    out: str | Path,
    *,
    train_target: Target | None = None,
    writer: Writer | None = None,
    states: Sequence[WantedStates] = (),
    progress: bool = True,
    grow: bool = True,
) -> Manifest:
    """Work on a folder of token shards, with every other process that does, until it is complete.

    The other arguments and the result are those of `distill`. With `config.budget_minutes` no shard is started after
    them; how much that is depends on the machines.

    Args:
        grow: add answers to complete data of lower limits; False where another process uses them, and they are refused.

    Raises:
        UserError: as `distill` does; also if the file system has no locks.
    """
    if config.workers is None:
        raise ValueError("distill.workers is None, which is one process alone: call distill")
    given = target, prompts, config, template, Path(out)
    return QueuedDistillation(*given, train_target=train_target or target, writer=writer, states=states,
                              progress=progress, grow=grow).run()


class QueuedDistillation(Distillation):
    """One process's part in the work on a folder."""

    locks: FolderLocks
    queued: QueuedPrompts

    def __init__(self, *args: Any, grow: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.grow = grow
        self.queue: ShardQueue | None = None
        """None until prompts are held out."""
        self.counted: dict[str, float] = {}
        """Amounts of this process that stats.json holds already."""
        self.number = 0
        """The shard that is being answered."""
        self.mine: set[int] = set()
        """Shards that this process has finished, which its progress counted answer by answer."""
        self.others: dict[str, int] = {}
        """Answer tokens and prompts of the other finished shards, as far as its progress has counted them."""
        self.checked = time.monotonic()

    def _finish(self) -> Manifest:
        with closing(FolderLocks(self.out / LOCKS)) as self.locks:
            with self.locks.holding(HELD_OUT):
                # The time that another process needed for them is in its measurements.
                self.started = time.monotonic()
                if (self.out / MANIFEST).exists():
                    self._resume()
                if not self.manifest.complete:
                    self._agree_on_states()
                    self._try_engine()
                if self.manifest.held_out is None:
                    self._write_stats()
                    self._hold_out()
            self._work(self._new_queue())
        clear_queue(self.out)
        return self.manifest

    def _agree_on_states(self) -> None:
        """Store the states that the first process on this folder was asked for, whatever this one was."""
        file = self.out / QUEUE / STATES
        if file.is_file():
            wanted = read_record(AgreedStates, file, "delete it, and the other processes' settings count").wanted
            self.states = ShardStates(self.target, self.out, wanted)
        else:
            write_bytes(file, json.dumps(asdict(AgreedStates(wanted=self.states.wanted))).encode())

    def _new_queue(self) -> ShardQueue:
        """Queue of the train shards after those in the manifest, up to the answer tokens that these lack."""
        last = max((shard_number(record.file) for record in self.manifest.split("train")), default=-1)
        budget = self.config.budget_tokens
        left = None if budget is None else budget - self.manifest.total("train", "supervised")
        return ShardQueue(self.out, self.locks, self.config.shard_prompts, left, first=last + 1)

    def _work(self, queue: ShardQueue) -> None:
        """Answer shards until the data are complete."""
        self.queue = queue
        self.queued = QueuedPrompts(self.source, self.out, self.locks, start=self.manifest.candidates,
                                    size=queue.size, held=self.seen, first=queue.first)
        if not self.manifest.complete:
            with self.progress.stage(*self._goal()), self._threads(queue):
                while not self._merged():
                    self._take_part(queue)
            if self.progress.shown:
                self._report()

    def _threads(self, queue: ShardQueue) -> AbstractContextManager[None]:
        """Context of the threads that answer: one, or all where the prompts left make one shard, for one process."""
        left = None if self.source.total is None else self.source.total - self.manifest.candidates
        return nullcontext() if left is not None and left <= queue.size else one_thread()

    # Work ------------------------------------------------------------------------------------------------------------

    def _take_part(self, queue: ShardQueue) -> None:
        """Complete the data, answer a shard, or wait for other processes."""
        if (end := queue.end()) is not None:
            self._merge([queue.finished()[number] for number in range(queue.first, end)])
        elif self._late():
            if queue.idle():
                self._merge(queue.unbroken())
            else:
                time.sleep(POLL_SECONDS)
        elif (number := self._claim(queue)) is None:
            time.sleep(POLL_SECONDS)
        else:
            try:
                self._make(queue, number)
            except MergedError:
                # What it has written for this shard is in nobody's way.
                remove_shards(self.out, lambda name: name == shard_file("train", number))
            finally:
                queue.release(number)

    def _claim(self, queue: ShardQueue) -> int | None:
        """The next shard of this process; None while others answer all that are needed.

        Raises:
            UserError: if the target writes no usable prompt.
        """
        if self.own:
            self._refuse_barren(queue)
        return queue.claim(float(self.config.max_new_tokens * self.config.shard_prompts))

    def _refuse_barren(self, queue: ShardQueue) -> None:
        barren = 0
        for _, one in sorted(queue.finished().items()):
            barren = 0 if one.fresh else barren + one.read
        if barren >= BARREN_CANDIDATES:
            raise barren_error(barren, self.prompts)

    def _make(self, queue: ShardQueue, number: int) -> None:
        """Answer one shard, write it and its states, and add it to the finished ones."""
        self.number = number
        taken = self.queued.fresh(number)
        fresh = [(place, prompt) for place, prompt in taken.prompts if self._fits(prompt)]
        conversations = self._converse(fresh)
        if fresh and not conversations and self._late():
            return
        finished, written = FinishedShard(read=taken.read, fresh=len(fresh), record=None, states={}), set[str]()
        if conversations:
            keys = [prompt.key for _, prompt in fresh]
            shard, record, data = shard_of("train", number, conversations, keys, taken.read)
            write_bytes(self.out / record.file, data)
            files = self.states.write(self._tokens(), record, shard, states_of(conversations))
            finished, written = replace(finished, record=record, states=files), {record.file, *files}
        with self.locks.holding(MERGE):
            if self._merged():
                raise MergedError
            # A killed process may have left other files of it.
            remove_shards(self.out, lambda name: name == shard_file("train", number), written)
            queue.publish(number, finished)
            self.mine.add(number)
            self._write_stats()
        self.progress.advance("prompt", taken.read)

    def _tokens(self) -> int:
        """Fewest tokens of the shards before the one being answered: those that are finished."""
        before = super()._tokens()
        if self.queue is None:
            return before
        return before + sum(one.tokens for number, one in self.queue.finished().items() if number < self.number)

    def _count(self, tokens: int) -> None:
        super()._count(tokens)
        if self.queue is not None and time.monotonic() - self.checked > CHECK_SECONDS:
            self.checked = time.monotonic()
            self._count_others(self.queue)
            if self._merged():
                raise MergedError

    def _count_others(self, queue: ShardQueue) -> None:
        """Count the shards that other processes have finished since the last call."""
        found = self._sums([one for number, one in queue.finished().items() if number not in self.mine])
        for unit, amount in found.items():
            self.progress.advance(unit, amount - self.others.get(unit, 0))
        self.others = found

    # The data --------------------------------------------------------------------------------------------------------

    def _asks_for_more(self, found: Manifest) -> bool:
        return self.grow and super()._asks_for_more(found)

    def _merged(self) -> bool:
        """True once the manifest of the complete data is there.

        Raises:
            UserError: if another process has since let them grow by a higher limit.
        """
        if not self.manifest.complete:
            found = Manifest.load(self.out)
            if found.recipe != self.manifest.recipe:
                raise UserError(f"the limits of the data in {self.out} were raised while this process answered; start "
                                "it again with the same ones, or choose another --out")
            self.manifest = found
        return self.manifest.complete

    def _merge(self, ordered: Sequence[FinishedShard]) -> None:
        """Write the manifest of these shards, which follow those that it has.

        Raises:
            UserError: as `_merged` does; if the data hold no answer, or the disk is full.
        """
        with self.locks.holding(MERGE):
            if self._merged():
                return
            records = [one.record for one in ordered if one.record is not None]
            manifest = replace(self.manifest, shards=(*self.manifest.shards, *records), complete=True,
                               candidates=self.manifest.candidates + sum(one.read for one in ordered))
            if manifest.total("train", "supervised") == 0:
                raise nothing_supervised(self.out, manifest.candidates)
            self.states.add(self._kept_states(ordered))
            # Whether more minutes remain is read from them.
            self._write_stats()
            manifest.save(self.out)
            self.manifest = manifest

    def _kept_states(self, ordered: Sequence[FinishedShard]) -> dict[str, StoredFile]:
        """The files of states that have room next to those before them; the others are removed."""
        kept, tokens = dict[str, StoredFile](), Distillation._tokens(self)
        for one in ordered:
            tokens += one.tokens
            fitting = self.states.fitting(tokens)
            for file, stored in one.states.items():
                if one.record is not None and file in {state_file(one.record, name) for name in fitting}:
                    kept[file] = stored
                else:
                    (self.out / file).unlink(missing_ok=True)
        return kept

    # Counts ----------------------------------------------------------------------------------------------------------

    def _goal(self) -> tuple[str, float | None, str, float]:
        title, total, unit, done = super()._goal()
        self.others = {} if self.queue is None else self._sums(list(self.queue.finished().values()))
        return title, total, unit, done + self.others.get(unit, 0)

    @staticmethod
    def _sums(shards: Sequence[FinishedShard]) -> dict[str, int]:
        """Answer tokens and prompts of these shards, by the units of the progress."""
        return {"tok": sum(one.supervised for one in shards), "prompt": sum(one.read for one in shards)}

    def _write_stats(self) -> None:
        """Add this process's measurements to those of the others."""
        amounts, stored = self._amounts(), read_stats(self.out)
        new = {name: value - self.counted.get(name, 0.0) for name, value in amounts.items()}
        write_stats(self.out, added(stored, new), max(self._seconds(), stored.get("seconds", 0.0)))
        self.counted = amounts


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch computes with one thread: as many as there are may add up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
