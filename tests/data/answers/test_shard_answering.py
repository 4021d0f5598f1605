"""Several processes answer from one queue: the bytes are those of one, whatever their number and whoever dies."""

import errno
import fcntl
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, Prompt, PromptConfig, WantedStates, distill
from draftsmith.data.answers import data_folder
from draftsmith.data.answers.data_folder import DataFolder, Progress
from draftsmith.data.answers.distill import BARREN_CANDIDATES, ShardAnswering
from draftsmith.data.answers.distill_task import DistillTask
from draftsmith.data.answers.shard_queue import (
    FIRST,
    HELD_OUT,
    LOCKS,
    MERGE,
    QUEUE,
    VALIDATION,
    FinishedShard,
    ShardPrompts,
    ShardQueue,
    answers_lock,
    clear_queue,
)
from draftsmith.data.prompts.sources import OwnPrompts, Taken
from draftsmith.data.store.feature_shards import state_file
from draftsmith.modules import Target, UserError
from draftsmith.modules.files.folders import FolderLocks, has_locks, remove_leftovers, sole_writer
from draftsmith.modules.processes import Processes
from draftsmith.recipes.stages.answer_workers import leading
from support.data.data_folders import asked_prompts, contents, many, shard_record, write_prompts
from support.processes import ended, holding, kill, start
from support.targets import templated_target
from support.tiers import others_long, some_long

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = DistillConfig(shard_prompts=4, slots=4, max_new_tokens=16, temperatures=(0.0, 1.0), validation_prompts=3,
                      test_prompts=2, workers=2)
STATES = (WantedStates(taps=(1,)),)
Make = Callable[[Path], Manifest]


def make(target: Target, prompts: PromptConfig, config: DistillConfig, out: Path,
         states: tuple[WantedStates, ...] = STATES) -> Manifest:
    return distill(target, prompts, config, ChatTemplate(target.tokenizer), out, states=states, progress=False)


@pytest.fixture(params=others_long(["file", "own", "budget"], kept=("file",)))
def make_from(request: pytest.FixtureRequest, tmp_path: Path, tiny_target: Target) -> Make:
    """Data from repeated prompts of a file, from the target's own, and from those of a file up to a token budget."""
    if request.param == "own":
        # Without a chat template every text of a few tokens is a prompt.
        return partial(make, templated_target(None), PromptConfig(), replace(SMALL, budget_tokens=150))
    file = write_prompts(tmp_path, many(24) + many(30))
    return partial(make, tiny_target, file, replace(SMALL, budget_tokens=150) if request.param == "budget" else SMALL)


def together(make_data: Make, out: Path, *killed_at: int) -> list[int]:
    """Exit codes of processes that work at once, some of which kill themselves before a rename."""
    processes = [start(partial(make_data, out), killed_at=last) for last in killed_at]
    return [ended(process) for process in processes]


# The same bytes ------------------------------------------------------------------------------------------------------


def test_two_and_three_processes_leave_the_bytes_of_one(make_from: Make, tmp_path: Path) -> None:
    manifest = make_from(tmp_path / "one")
    assert len(manifest.split("train")) > 2
    for number in (2, 3):
        out = tmp_path / f"of {number}"
        assert together(make_from, out, *[0] * number) == [0] * number
        assert contents(out) == contents(tmp_path / "one")
        assert Manifest.load(out).hash == manifest.hash


