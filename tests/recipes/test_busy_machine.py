"""The main job on a machine whose cores others take: it ends well in however few minutes, wherever it is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.pass_cost import busy_programs
from support.processes import Disturbance, call

pytestmark = [pytest.mark.long, pytest.mark.slow]
OTHERS = 4
MINUTES = ("--distill.budget_minutes", "0.05", "--train.max_minutes", "0.05", "--evaluate.budget_minutes", "0.05")
WORDS = ("run", "--config", "tiny", "--out", "run", "--distill.workers", "auto", "--distill.budget_tokens", "1000000",
         "--train.max_steps", "null", *MINUTES)


@pytest.fixture(scope="module", autouse=True)
def busy() -> Iterator[None]:
    """Four other programs that take the cores."""
    with busy_programs(OTHERS):
        yield


def check(out: Path) -> tuple[str, ...]:
    """The run has ended with a report that has figures of both sets of prompts; returns what was short."""
    found = json.loads((out / "evaluation.json").read_text())
    assert set(found["by_prompt_set"]) == {"own", "handwritten"}
    assert all(one["prompts"] > 0 and one["accepted_length"] >= 1 and one["speedup"] > 0
               for one in found["by_prompt_set"].values())
    assert (out / "report.html").is_file()
    return tuple(found["left_out"])


@pytest.mark.parametrize("threads", ["1", None])
def test_a_run_of_few_minutes_ends_with_a_report(tmp_path: Path, threads: str | None) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run([sys.executable, "-P", "-m", "draftsmith.recipes", *WORDS], cwd=tmp_path,
                           env={**variables, **({} if threads is None else {"OMP_NUM_THREADS": threads})},
                           capture_output=True, text=True, check=False, timeout=3600)
    assert ended.returncode == 0, ended.stderr
    short = check(tmp_path / "run")
    assert any(one.startswith("answers: ") for one in short), short
    assert all(one in " ".join(ended.stdout.split()) for one in short)
    # Where output is no terminal no line is written over, and few lines tell of progress.
    assert "\r" not in ended.stdout + ended.stderr


def test_a_run_killed_in_each_stage_goes_on_and_ends_and_goes_on_with_more_minutes(tmp_path: Path) -> None:
    for stage, delay in (("[1/5]", 3.0), ("[3/5]", 0.5), ("[4/5]", 0.2), ("[5/5]", 0.5)):
        killed = call(WORDS, tmp_path, Disturbance(sent=signal.SIGKILL, stage=stage, delay=delay))
        # A stage of a moment may have ended before the kill, and the run with it.
        assert killed.code in (-signal.SIGKILL, 0), killed.last
    ended = call(WORDS, tmp_path)
    assert ended.code == 0, ended.last
    check(tmp_path / "run")
    ended = call([word.replace("0.05", "0.1") for word in WORDS], tmp_path)
    assert ended.code == 0, ended.last
    check(tmp_path / "run")
