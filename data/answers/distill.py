"""Distillation: the target answers prompts, and the answers are stored as shards of training tokens.

Every run takes its shards from a queue in the folder of the data, alone or with other processes. A shard is a pure
function of the recipe and its number: its prompts are found without the answers of other shards, it has a fixed size,
each answer has its own stream of random numbers, and the token budget counts whole shards in the order of their
numbers. So the data have the same bytes whatever the number of processes and whichever of them end early; one that dies
costs the shard that it was answering. Where a training will read the target's states, they are stored with the shard
(`ShardStates`)."""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import eq
from pathlib import Path

from ...modules import DecodeStats, Target, UserError
from ...modules.files.folders import FolderLocks
from ..prompts.chat import ChatTemplate
from ..prompts.prompt_files import ReadPrompts, Source
from ..prompts.sources import OwnPrompts, PromptConfig
from ..store.feature_store import ShardStates, WantedStates
from ..store.token_store import Manifest, ShardRecord, shard_file, write_bytes
from .answer_server import ServerAnswerer
from .answering import Writer, shard_of, states_of
from .data_folder import DataFolder, Progress, answer_validation, read_stats, set_aside
from .distill_task import DistillConfig, DistillTask, RowWriters
from .shard_queue import (
    FIRST,
    HELD_OUT,
    LOCKS,
    MERGE,
    VALIDATION,
    FinishedShard,
    ShardPrompts,
    ShardQueue,
    clear_queue,
    remove_shards,
)

POLL_SECONDS = 0.5  # Time between two looks at the queue while other processes answer the last shards
CHECK_SECONDS = 2.0  # Time between two looks, while answering, whether the data are complete without this shard
BARREN_CANDIDATES = 256  # Prompts written by the target without a usable one among them after which the run stops


class NeedlessError(Exception):
    """The data are, or will be, complete without the shard that this process is making."""