@pytest.mark.long
@pytest.mark.parametrize("last", [3, 11])
def test_a_process_that_is_killed_costs_no_byte(make_from: Make, tmp_path: Path, last: int) -> None:
    make_from(tmp_path / "calm")
    out = tmp_path / "killed"
    # Both have too few renames between them for all the work.
    assert -9 in together(make_from, out, last, last + 1)
    assert together(make_from, out, 0, 0) == [0, 0]
    assert contents(out) == contents(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILLS", "1"))))
def test_kills_at_random_moments_cost_no_byte(make_from: Make, tmp_path: Path, seed: int) -> None:
    make_from(tmp_path / "calm")
    out, chance = tmp_path / "killed", random.Random(seed)
    working = [start(partial(make_from, out)) for _ in range(3)]
    for _ in range(4):
        time.sleep(chance.random() / 2)
        kill(working.pop(0))
        working.append(start(partial(make_from, out)))
    assert [ended(process) for process in working] == [0, 0, 0]
    remove_leftovers(out)
    assert contents(out) == contents(tmp_path / "calm")


def test_prompts_come_back_from_their_file_as_they_were_written(tmp_path: Path) -> None:
    class Written(OwnPrompts):
        def __init__(self) -> None:
            pass

        def take(self, start: int, count: int) -> Taken:
            return Taken(prompts=[(start, Prompt.from_turns("one", id=str(start), category="own"))], read=count)

    locks = FolderLocks(tmp_path / "locks")
    (tmp_path / QUEUE).mkdir()
    queued = ShardPrompts(Written(), tmp_path, locks, start=5, size=4, held=set(), seen=set(),
                          asked_key=lambda prompt: int(prompt.id), key=lambda number, _: number)
    first, again = queued.fresh(0), queued.fresh(0)
    locks.close()
    assert first.prompts == again.prompts == Written().take(5, 4).prompts


def test_when_all_are_killed_the_next_one_makes_the_open_shards_alone(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data: Make = partial(make, tiny_target, write_prompts(tmp_path, many(25)), SMALL)
    make_data(tmp_path / "calm")
    out = tmp_path / "out"
    # Renames of a shard: itself, two files of states, its record, the times. Before them, six of the held-out prompts.
    assert together(make_data, out, 20) == [-9]
    finished = sorted(file.stem for file in (out / "queue").glob("train-*.json"))
    assert finished
    asked = asked_prompts(monkeypatch)
    make_data(out)
    first = SMALL.validation_prompts + SMALL.test_prompts
    assert asked == list(range(first + 4 * len(finished), 25)), "nothing that was finished is asked again"
    assert contents(out) == contents(tmp_path / "calm")
    asked.clear()
    make_data(out)
    assert not asked


@pytest.mark.long
def test_a_free_process_takes_over_while_another_holds_its_shard(tmp_path: Path, tiny_target: Target) -> None:
    make_data: Make = partial(make, tiny_target, write_prompts(tmp_path, many(25)), SMALL)
    make_data(tmp_path / "calm")
    out = tmp_path / "out"
    held = holding(out / LOCKS, answers_lock(1))
    waiting = start(partial(make_data, out))
    while len(list((out / "queue").glob("train-*.json"))) < 5:
        time.sleep(0.05)
    # 20 prompts for training are five shards and an empty one; all but the one that is held are finished.
    assert not (out / "queue" / "train-00001.json").exists()
    assert not Manifest.load(out).complete
    kill(held)
    assert ended(waiting) == 0
    assert contents(out) == contents(tmp_path / "calm")


# What belongs to the data --------------------------------------------------------------------------------------------


def test_the_files_are_those_of_a_process_with_all_threads(tmp_path: Path, tiny_target: Target) -> None:
    prompts = write_prompts(tmp_path, many(21))
    make(tiny_target, prompts, SMALL, tmp_path / "one thread each")
    found = make(tiny_target, prompts, replace(SMALL, workers=None), tmp_path / "alone")
    assert contents(tmp_path / "one thread each") == contents(tmp_path / "alone")
    assert make(tiny_target, prompts, replace(SMALL, workers=7), tmp_path / "alone") == found, "any number goes on"


def test_the_budget_ends_the_data_at_the_shard_that_reaches_it(tmp_path: Path, tiny_target: Target) -> None:
    prompts = write_prompts(tmp_path, many(60))
    whole = make(tiny_target, prompts, SMALL, tmp_path / "all").split("train")
    budget = sum(shard.supervised for shard in whole[:3])
    out = tmp_path / "out"
    some = make(tiny_target, prompts, replace(SMALL, budget_tokens=budget), out)
    assert some.split("train") == whole[:3]
    assert {file.name for file in out.glob("*train*")} == {
        name for shard in whole[:3] for name in (shard.file, state_file(shard, "final"), state_file(shard, "tap_1"))}
    assert not (out / "queue").exists()


@pytest.mark.parametrize("origin", some_long(["file", "own"], 9, 1))
def test_data_grown_by_a_higher_budget_have_the_bytes_of_data_made_at_once(
    tmp_path: Path, tiny_target: Target, origin: str
) -> None:
    target, prompts = tiny_target, write_prompts(tmp_path, many(60))
    if origin == "own":
        target, prompts = templated_target(None), PromptConfig()
    higher = partial(make, target, prompts, replace(SMALL, budget_tokens=200))
    whole = higher(tmp_path / "whole")
    out = tmp_path / "grown"
    few = make(target, prompts, replace(SMALL, budget_tokens=60), out)
    assert 0 < len(few.split("train")) < len(whole.split("train"))
    assert together(higher, out, 5, 6) == [-9, -9], "killed while the data grow"
    assert not Manifest.load(out).complete
    assert together(higher, out, 0, 0) == [0, 0]
    assert contents(out) == contents(tmp_path / "whole")
    with pytest.raises(UserError, match=r"distill.budget_tokens was 200 and is now 60; choose another --out"):
        make(target, prompts, replace(SMALL, budget_tokens=60), out)


@pytest.mark.long
def test_data_grow_by_a_larger_budget_and_by_no_process_that_helps(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(60)), tmp_path / "out"
    lower, higher = (partial(make, tiny_target, prompts, replace(SMALL, budget_tokens=tokens)) for tokens in (60, 200))
    lower(tmp_path / "few")
    higher(tmp_path / "whole")
    cut = tmp_path / "cut"
    assert together(lower, cut, 12) == [-9]
    higher(cut)
    assert contents(cut) == contents(tmp_path / "whole"), "data that are not complete go on with a larger budget"
    lower(out)
    assert contents(out) == contents(tmp_path / "few")
    with pytest.raises(UserError, match=r"distill.budget_tokens was 60 and is now 200; choose another --out"):
        distill(tiny_target, prompts, replace(SMALL, budget_tokens=200), ChatTemplate(tiny_target.tokenizer), out,
                progress=False, grow=False)
    assert contents(out) == contents(tmp_path / "few")
    higher(out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_process_does_not_complete_data_whose_limits_another_has_raised(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = write_prompts(tmp_path, many(60)), tmp_path / "out"
    end = ShardQueue.end

    def grown_meanwhile(self: ShardQueue) -> int | None:
        if (found := end(self)) is not None:
            # Another process of the same limits has completed the data, and a third one lets them grow.
            before = Manifest.load(out)
            replace(before, recipe={**before.recipe, "distill": {**before.recipe["distill"], "budget_tokens": 200}}
                    ).save(out)
        return found

    monkeypatch.setattr(ShardQueue, "end", grown_meanwhile)
    with pytest.raises(UserError, match=r"were raised while this process answered; start it again with the same ones"):
        make(tiny_target, prompts, replace(SMALL, budget_tokens=60), out)
    assert not Manifest.load(out).complete


def test_a_queue_is_cleared_when_its_data_are_complete_and_no_process_is_there(
    tmp_path: Path, tiny_target: Target
) -> None:
    prompts, out = write_prompts(tmp_path, many(60)), tmp_path / "out"
    higher = partial(make, tiny_target, prompts, replace(SMALL, budget_tokens=200))
    make(tiny_target, prompts, replace(SMALL, budget_tokens=60), out)
    locks_file = (out / LOCKS).stat().st_ino
    assert together(higher, out, 12) == [-9]
    finished = sorted((out / QUEUE).glob("train-*.json"))
    clear_queue(out)
    assert finished
    assert sorted((out / QUEUE).glob("train-*.json")) == finished, "the data grow"
    higher(out)
    (out / QUEUE).mkdir()
    for number in (MERGE, HELD_OUT, VALIDATION, FIRST, answers_lock(7)):
        held = holding(out / LOCKS, number)
        clear_queue(out)
        assert (out / QUEUE).exists(), f"lock {number} is held"
        kill(held)
    clear_queue(out)
    assert not (out / QUEUE).exists()
    assert (out / LOCKS).stat().st_ino == locks_file, "processes that opened it before would lock another file"


def test_the_progress_counts_what_others_have_finished(tmp_path: Path, tiny_target: Target,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    advanced: list[tuple[str, int]] = []
    config, out = replace(SMALL, budget_tokens=500), tmp_path / "out"
    task = DistillTask(target=tiny_target, train_target=tiny_target, prompts=write_prompts(tmp_path, many(30)),
                       config=config, template=ChatTemplate(tiny_target.tokenizer), writer=None)
    part = ShardAnswering(task, task.source(), DataFolder(out, task.manifest(), config), Progress(shown=False))
    monkeypatch.setattr(part.progress, "advance", lambda *given: advanced.append(given))
    with closing(FolderLocks(out / LOCKS)) as locks:
        queue = ShardQueue(out, locks, 4, 500)
        (out / QUEUE).mkdir(parents=True, exist_ok=True)
        for number, tokens in ((1, 50), (2, 60)):
            queue.publish(number, finished(number, tokens))
        part.mine.add(2)
        part.count_others(queue)
        part.count_others(queue)
    assert [given for given in advanced if given[1]] == [("tok", 50), ("prompt", 4)]


def finished(number: int, supervised: int) -> FinishedShard:
    """A finished shard of four prompts with some answer tokens."""
    return FinishedShard(read=4, fresh=4, repeated=0, record=shard_record(number, supervised=supervised), states={})


def test_no_shard_is_started_that_the_budget_will_hardly_need(tmp_path: Path) -> None:
    queue = ShardQueue(tmp_path, FolderLocks(tmp_path / LOCKS), size=4, budget=100)
    assert list(queue._wanted(40.0)) == [0, 1, 2]
    for number, supervised in ((0, 30), (2, 50)):
        queue.publish(number, finished(number, supervised))
    assert list(queue._wanted(40.0)) == [1], "30 of the first, 40 expected of the second, 50 of the third"
    assert queue.end() is None
    queue.publish(1, FinishedShard(read=4, fresh=0, repeated=0, record=None, states={}))
    assert list(queue._wanted(40.0)) == [3]
    queue.publish(3, FinishedShard(read=2, fresh=2, repeated=0, record=shard_record(3, supervised=10), states={}))
    assert queue.end() == 4
    assert list(queue._wanted(40.0)) == []


def test_a_queue_that_another_process_clears_keeps_what_was_read(tmp_path: Path) -> None:
    queue = ShardQueue(tmp_path, FolderLocks(tmp_path / LOCKS), size=4, budget=100)
    assert queue.validation() is None
    for number in (0, None):
        queue.publish(number, finished(0, 30))
    other = ShardQueue(tmp_path, queue.locks, size=4, budget=100)
    assert (other.validation(), other.finished()) == (finished(0, 30), {0: finished(0, 30)})
    shutil.rmtree(tmp_path / QUEUE)
    assert (other.validation(), other.finished()) == (finished(0, 30), {0: finished(0, 30)})
    queue.publish(1, replace(finished(1, 80), read=1, cut=True))
    queue.publish(0, finished(0, 10))
    assert queue.end() is None, "a cut shard is not the last one of the source"


def test_all_processes_store_the_states_that_the_first_was_asked_for(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(25)), tmp_path / "out"
    assert together(partial(make, tiny_target, prompts, SMALL), out, 12) == [-9]
    make(tiny_target, prompts, SMALL, out, ())
    make(tiny_target, prompts, SMALL, tmp_path / "calm")
    assert contents(out) == contents(tmp_path / "calm")


# Time, and what is refused -------------------------------------------------------------------------------------------


def late_after(patch: pytest.MonkeyPatch, last: int, *processes: int) -> None:
    """Once this shard is answered, a hundred minutes have passed, and these processes end."""
    now, spent, publish = time.monotonic, [0.0], ShardQueue.publish

    def late(self: ShardQueue, number: int | None, shard: FinishedShard) -> None:
        publish(self, number, shard)
        if number == last:
            spent[0] = 6000.0
            for process in processes:
                kill(process)

    patch.setattr(data_folder.time, "monotonic", lambda: now() + spent[0])
    patch.setattr(ShardQueue, "publish", late)


def test_time_ends_the_queue(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, config = write_prompts(tmp_path, many(40)), replace(SMALL, budget_minutes=1.0)
    late_after(monkeypatch, 2)
    manifest = make(tiny_target, prompts, config, tmp_path / "out")
    assert len(manifest.split("train")) == 3
    assert manifest.candidates == 5 + 3 * 4


@pytest.mark.parametrize("held", some_long([None, 1], 2))
def test_data_whose_time_was_up_grow_to_the_bytes_of_data_made_at_once(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, held: int | None
) -> None:
    # A shard without answers, its prompts being repeated, is the first or the second.
    repeated = many(9) + many(4) + many(40)[9:] if held is None else many(60)
    prompts, out = write_prompts(tmp_path, repeated), tmp_path / "out"
    few, more = (partial(make, tiny_target, prompts, replace(SMALL, budget_minutes=limit)) for limit in (100.0, 200.0))
    whole = more(tmp_path / "whole")
    others = [] if held is None else [holding(out / LOCKS, answers_lock(1))]
    with monkeypatch.context() as patch:
        late_after(patch, 1 if held is None else 3, *others)
        assert few(out).split("train") == whole.split("train")[:1]
    assert not (out / "train-00003.safetensors").exists()
    more(out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_target_without_usable_prompts_is_refused(tmp_path: Path, tiny_target: Target,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnPrompts, "_text", lambda *_: "")
    config = replace(SMALL, shard_prompts=BARREN_CANDIDATES, slots=BARREN_CANDIDATES, validation_prompts=0,
                     test_prompts=0, budget_tokens=9)
    with pytest.raises(UserError, match=rf"none of {BARREN_CANDIDATES} prompts that the target wrote can be used"):
        make(tiny_target, PromptConfig(own_max_tokens=4), config, tmp_path / "out")


def test_a_damaged_record_of_the_queue_is_named(tmp_path: Path, tiny_target: Target) -> None:
    make_data: Make = partial(make, tiny_target, write_prompts(tmp_path, many(25)), SMALL)
    assert together(make_data, tmp_path / "out", 20) == [-9]
    file = tmp_path / "out" / "queue" / "train-00000.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"train-00000.json is damaged: .* lacks .*; delete it, the shard is then"):
        make_data(tmp_path / "out")
    file.unlink()
    make_data(tmp_path / "out")
    make_data(tmp_path / "calm")
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


# Locks ---------------------------------------------------------------------------------------------------------------


def test_a_lock_is_one_processs_and_goes_with_it(tmp_path: Path) -> None:
    locks, process = FolderLocks(tmp_path / "locks"), holding(tmp_path / "locks", FIRST + 3)
    assert locks.take(FIRST)
    assert not locks.take(FIRST + 3)
    assert not locks.take(FIRST, 0), "all from the first on: one of them is held"
    assert locks.take(FIRST + 4, 0)
    kill(process)
    assert locks.take(FIRST + 3)
    locks.close()


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let this process meet a disk whose locks fail with this error."""
    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refused)


def test_a_lock_that_fails_where_there_are_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = FolderLocks(tmp_path / "locks")
    without_locks(monkeypatch, errno.EIO)
    with pytest.raises(UserError, match=r"locks cannot be locked \(Input/output error\).*choose an --out on another"):
        locks.take(0)


@pytest.mark.filterwarnings("ignore:this disk has no locks")
def test_several_processes_on_a_disk_without_locks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch, errno.EOPNOTSUPP)
    with leading(tmp_path) as leads:
        assert leads
    monkeypatch.setattr(Processes, "launched", lambda: Processes(world=2))
    with pytest.raises(UserError, match=r"has no locks, without which processes share no folder; start one process"):
        leading(tmp_path).__enter__()


def test_one_process_on_a_disk_without_locks_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     tiny_target: Target) -> None:
    file = write_prompts(tmp_path, many(8))
    make(tiny_target, file, SMALL, tmp_path / "usual")
    without_locks(monkeypatch, errno.ENOLCK)
    with pytest.warns(UserWarning, match=r"no locks \(No locks available\): start no other process in the same --out"):
        assert not has_locks(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(tiny_target, file, SMALL, tmp_path / "out")
        with sole_writer(tmp_path / "place"):
            remove_leftovers(tmp_path)
    assert contents(tmp_path / "out") == contents(tmp_path / "usual")
