"""Answers to the train prompts of a folder, shard by shard, by one process among any number."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import eq

from ...modules import DecodeStats, UserError
from ...modules.files.folder_locks import FolderLocks
from ..prompts.self_prompting import OwnPrompts, Source
from ..prompts.sources import ReadPrompts
from ..store.shard_states import ShardStates
from ..store.token_store import ShardRecord, shard_file, write_bytes
from .answering import shard_of, states_of
from .data_folder import DataFolder
from .distill_task import DistillTask
from .progress import Progress
from .row_writers import RowWriters
from .shard_queue import FIRST, MERGE, FinishedShard, ShardPrompts, ShardQueue, remove_shards

POLL_SECONDS = 0.5
"""Time between two looks at the queue while other processes answer the last shards."""
CHECK_SECONDS = 2.0
"""Time between two looks, while answering, whether the data are complete without this shard."""
BARREN_CANDIDATES = 256
"""Prompts written by the target without a usable one among them after which the run stops."""


class MergedError(Exception):
    """The data are complete without the shard that this process is answering."""


class ShardAnswering:
    """One process's part in the train shards of a folder.

    Args:
        task: the distillation.
        source: of candidates for prompts.
        folder: of the data.
        progress: counts prompts and answer tokens, those of other processes too.

    Raises:
        UserError: if an engine does not take the target.
    """

    def __init__(self, task: DistillTask, source: Source, folder: DataFolder, progress: Progress) -> None:
        self.task, self.source, self.folder, self.progress = task, source, folder, progress
        self.writers = RowWriters(task, self._count, progress.count_slots)
        self.queue: ShardQueue | None = None
        """None until prompts are held out."""
        self.mine: set[int] = set()
        """Shards that this process has finished, which its progress counted answer by answer."""
        self.others: dict[str, int] = {}
        """Answer tokens and prompts of the other finished shards, as far as the progress has counted them."""
        self.checked = time.monotonic()

    def work(self, locks: FolderLocks, states: ShardStates) -> None:
        """Answer shards until the data are complete.

        Raises:
            UserError: if the data hold no answer, a record of the queue is damaged, the limits were raised meanwhile,
                the target writes no usable prompt, or the disk is full.
        """
        manifest, config = self.folder.manifest, self.task.config
        budget, done = config.budget_tokens, manifest.total("train", "supervised")
        first = max((record.number for record in manifest.split("train")), default=-1) + 1
        queue = self.queue = ShardQueue(self.folder.out, locks, config.shard_prompts,
                                        None if budget is None else budget - done, first)
        prompts = ShardPrompts(self.source, self.folder.out, locks, start=manifest.candidates, size=queue.size,
                               held=self.folder.held, seen=self.folder.seen, asked_key=self.task.asked_key,
                               key=self.task.key, first=first)
        finished = list(queue.finished().values())
        self.others = _sums(finished)
        goal: tuple[str, float | None, str, float]
        if budget is not None:
            goal = "answers", budget, "tok", done + self.others["tok"]
        elif config.budget_minutes is not None:
            goal = "answers", 60 * config.budget_minutes, "s", self.folder.seconds
        else:
            goal = "answers", self.source.total, "prompt", manifest.candidates + self.others["prompt"]
        with self.progress.stage(*goal):
            while not self.folder.is_complete():
                if (end := queue.end()) is not None:
                    self._merge(locks, states, [queue.finished()[number] for number in range(first, end)])
                elif self.folder.late and locks.take(FIRST, 0):
                    # No process works on a shard, and with all their locks here nobody starts one.
                    self._merge(locks, states, queue.unbroken())
                elif self.folder.late or (number := self._claimed(queue)) is None:
                    time.sleep(POLL_SECONDS)
                else:
                    try:
                        self._make(number, queue, prompts, locks, states)
                    except MergedError:
                        # What it has written for this shard is in nobody's way.
                        remove_shards(self.folder.out, partial(eq, shard_file("train", number)))
                    finally:
                        queue.release(number)

    def _claimed(self, queue: ShardQueue) -> int | None:
        """The next shard of this process; None while others answer all that are needed."""
        config, barren = self.task.config, 0
        if isinstance(self.source, OwnPrompts):
            for _, one in sorted(queue.finished().items()):
                barren = 0 if one.fresh else barren + one.read
            if barren >= BARREN_CANDIDATES:
                raise UserError(
                    f"none of {barren} prompts that the target wrote can be used; raise prompts.own_max_tokens "
                    f"({self.task.prompts.own_max_tokens}), or give prompts in a file (prompts.origin: file)")
        return queue.claim(float(config.max_new_tokens * config.shard_prompts))

    def _make(self, number: int, queue: ShardQueue, prompts: ShardPrompts, locks: FolderLocks, states: ShardStates
              ) -> None:
        """Answer one shard, write it and its states, and add it to the finished ones."""
        out, taken = self.folder.out, prompts.fresh(number)
        fresh = taken.prompts
        if taken.skipped and isinstance(self.source, ReadPrompts):
            # Rows of a dataset that was too long to be looked at as a whole.
            others = queue.finished().values()
            self.source.require_few([one for shard in others for one in shard.skipped] + [*taken.skipped],
                                    self.folder.manifest.candidates + sum(one.read for one in others) + taken.read)
        conversations = self.writers.conversations(fresh, self.folder.deadline, states.taps)
        if fresh and not conversations and self.folder.late:
            # The time ran out before the first answer: these prompts were not tried.
            return
        record: ShardRecord | None = None
        files = {}
        if conversations:
            keys = [self.task.key(*one) for one in fresh]
            shard, record, data = shard_of("train", number, conversations, keys, taken.read)
            write_bytes(out / record.file, data)
            files = states.write(record, shard, states_of(conversations))
        with locks.holding(MERGE):
            if self.folder.is_complete():
                raise MergedError
            # A killed process may have left other files of it.
            written = set() if record is None else {record.file, *files}
            remove_shards(out, partial(eq, shard_file("train", number)), written)
            queue.publish(number, FinishedShard(read=taken.read, fresh=len(fresh), repeated=taken.repeated,
                                                record=record, states=files, skipped=taken.skipped))
            self.mine.add(number)
            self.folder.write_stats(self.amounts(states))
        self.progress.advance("prompt", taken.read)

    def _merge(self, locks: FolderLocks, states: ShardStates, ordered: Sequence[FinishedShard]) -> None:
        """Complete the data with these shards, which follow those of the manifest."""
        with locks.holding(MERGE):
            if self.folder.is_complete():
                return
            before = self.folder.manifest
            records = [one.record for one in ordered if one.record is not None]
            manifest = replace(before, shards=(*before.shards, *records), complete=True,
                               candidates=before.candidates + sum(one.read for one in ordered),
                               repeated=before.repeated + sum(one.repeated for one in ordered),
                               skipped=self.folder.list_skipped([row for one in ordered for row in one.skipped]))
            if manifest.total("train", "supervised") == 0:
                minutes = self.folder.config.budget_minutes
                if self.folder.late and not records:
                    raise UserError(
                        f"no train token would be supervised in {self.folder.out}: distill.budget_minutes {minutes:g} "
                        f"were over (after {round(self.folder.seconds / 60, 2):g}) before a train prompt was answered, "
                        "since held-out prompts and their answers come first, and prompts that the target writes "
                        "before theirs; start again with a larger distill.budget_minutes, and this folder goes on, or "
                        "lower distill.validation_prompts")
                raise UserError(
                    f"no train token would be supervised in {self.folder.out}: after {manifest.candidates} prompts, "
                    "held-out ones included, there is no answer with a token; give more prompts or a larger budget")
            states.add({file: stored for one in ordered for file, stored in one.states.items()})
            # Whether more minutes remain is read from them.
            self.folder.write_stats(self.amounts(states))
            self.folder.save(manifest)

    def _count(self, tokens: int) -> None:
        """Count answer tokens, and from time to time what the other processes have done."""
        self.progress.advance("tok", tokens)
        if self.queue is not None and time.monotonic() - self.checked > CHECK_SECONDS:
            self.checked = time.monotonic()
            self.count_others(self.queue)
            if self.folder.is_complete():
                raise MergedError

    def count_others(self, queue: ShardQueue) -> None:
        """Count the shards that other processes have finished since the last call."""
        found = _sums([one for number, one in queue.finished().items() if number not in self.mine])
        for unit, amount in found.items():
            self.progress.advance(unit, amount - self.others.get(unit, 0))
        self.others = found

    def amounts(self, states: ShardStates) -> dict[str, float]:
        """Sums of this process, by part of the work."""
        parts: dict[str, DecodeStats] = {"answers": self.writers.target.stats}
        if self.task.writer is not None:
            parts["drafts"] = self.writers.draft.stats
        if isinstance(self.source, OwnPrompts):
            parts["prompts"] = self.source.stats
        sums = {f"{part}_{name}": value for part, stats in parts.items() for name, value in stats.amounts().items()}
        return {**sums, "states_seconds": states.seconds}


def _sums(shards: Sequence[FinishedShard]) -> dict[str, int]:
    """Answer tokens and prompts of these shards, by the units of the progress."""
    records = [one.record for one in shards if one.record is not None]
    return {"tok": sum(record.supervised for record in records), "prompt": sum(one.read for one in shards)}