class ShardAnswering:
    """One process's part in the train shards of a folder; the progress counts the work of other processes too.
    UserError if an engine does not take the target."""

    def __init__(self, task: DistillTask, source: Source, folder: DataFolder, progress: Progress) -> None:
        self.task, self.source, self.folder, self.progress = task, source, folder, progress
        self.writers = RowWriters(task, self._count, progress.count_slots)
        self.queue: ShardQueue | None = None  # None until prompts are held out
        self.mine: set[int] = set()  # Shards that this process has finished, whose answers its progress counted
        self.others: dict[str, int] = {}  # Answer tokens and prompts of the other finished shards, as far as counted
        self.checked = time.monotonic()

    def work(self, locks: FolderLocks, states: ShardStates) -> None:
        """Answer shards until the data are complete. UserError if no prompt gives an answer, a record of the queue is
        damaged, the limits were raised meanwhile, the target writes no usable prompt, or the disk is full."""
        manifest, config = self.folder.manifest, self.task.config
        budget, done = config.budget_tokens, manifest.total("train", "supervised")
        first = max((record.number for record in manifest.split("train")), default=-1) + 1
        queue = self.queue = ShardQueue(self.folder.out, locks, config.shard_prompts,
                                        None if budget is None else budget - done, first)
        prompts = ShardPrompts(self.source, self.folder.out, locks, start=manifest.candidates, size=queue.size,
                               answered=self.folder.answered, held=self.folder.held, seen=self.folder.seen,
                               asked_key=self.task.asked_key, key=self.task.key, first=first)
        finished = list(queue.finished().values())
        self.others = _sums(finished)
        goal: tuple[float | None, str, float] = budget, "tok", done + self.others["tok"]
        if budget is None and config.budget_minutes is None:
            goal = self.source.total, "prompt", manifest.candidates + self.others["prompt"]
        if isinstance(self.source, OwnPrompts):
            self.source.watch = partial(self._watch, queue)
        with self.progress.stage("answers", *goal):
            while not self.folder.is_complete():
                validated = self._validated(queue)
                if validated and (end := queue.end()) is not None:
                    self._merge(queue, locks, states, [queue.finished()[number] for number in range(first, end)])
                elif validated and self._over(queue) and locks.take(FIRST, 0):
                    # No process works on a shard, and with all their locks here nobody starts one.
                    self._merge(queue, locks, states, queue.unbroken())
                # Train answers first: their pace says how many validation prompts fit.
                elif queue.finished() and self._validate(queue, locks, states):
                    pass
                elif (number := self._claimed(queue)) is not None:
                    try:
                        self._make(number, queue, prompts, locks, states)
                    except NeedlessError:
                        # What it has written for this shard is in nobody's way.
                        remove_shards(self.folder.out, partial(eq, shard_file("train", number)))
                    finally:
                        queue.release(number)
                elif not self._validate(queue, locks, states):
                    time.sleep(POLL_SECONDS)
            self.progress.settle("tok", self.folder.manifest.total("train", "supervised"))

    def _fed(self, queue: ShardQueue) -> bool:
        """True once there is text to train on."""
        return (self.folder.manifest.total("train", "supervised") > 0
                or any(one.supervised for one in queue.unbroken()))

    def _over(self, queue: ShardQueue) -> bool:
        """True once the minutes are over for this process or another one, which text to train on is waited for."""
        return (self.folder.late or any(one.cut for one in queue.finished().values())) and self._fed(queue)

    def _validated(self, queue: ShardQueue) -> bool:
        """True once the validation prompts are answered."""
        return (not self.task.config.validation_prompts or bool(self.folder.manifest.split("validation"))
                or queue.validation() is not None)

    def _validate(self, queue: ShardQueue, locks: FolderLocks, states: ShardStates) -> bool:
        """Answer the validation prompts, if nobody has and nobody is about to."""
        if self._validated(queue) or not locks.take(VALIDATION):
            return False
        try:
            # Another process may have done so, and completed the data, since the look at the queue.
            if not self.folder.is_complete() and not self._validated(queue):
                with locks.holding(MERGE):
                    # Seconds that a conversation of the target took so far, in all processes; 0 where nobody knows.
                    records = [*self.folder.manifest.split("train"),
                               *(one.record for one in queue.finished().values() if one.record is not None)]
                    answered = sum(one.prompts * one.by_target / max(1, one.rows) for one in records)
                    each = read_stats(self.folder.out).get("answers_seconds", 0.0) / answered if answered else 0.0
                shard, stats = answer_validation(self.task, self.folder, states, each, lambda _: self._count(0))
                self.writers.target.stats.add(stats)
                with locks.holding(MERGE):
                    queue.publish(None, shard)
                    self.folder.write_stats(self.amounts(states))
        finally:
            locks.drop(VALIDATION)
        return True

    def _claimed(self, queue: ShardQueue) -> int | None:
        """The next shard of this process; None while others answer all that are needed."""
        config, barren = self.task.config, 0
        if self._over(queue):
            return None
        if isinstance(self.source, OwnPrompts):
            for _, one in sorted(queue.finished().items()):
                barren = 0 if one.fresh else barren + one.read
            if barren >= BARREN_CANDIDATES:
                raise UserError(
                    f"none of {barren} prompts that the target wrote can be used; raise prompts.own_max_tokens "
                    f"({self.task.prompts.own_max_tokens}), or give prompts in a file (prompts.origin: file)")
        # When the minutes are over, the first text is all that is waited for.
        return queue.claim(float(config.max_new_tokens * config.shard_prompts), 1 if self.folder.late else None)

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
        # A least share, whatever the time: without train text no later stage could go on.
        first = [] if self._fed(queue) else fresh[: self.task.config.slots]
        conversations = self.writers.conversations(fresh, self.folder.deadline, states.taps, {one for one, _ in first})
        answered = {one.number for one in conversations}
        left = [place for place, _ in fresh if place not in answered] if self.folder.late else []
        if left and not answered:
            return
        if left:
            # What was not asked when the time ran out is asked when the data grow.
            taken = prompts.fresh(number, left[0])
        record: ShardRecord | None = None
        files = {}
        if conversations:
            keys = [self.task.key(*one) for one in fresh if one[0] in answered]
            shard, record, data = shard_of("train", number, conversations, keys, taken.read)
            write_bytes(out / record.file, data)
            files = states.write(record, shard, states_of(conversations))
        with locks.holding(MERGE):
            if self.folder.is_complete():
                raise NeedlessError
            # A killed process may have left other files of it.
            written = set() if record is None else {record.file, *files}
            remove_shards(out, partial(eq, shard_file("train", number)), written)
            queue.publish(number, FinishedShard(read=taken.read, fresh=len(fresh), repeated=taken.repeated,
                                                record=record, states=files, skipped=taken.skipped, cut=bool(left)))
            self.mine.add(number)
            self.folder.write_stats(self.amounts(states))
        self.progress.advance("prompt", taken.read)

    def _merge(self, queue: ShardQueue, locks: FolderLocks, states: ShardStates, ordered: Sequence[FinishedShard]
               ) -> None:
        """Complete the data with these shards, which follow those of the manifest."""
        with locks.holding(MERGE):
            if self.folder.is_complete():
                return
            before = self.folder.manifest
            # Prompts from the first one that was not asked on are read, and counted, when the data grow.
            read = ordered[: next((place for place, one in enumerate(ordered, 1) if one.cut), None)]
            # Data that grow have the validation shard.
            if not before.split("validation") and (validation := queue.validation()) is not None:
                ordered = [validation, *ordered]
            records = [one.record for one in ordered if one.record is not None]
            manifest = replace(before, shards=(*before.shards, *records), complete=True,
                               candidates=before.candidates + sum(one.read for one in read),
                               repeated=before.repeated + sum(one.repeated for one in read),
                               skipped=self.folder.list_skipped([row for one in read for row in one.skipped]))
            if manifest.total("train", "supervised") == 0:
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
            if self.task.config.budget_minutes is not None:
                # A process that joins goes on from the time that is spent.
                with self.queue.locks.holding(MERGE):
                    self.folder.write_stats()
            if self.folder.is_complete():
                raise NeedlessError

    def _watch(self, queue: ShardQueue) -> None:
        """Look at the other processes and at the time while prompts are written."""
        self._count(0)
        if self._over(queue):
            raise NeedlessError

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


