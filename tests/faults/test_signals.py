"""Signals at every stage: an exit code, one sentence, and a run that goes on to the bytes of an undisturbed one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.answers.shard_queue import ShardQueue
from draftsmith.data.store import feature_store
from draftsmith.modules import Medusa
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import answer_commands, pipeline
from draftsmith.recipes.terminal import Stopped, call, stopped_by_signals
from draftsmith.trainers import draft_module
from safetensors.torch import load_file
from support.processes import HANGING
from support.tiers import others_long

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def unhandled() -> Iterator[list[int]]:
    """Numbers of the signals that reached the test process itself, which would have ended it."""
    reached: list[int] = []
    former = {number: signal.signal(number, lambda number, _frame: reached.append(number)) for number in SIGNALS}
    yield reached
    for number, handler in former.items():
        signal.signal(number, handler)


def signal_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, at: int = 1) -> None:
    """Send this process a signal at the start of the `at`-th call of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = []

    def signalled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)


MEASURED = ("stats.json", "tuning.json", "acceptance.json")
"""Files that hold seconds of the machine, or figures of the tree that is fastest by them."""


def contents(out: Path) -> dict[str, bytes]:
    """Everything of data and artifact that equal runs share."""
    return {str(file.relative_to(out)): file.read_bytes() for folder in ("data", "artifact")
            for file in (out / folder).rglob("*") if file.is_file() and file.name not in MEASURED}


