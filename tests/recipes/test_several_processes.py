"""A run whose training several processes do, with a target and a drafter that they share."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from draftsmith.recipes.__main__ import main
from support.processes import ROOT, environment, launcher, torchrun

STEPS = 6


def words(out: Path) -> list[str]:
    """Options of a run in this folder, whose training ends after STEPS steps and two processes do."""
    return ["--config", str(ROOT / "recipes" / "tiny.yaml"), "--out", str(out), "--train.devices", "2",
            "--train.accelerator", "cpu", "--batch.states", "computed", "--train.max_steps", str(STEPS),
            "--train.validate_every", "2", "--train.checkpoint_every", "1"]


def training(out: Path, shared: Sequence[str]) -> list[str]:
    """Arguments of Python for the stages that two processes do, which share the target and the drafter."""
    placement, strategy = shared
    return ["-m", "draftsmith.recipes", "run", *words(out), "--target.placement", placement,
            "--train.strategy", strategy]


@dataclass(frozen=True)
class Trained:
    """A folder that one process distilled in and two trained in."""

    out: Path
    shared: Sequence[str]
    """The target's placement and the drafter's strategy."""
    seconds: float
    """Seconds between the files of training."""


SHARED = (("tensor_parallel", "ddp"), ("zero3", "deepspeed_stage_3"))


@pytest.fixture(scope="module", params=SHARED, ids="-".join)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run up to the end of its training."""
    out = tmp_path_factory.mktemp("calm")
    assert main(["distill", *words(out)]) == 0
    answer = torchrun(2, *training(out, request.param))
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("the drafter is trained") == 1, "the first process speaks for all"
    assert "trained; for the stages artifact and evaluate start draftsmith run" in answer.stdout
    times = [file.stat().st_mtime for file in (out / "train").rglob("*") if file.is_file()]
    return Trained(out, request.param, max(times) - min(times))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.slow
def test_one_process_distils_two_train_and_one_evaluates(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.out, out)
    assert not (out / "artifact").exists()
    assert main(["run", *words(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("already complete, skipped") == 3, "wherever target and drafter are, they are complete"
    assert (out / "report.html").is_file()


# How a process dies does not depend on the strategy; test_processes resumes the checkpoints of others.
@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("trained", SHARED[:1], ids="-".join, indirect=True)
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILLS", "1"))))
def test_a_process_killed_at_a_random_moment_changes_no_weight(
    trained: Trained, tmp_path: Path, seed: int
) -> None:
    """The other one ends too, instead of waiting for it, and the same command goes on."""
    out, chance = tmp_path / "out", random.Random(seed)
    shutil.copytree(trained.out, out, ignore=shutil.ignore_patterns("train"))
    command, wait = training(out, trained.shared), trained.seconds * chance.random()
    while start_and_kill(out, command, wait, chance) == 0:
        # It ended before: the machine is less busy than it was for the first run.
        shutil.rmtree(out / "train")
        wait /= 2
    answer = torchrun(2, *command)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert outcome(out) == outcome(trained.out)


def start_and_kill(out: Path, command: list[str], seconds: float, chance: random.Random) -> int:
    """Exit code of a training of which one process is killed so long after its first file."""
    with (out / "said.txt").open("w") as said:
        started = subprocess.Popen([sys.executable, *launcher(2), *command], cwd=ROOT, stdout=said,
                                   stderr=said, env=environment())
        while not any((out / "train").glob("*")) and started.poll() is None:
            time.sleep(0.02)
        time.sleep(seconds)
        if started.poll() is None:
            working = [one for one in psutil.Process(started.pid).children() if "draftsmith.recipes" in one.cmdline()]
            assert len(working) == 2, (out / "said.txt").read_text()[-3000:]
            working[chance.randrange(2)].send_signal(signal.SIGKILL)
        return started.wait(60)


def outcome(out: Path) -> tuple[bytes, dict[str, object]]:
    """The chosen weights, and what is recorded of them."""
    result = json.loads((out / "train" / "result.json").read_text())
    return (out / "train" / result["checkpoint"]).read_bytes(), result