TRUNCATED_SHARE = 0.3  # A larger share of answers cut by the length limit deserves a warning
log = logging.getLogger(__name__)


def distill(target: Target, prompts: PromptConfig, config: DistillConfig, template: ChatTemplate, out: str | Path, *,
            train_target: Target | None = None, writer: Writer | None = None, states: Sequence[WantedStates] = (),
            progress: bool = True, grow: bool = True) -> Manifest:
    """Work on a folder of token shards, with every other process that does, until it is complete.

    `out` gets test.jsonl, validation-00000.safetensors, train-*.safetensors, manifest.json and stats.json. A folder
    started with the same recipe is finished. A complete one is left as it is, or gets more answers where a limit of
    tokens or minutes is higher than it was and nothing else is different; without `grow`, where another process uses
    the data, lower limits are refused. How much is answered in `budget_minutes` depends on the machines.

    `train_target` is the target in the number format that `config.train_dtype` names, where it names one; it writes
    prompts and answers those of the train split. `writer` is the draft of the artifact that `config.draft` names.
    `states` are what each training will read from disk: those of shards with decoded rows are recorded while they are
    decoded, and stored in the target's number format; `encode` adds the others.

    UserError if the recipe does not fit the source, the target or what `out` holds, a higher limit would add no answer,
    a finished shard is corrupted, the disk is full or its file system has no locks, or no token would be supervised."""
    trained = train_target or target
    task = DistillTask(target=target, train_target=trained, prompts=prompts, config=config, template=template,
                       writer=writer)
    source, folder = task.source(), DataFolder(Path(out), task.manifest(), config)
    bar = Progress(shown=progress, seconds_left=lambda: folder.seconds_left)
    shards = ShardAnswering(task, source, folder, bar)
    stored = ShardStates(target, folder.out, states)
    # What pays on this machine decides no byte of the data.
    with target.reproducible(), trained.reproducible(), closing(FolderLocks(folder.out / LOCKS)) as locks:
        with locks.holding(HELD_OUT):
            folder.resume(source.total, task.asked_key, grow=grow)
            if not folder.manifest.complete:
                stored = ShardStates(target, folder.out, folder.agreed_states(states))
                with bar.stage("trial of the engine", None, "tok"):
                    # The project's own loop is what others are compared with.
                    if isinstance(shards.writers.target, ServerAnswerer):
                        shards.writers.target.check()
            if folder.manifest.held_out is None:
                # A disk without room is reported now, not after the first answers.
                folder.write_stats(shards.amounts(stored))
                set_aside(task, source, folder, bar)
                folder.write_stats(shards.amounts(stored))
        if not folder.manifest.complete:
            shards.work(locks, stored)
            answers, cut = (folder.manifest.total("train", count) for count in ("answers", "truncated"))
            # Of several processes those that help show no progress, and leave the warning to the first one.
            if (progress or config.workers is None) and cut > TRUNCATED_SHARE * answers:
                log.warning("%d of %d answers were cut at %d tokens%s: drafts will rarely learn an end; raise "
                            "distill.max_new_tokens%s", cut, answers, config.max_new_tokens, *(
                                (" or when the minutes were over", " or distill.budget_minutes") if folder.late
                                else ("", "")))
    clear_queue(folder.out)
    return folder.manifest