def left_by(run: Path, *gone: str) -> None:
    """Make a finished run one that has got only so far: without these files and without its list of stages."""
    for name in ("stages.json", *gone):
        for path in run.glob(name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


@pytest.mark.long
@pytest.mark.parametrize(("number", "owner", "name", "at", "gone"), [
    (signal.SIGTERM, ShardQueue, "publish", 1, ("data", "train", "artifact")),
    (signal.SIGINT, feature_store, "write_tensors", 2, ("data", "train", "artifact")),
    (signal.SIGTERM, draft_module(Medusa), "training_step", 13, ("train", "artifact")),
    (signal.SIGUSR1, draft_module(Medusa), "training_step", 9, ("train", "artifact")),
    (signal.SIGTERM, pipeline, "measure_cost", 1, ("artifact",)),
    (signal.SIGHUP, pipeline, "write_report", 1, ("report.html",)),
], ids=["distillation", "states", "training", "training-slurm", "artifact",
        "evaluation"])
def test_a_signal_ends_a_run_that_the_same_command_finishes(
    number: signal.Signals, owner: Any, name: str, at: int, gone: tuple[str, ...], tiny_run: Path, copied_run: Path,
    unhandled: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_by(copied_run, *gone)
    words = ["run", "--config", str(TINY), "--out", str(copied_run), "--evaluate.limit", "1",
             "--evaluate.speed_prompts", "0"]
    with monkeypatch.context() as patch:
        signal_in(patch, owner, name, number, at)
        assert main(words) == 128 + number
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    assert len([line for line in lines if "warning" not in line]) == 1, lines
    assert "the same command goes on from here" in lines[-1]
    assert not unhandled
    assert not list(copied_run.rglob("*.partial"))
    if name == "training_step":
        assert (copied_run / "train" / "last.ckpt").is_file()
        assert not (copied_run / "artifact").exists()
        # The signal is heeded after the step: with the same settings the next step is the one after it.
        signal_in(monkeypatch, owner, name, signal.SIGTERM, 30 - at + 1)
    assert main(words) == 0
    assert contents(copied_run) == contents(tiny_run)
    assert not unhandled


def test_states_made_again_after_a_signal_are_those_of_an_undisturbed_second_pass(
    copied_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unhandled: list[int]
) -> None:
    """Lost states come back by a second pass: the states within rounding, and the same bytes however often it stops."""
    made = {file.name: load_file(file)["states"] for file in (copied_run / "data").glob("final-*")}
    left_by(copied_run, "data/final-*", "data/features.json", "train", "artifact")
    calm = Path(shutil.copytree(copied_run, tmp_path / "calm"))
    assert main(["distill", "--config", str(TINY), "--out", str(calm)]) == 0
    words = ["distill", "--config", str(TINY), "--out", str(copied_run)]
    with monkeypatch.context() as patch:
        signal_in(patch, feature_store, "write_tensors", signal.SIGINT, 2)
        assert main(words) == 130
    assert main(words) == 0
    assert contents(copied_run) == contents(calm)
    assert len(made) > 2
    for name, states in made.items():
        torch.testing.assert_close(load_file(copied_run / "data" / name)["states"], states, rtol=0, atol=1e-4)
    assert not unhandled


def test_a_second_signal_does_not_wait_for_the_step(copied_run: Path, monkeypatch: pytest.MonkeyPatch,
                                                    unhandled: list[int]) -> None:
    left_by(copied_run, "train", "artifact")
    original = draft_module(Medusa).training_step
    ended = []

    def signalled(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(1)
        return original(*args)

    monkeypatch.setattr(draft_module(Medusa), "training_step", signalled)
    assert main(["train", "--config", str(TINY), "--out", str(copied_run)]) == 130
    assert not ended
    assert not unhandled


def test_other_commands_start_again(tiny_run: Path, monkeypatch: pytest.MonkeyPatch,
                                    capfd: pytest.CaptureFixture[str]) -> None:
    signal_in(monkeypatch, answer_commands, "stream", signal.SIGTERM)
    assert main(["generate", "--artifact", str(tiny_run / "artifact"), "--prompt", "hello"]) == 143
    assert "stopped by a request to end (SIGTERM); nothing is half-written, and the same command starts again" in \
        capfd.readouterr().err


def test_one_more_ctrl_c_on_the_way_out_shows_no_traceback() -> None:
    program = ("import os, signal, sys, time\n"
               "from draftsmith.recipes.__main__ import main\n"
               "sys.argv = ['draftsmith', '--help']\n"
               "main()\n"
               "os.kill(os.getpid(), signal.SIGINT)\n"
               "time.sleep(60)\n")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_an_ignored_signal_stays_ignored(unhandled: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    assert not unhandled
    with pytest.raises(Stopped), stopped_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)


class Finalised:
    """An object during whose end a signal comes."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)


def test_a_signal_in_a_finaliser_is_repeated(capfd: pytest.CaptureFixture[str], unhandled: list[int]) -> None:
    """Python drops what is raised there."""
    passed = []

    @stopped_by_signals()
    def signalled(seconds: float) -> None:
        Finalised()
        passed.append(seconds)
        time.sleep(seconds)

    with pytest.raises(Stopped):
        signalled(600.0)
    assert passed == [600.0]
    signalled(0.0)
    time.sleep(0.1)
    assert not unhandled
    assert "Traceback" not in capfd.readouterr().err


def test_a_signal_of_which_a_library_made_another_error_ends_the_command(unhandled: list[int]) -> None:
    @stopped_by_signals()
    def drawn(*, signalled: bool) -> None:
        try:
            if signalled:
                os.kill(os.getpid(), signal.SIGTERM)
        except Stopped:
            pass
        raise ValueError("Invalid affine transformation matrix")

    with pytest.raises(Stopped):
        drawn(signalled=True)
    with pytest.raises(ValueError, match="Invalid affine"):
        drawn(signalled=False)
    assert not unhandled


def test_a_program_that_was_started_gets_the_signal_once_and_is_waited_for(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "def ends(*_):\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write('asked to end\\n')\n"
        "    time.sleep(0.3)\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write('ended\\n')\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, ends)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n")
    with pytest.raises(Stopped), stopped_by_signals():
        call([sys.executable, "-c", program, str(tmp_path / "told")])
    assert (tmp_path / "told").read_text() == "asked to end\nended\n"
    assert call([sys.executable, "-c", "raise SystemExit(5)"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", others_long([signal.SIGTERM, signal.SIGINT], kept=()))
def test_a_signalled_process_ends_with_its_code_and_a_checkpoint(
    number: signal.Signals, tiny_run: Path, tmp_path: Path
) -> None:
    words = ["train", "--config", str(TINY), "--out", str(tmp_path), "--data", str(tiny_run / "data"),
             "--train.max_steps", "1000000", "--train.checkpoint_every", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.recipes", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    checkpoint, best = tmp_path / "train" / "last.ckpt", tmp_path / "train" / "best.safetensors"
    while not best.exists() and process.poll() is None:
        time.sleep(0.05)
    assert not checkpoint.exists()
    process.send_signal(number)
    _, message = process.communicate(timeout=HANGING)
    assert process.returncode == 128 + number, message
    assert message.count("the same command goes on from here") == 1
    assert "Traceback" not in message
    assert checkpoint.is_file()
