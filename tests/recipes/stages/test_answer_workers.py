"""Processes of one command, and of several, that answer together: one leads, the others help and end."""

import json
import os
import shutil
import subprocess
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from draftsmith.data import Manifest
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import compare_families, pipeline
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.reading.command_line import process_words, trust_words
from draftsmith.recipes.stages import answer_workers
from draftsmith.recipes.stages.answer_workers import HELPS, LOCK, RANK, answers, helpers, on_own_device
from draftsmith.recipes.stages.workspace import Workspace
from support.data.data_folders import contents
from support.processes import ended, holding, kill, start, working

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ("distill", "--config", "tiny", "--distill.validation_prompts", "2", "--distill.test_prompts", "1",
        "--distill.max_new_tokens", "32", "--distill.budget_tokens", "250", "--distill.workers")


HIGHER = ("--distill.budget_tokens", "600")


def call(out: Path, workers: int, *words: str, **variables: str) -> None:
    """The command in a process with more variables of the environment."""
    os.environ.update(variables)
    assert main([*TINY, str(workers), "--out", str(out), *words]) == 0


def workspace(*words: str) -> Workspace:
    return Workspace(COMMANDS["distill"].parse(["--config", "tiny", *words]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one worker, `alone` and the `whole` of a higher budget, made once."""
    folder, threads = tmp_path_factory.mktemp("finished"), torch.get_num_threads()
    torch.set_num_threads(1)
    call(folder / "alone", 1)
    call(folder / "whole", 1, *HIGHER)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def alone(finished: Path, tmp_path: Path) -> dict[str, bytes]:
    """The data of one worker, whose folder is copied next to that of the test."""
    shutil.copytree(finished / "alone", tmp_path / "alone")
    return contents(finished / "alone" / "data")


@pytest.fixture
def whole(finished: Path) -> dict[str, bytes]:
    """The data of one worker with the higher budget."""
    return contents(finished / "whole" / "data")


@pytest.mark.long
def test_a_command_and_its_helpers_leave_the_data_of_one_process(tmp_path: Path, alone: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    helping = [start(partial(call, out, 3, **{RANK: str(rank), HELPS: "1"})) for rank in (1, 2)]
    # Its own helpers are these: a rank keeps it from starting others.
    leading = start(partial(call, out, 3, **{RANK: "0"}))
    assert [ended(process) for process in (leading, *helping)] == [0, 0, 0]
    assert contents(out / "data") == alone
    assert set(json.loads((out / "stages.json").read_text())) == {"distill", "encode"}
    assert sorted(path.name for path in out.iterdir()) == ["data", "stages.json", "workers.lock"]


@pytest.mark.long
@pytest.mark.slow
def test_a_helper_lets_data_grow_that_its_command_has_not_opened_yet(
    tmp_path: Path, alone: dict[str, bytes], whole: dict[str, bytes]
) -> None:
    out = tmp_path / "alone"
    # It is faster than the command that started it.
    assert ended(start(partial(call, out, 2, *HIGHER, **{RANK: "1", HELPS: "1"}))) == 0
    assert contents(out / "data") == whole != alone
    stages = (out / "stages.json").read_bytes()
    call(out, 1, *HIGHER)
    assert contents(out / "data") == whole
    assert (out / "stages.json").read_bytes() != stages


@pytest.mark.long
@pytest.mark.slow
def test_a_lower_and_a_higher_budget_are_never_mixed(tmp_path: Path, alone: dict[str, bytes], whole: dict[str, bytes],
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert ended(start(partial(call, out, 1), killed_at=14)) == -9
    leading = holding(out / LOCK, 0)
    assert main([*TINY, "1", "--out", str(out), *HIGHER]) == 2
    assert "distill.budget_tokens was 250 and is now 600; choose another --out" in capsys.readouterr().err
    kill(leading)
    call(out, 1)
    assert contents(out / "data") == alone
    call(out, 1, *HIGHER)
    assert contents(out / "data") == whole


@pytest.mark.long
def test_data_grow_by_the_command_that_leads_alone(
    tmp_path: Path, alone: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, performed = tmp_path / "alone", list[list[str]]()
    monkeypatch.setattr(pipeline, "_perform", lambda _, names, __: performed.append(names))
    words = ["run", *TINY[1:], "1", "--out", str(out)]
    leading = holding(out / LOCK, 0)
    assert main([*words, *HIGHER]) == 0
    assert "another process leads this run, and its answers are complete" in capsys.readouterr().out
    assert not performed
    assert contents(out / "data") == alone
    monkeypatch.setenv(RANK, "1")
    assert main(words) == 0
    assert performed, "Lightning has started it to train"
    kill(leading)


@pytest.mark.long
def test_a_second_command_helps_the_one_that_leads(tmp_path: Path, alone: dict[str, bytes],
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    leading = holding(out / LOCK, 0)
    call(out, 1)
    said = capsys.readouterr().out
    assert "another process leads this run; this one helps to answer its prompts" in said
    assert "the answers are complete; the leading process goes on" in said
    assert Manifest.load(out / "data").complete
    assert not (out / "stages.json").exists(), "stages are the leading process's"
    call(out, 1)
    assert "another process leads this run, and its answers are complete" in capsys.readouterr().out
    kill(leading)
    call(out, 1)
    assert contents(out / "data") == alone


class Started:
    """Stands for a process that was started."""

    all: ClassVar[list["Started"]] = []

    def __init__(self, words: list[str], **options: Any) -> None:
        self.words, self.options, self.killed = words, options, False
        self.parsed = COMMANDS["distill"].parse(words[words.index("distill") + 1 :])
        self.all.append(self)

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The helpers that a command starts, none of which really runs."""
    monkeypatch.setattr(answer_workers, "subprocess", SimpleNamespace(Popen=Started, DEVNULL=subprocess.DEVNULL))
    Started.all.clear()
    return Started.all


@pytest.mark.long
def test_a_command_starts_the_others_with_its_recipe_and_ends_them(tmp_path: Path, alone: dict[str, bytes],
                                                                   started: list[Started]) -> None:
    call(tmp_path / "out", 3)
    assert [one.options["env"][RANK] for one in started] == ["1", "2"]
    assert all(one.killed and one.options["env"][HELPS] for one in started)
    settings = COMMANDS["distill"].parse([*TINY[1:], "3", "--out", str(tmp_path / "out")]).settings
    assert all(one.parsed.settings == settings for one in started)
    assert contents(tmp_path / "out" / "data") == alone


def helped(*words: str) -> int:
    """Helpers that a recipe starts."""
    Started.all.clear()
    with helpers(workspace(*words)):
        return len(Started.all)


@pytest.mark.parametrize(("workers", "prompts", "helping", "threads"), [
    ("2", 45, 1, 1), ("auto", 45, 2, 1), ("1", 45, 0, 1), ("2", 36, 0, 3), ("null", 45, 0, 3)])
def test_each_process_has_one_thread_unless_one_shard_is_all(tmp_path: Path, started: list[Started],
                                                             monkeypatch: pytest.MonkeyPatch, workers: str,
                                                             prompts: int, helping: int, threads: int) -> None:
    """The one that leads from held-out prompts on, also where it is alone; the others from their start. 28 prompts are
    held out, and a shard has 8."""
    asked, found = tmp_path / "prompts.jsonl", list[int]()
    asked.write_text("".join(f'{{"prompt": "Tell me {place}."}}\n' for place in range(prompts)))
    monkeypatch.setattr(answer_workers, "distill", lambda *_, **__: found.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    answers(workspace("--distill.workers", workers, "--prompts.origin", "file", "--prompts.path", str(asked),
                      "--out", str(tmp_path / "out")), ())
    assert found == [threads]
    assert [one.options["env"]["OMP_NUM_THREADS"] for one in started] == ["1"] * helping
    assert torch.get_num_threads() == 3
    # On a disk without locks it stays alone, and has them all.
    monkeypatch.setattr(answer_workers, "has_locks", lambda _: False)
    answers(workspace("--distill.workers", workers, "--prompts.origin", "file", "--prompts.path", str(asked),
                      "--out", str(tmp_path / "out")), ())
    assert found[1:] == [3]


@pytest.mark.long
def test_a_process_answers_on_each_gpu_and_no_other(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, asked, count in ((1, "2", 1), (1, "auto", 1), (4, "8", 4), (4, "3", 3), (4, "auto", 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert helped("--distill.workers", asked) == count - 1
        assert helped("--distill.workers", asked, "--target.device", "cuda:0") == 0, "that one is not shared"
        assert helped("--distill.workers", asked, "--target.placement", "layers") == 0, "one target is on all"


@pytest.mark.long
def test_auto_takes_the_threads_as_far_as_prompts_and_memory_last(
    started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, prompts = tmp_path / "meminfo", tmp_path / "prompts.jsonl"
    monkeypatch.setattr(answer_workers, "MEMINFO", memory)
    monkeypatch.setattr(answer_workers, "resident_bytes", lambda: 1024)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    memory.write_text("MemTotal: 99 kB\nMemAvailable: 99 kB\n")
    assert helped("--distill.workers", "auto") == 3
    assert "threads answer" not in capsys.readouterr().out
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert helped("--distill.workers", "auto") == 7, "each has a copy of the target"
    memory.write_text("MemTotal: 99 kB\nMemAvailable: 5 kB\n")
    assert helped("--distill.workers", "auto") == 2, "this one and two more of 2 kB, of which it holds one already"
    assert helped("--distill.workers", "6") == 5, "a number is taken at its word"
    # A container whose processes hold 4 kB of 6 kB, one of them in pages of files that can be given back.
    for name, content in (("max", "6144\n"), ("current", "4096\n"), ("stat", "anon 3072\ninactive_file 1024\n")):
        (tmp_path / f"memory.{name}").write_text(content)
    monkeypatch.setattr(answer_workers, "CGROUP", tmp_path)
    assert helped("--distill.workers", "auto") == 1, "3 kB are left, and one more takes 2"
    (tmp_path / "memory.max").write_text("max\n")
    assert helped("--distill.workers", "auto") == 2, "a container without a limit"
    # Of 40 prompts 28 are held out, which leaves two shards of 8.
    prompts.write_text("".join(f'{{"prompt": "Tell me {place}."}}\n' for place in range(40)))
    given = ("--prompts.origin", "file", "--prompts.path", str(prompts))
    capsys.readouterr()
    assert helped(*given, "--distill.workers", "auto") == 1
    assert "2 of 8 threads answer, each in a process of its own" in capsys.readouterr().out
    assert helped(*given, "--distill.workers", "6") == 1
    assert helped(*given, "--distill.workers", "auto", "--prompts.limit", "36") == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_helper_that_was_started_answers(tmp_path: Path, alone: dict[str, bytes]) -> None:
    recipe = tmp_path / "recipe.yaml"
    found = workspace(*TINY[3:], "2", "--out", str(tmp_path / "out"))
    recipe.write_text(json.dumps(found.settings))
    environment = {**os.environ, RANK: "1", HELPS: "1"}
    said = subprocess.run(process_words("distill", str(recipe), trust_words(found.recipe)), env=environment, check=True,
                          text=True, capture_output=True)
    assert "the answers are complete; the leading process goes on" in said.stdout
    assert contents(tmp_path / "out" / "data") == alone


def test_each_process_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    given = workspace("--distill.workers", "4")
    assert on_own_device(given).recipe.target.device == "auto"
    monkeypatch.setenv(RANK, "5")
    assert on_own_device(given).recipe.target.device == "auto", "no GPU here"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert on_own_device(given).recipe.target.device == "cuda:1"
    assert on_own_device(given).settings == given.settings
    assert on_own_device(workspace("--target.device", "cpu")).recipe.target.device == "cpu"


def test_the_number_of_workers_is_in_no_record() -> None:
    two, three, auto, none = (workspace("--distill.workers", number) for number in ("2", "3", "auto", "null"))
    assert two.decisive == three.decisive == auto.decisive == none.decisive
    assert "workers" not in none.decisive["distill"]


@pytest.mark.long
def test_a_number_format_is_measured_before_others_start(tmp_path: Path, alone: dict[str, bytes],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []

    def popen(*given: Any, **options: Any) -> Started:
        kept.append((tmp_path / "out" / "machine.json").read_text())
        return Started(*given, **options)

    monkeypatch.setattr(answer_workers, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr("draftsmith.recipes.stages.workspace.fastest_format", lambda *_: "float32")
    words = ["--target.dtype", "fastest", "--distill.train_dtype", "fastest", "--batch.states", "auto"]
    assert main([*TINY, "2", "--out", str(tmp_path / "out"), *words]) == 0
    assert [set(json.loads(one)) for one in kept] == [{"dtype", "train_dtype", "states"}]
    assert contents(tmp_path / "out" / "data")["train-00000.safetensors"] == alone["train-00000.safetensors"]


def test_processes_that_measure_otherwise_take_the_choice_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(number: int) -> None:
        def measured(*_: Any) -> str:
            time.sleep(0.5)
            return "float32" if number else "bfloat16"

        monkeypatch.setattr("draftsmith.recipes.stages.workspace.fastest_format", measured)
        found = workspace("--distill.workers", "2", "--target.dtype", "fastest", "--out", str(tmp_path / "out"))
        (tmp_path / f"{number}.txt").write_text(found.number_format)

    assert [ended(process) for process in [start(partial(choose, number)) for number in range(4)]] == [0] * 4
    found = {(tmp_path / f"{number}.txt").read_text() for number in range(4)}
    assert found == {json.loads((tmp_path / "out" / "machine.json").read_text())["dtype"]}


@pytest.mark.parametrize("words", [
    ["run", "--config", "tiny"], ["train", "--config", "tiny"], ["distill", "--config", "tiny"],
    ["run", "--config", "tiny", "--distill.workers", "2"],
    ["families", "--config", "tiny", "--rows", "[tiny]"], ["families", "--config", "tiny", "--rows", "[prompt_lookup]"],
    ["specdec"],
], ids=" ".join)
def test_one_command_works_in_a_folder_at_a_time(copied_run: Path, words: list[str], capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_perform", lambda *_: pytest.fail("two work in one folder"))
    other = working(copied_run)
    place = ["--artifact", str(copied_run / "artifact")] if words == ["specdec"] else ["--out", str(copied_run)]
    assert main([*words, *place]) == 2
    assert (f"another command works in {copied_run}; start again when it has ended, or choose another folder"
            in capsys.readouterr().err)
    assert not (copied_run / "tiny").exists(), "a refused comparison leaves the rows as they are"
    kill(other)


def test_a_process_that_helped_a_comparison_trains_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_families, "performed", lambda *_: nullcontext(False))
    monkeypatch.setattr(compare_families, "run_row", lambda *_: pytest.fail("a row was trained"))
    words = ["families", "--config", "tiny", "--rows", "[tiny]", "--distill.workers", "2", "--out", str(tmp_path)]
    assert main(words) == 0
