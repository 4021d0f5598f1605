"""Runs that end by time: counted time, learning rate, remaining time after resuming."""

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftsmith.modules import Features, Medusa, progress
from draftsmith.modules.families.medusa.drafter import MedusaConfig
from draftsmith.trainers import DraftModule, FitResult, draft_module, fit, fitting, train_config
from draftsmith.trainers.base import LEAST_STEPS
from draftsmith.trainers.steps import training_clock as clock
from support.cases import CycleData, cycle_target, interrupted
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only")
TIMED = train_config(Medusa)(max_steps=1000, max_minutes=10 / 60, lr=1e-2, warmup_steps=2, validate_every=3,
                          validation_nodes=4, checkpoint_every=4, drafter=MedusaConfig(num_heads=2),
                          precision="32-true", accelerator="cpu")


def train(out: Path, kind: type[DraftModule], **changes: Any) -> FitResult:
    return fit(kind(cycle_target(), dataclasses.replace(TIMED, **changes)), CycleData(), out, progress=False)


class Ticking:
    """A simulated clock: each training step takes a second, each measurement a hundred."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(DraftModule):
    """A module that trains with the simulated clock."""

    drafter_class = Medusa

    time = Ticking()
    rates: ClassVar[list[float]] = []

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        self.time.now += 1
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """Replace the clock: only steps and measurements take time."""
    Timed.time = Ticking()
    Timed.rates.clear()
    monkeypatch.setattr(clock, "time", Timed.time)
    measure = fitting.held_out_acceptance

    def slow(*arguments: Any) -> Any:
        Timed.time.now += 100
        return measure(*arguments)

    monkeypatch.setattr(fitting, "held_out_acceptance", slow)
    return Timed.time


@pytest.mark.usefixtures("ticking")
def test_a_run_ends_by_time_and_measurements_do_not_count(tmp_path: Path) -> None:
    result = train(tmp_path, Timed)
    assert (result.steps, result.seconds) == (10, 10.0)
    assert result.peak_memory_bytes > 10_000_000
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert stored["global_step"] == 10, "the last step is saved"
    assert stored["draftsmith"]["curve"]["steps"][-1]["step"] == 10
    factors = [rate / TIMED.lr for rate in Timed.rates]
    assert factors[0] == pytest.approx(0.5)
    assert factors[2:] == pytest.approx([0.5 * (1 + math.cos(math.pi * second / 10)) for second in range(2, 10)])


@pytest.mark.usefixtures("ticking")
def test_steps_end_a_run_before_its_time(tmp_path: Path) -> None:
    result = train(tmp_path, Timed, max_steps=5)
    assert (result.steps, result.seconds) == (5, 5.0)


@pytest.mark.usefixtures("ticking")
def test_a_run_makes_its_first_steps_whatever_the_time_and_goes_on_with_more_minutes(tmp_path: Path) -> None:
    short = train(tmp_path, Timed, max_minutes=1e-3, max_steps=None)
    assert (short.steps, short.curve[-1].step) == (LEAST_STEPS, LEAST_STEPS)
    # After the second step, the last of the warm-up, the rate falls step by step, not to nothing at once.
    assert [rate / TIMED.lr for rate in Timed.rates[1:]] == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * step / LEAST_STEPS)) for step in range(1, LEAST_STEPS)])
    assert train(tmp_path, Timed, max_minutes=1e-3, max_steps=None) == short
    more = train(tmp_path, Timed, max_steps=None)
    assert (more.steps, more.seconds) == (10, 10.0)
    assert more.curve[: len(short.curve)] == short.curve


@pytest.mark.usefixtures("ticking")
def test_a_run_killed_before_its_least_share_makes_it_up(tmp_path: Path) -> None:
    short = {"max_minutes": 1e-3, "checkpoint_every": 1}
    with interrupted(Timed, 2):
        train(tmp_path, Timed, **short)
    assert train(tmp_path, Timed, **short).steps == LEAST_STEPS


@pytest.mark.usefixtures("ticking")
def test_the_line_of_a_run_that_ends_by_time_shows_the_time_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)
    fit(Timed(cycle_target(), TIMED), CycleData(), tmp_path)
    lines = capfd.readouterr().err.rstrip("\n").split("\r")
    assert re.match(r"train: 2 of 1,000 step in \d+:\d\d, 0:08 left", next(one for one in lines if ": 2 of" in one))
    assert re.match(r"train: 10 of 1,000 step in \d+:\d\d, 0:00 left", lines[-1])


@pytest.mark.usefixtures("ticking")
def test_a_resumed_run_has_the_remaining_time(tmp_path: Path) -> None:
    with interrupted(Timed, 6):
        train(tmp_path, Timed)
    Timed.time.now = 5000.0
    result = train(tmp_path, Timed)
    assert (result.steps, result.seconds) == (10, 10.0), "4 seconds were spent at the checkpoint of step 4"
    Timed.time.now = 7000.0
    assert train(tmp_path, Timed) == result, "a finished run is not trained again"


def test_a_pause_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Ticking()
    monkeypatch.setattr(clock, "time", time)
    watch = clock.Clock()
    time.now = 3.0
    assert watch.seconds == 0.0, "not started yet"
    watch.start()
    time.now = 5.0
    with watch.paused():
        time.now = 50.0
        assert watch.seconds == 2.0
    time.now = 51.0
    assert watch.seconds == 3.0


def test_time_is_measured_without_a_limit_too(tmp_path: Path) -> None:
    result = train(tmp_path, draft_module(Medusa), max_steps=2, max_minutes=None)
    assert result.seconds > 0
