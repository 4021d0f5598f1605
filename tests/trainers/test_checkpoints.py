"""A step with a wrong loss ends the run, which names and keeps its rows; a full disk; runs that end by time, their
learning rate, and the remaining time after resuming."""

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftsmith.data.datamodule import BatchConfig, DraftDataModule
from draftsmith.modules import Features, Medusa, MedusaConfig, Target, UserError, progress
from draftsmith.trainers import DraftModule, FitResult, base, draft_module, fit, fitting, train_config
from draftsmith.trainers import checkpoints as clock
from draftsmith.trainers.base import LEAST_STEPS
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors.torch import load_file
from support.cases import CycleData, cycle_rows, cycle_target, interrupted
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only")
SETTINGS = train_config(Medusa)(max_steps=16, lr=1e-2, warmup_steps=1, validate_every=100, validation_nodes=4,
                             checkpoint_every=6, accumulate=2, drafter=MedusaConfig(num_heads=2), precision="32-true",
                             accelerator="cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    return cycle_target()


class Broken(DraftModule):
    """A module whose loss is not a number in one micro-batch."""

    drafter_class, wrong = Medusa, 28

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        if batch_idx == self.wrong:
            self.drafter.heads[0][0].linear.bias.data.fill_(float("nan"))
        return super().training_step(batch, batch_idx)


def trained(out: Path) -> dict[str, Tensor]:
    """Weights of the newest checkpoint."""
    return torch.load(out / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture
def read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are read every tenth step, as on an accelerator."""
    monkeypatch.setattr(base, "AT_ONCE", ())


@pytest.mark.parametrize("later", [False, True])
def test_a_wrong_step_stops_names_its_rows_and_keeps_them(later: bool, target: Target, tmp_path: Path,
                                                          request: pytest.FixtureRequest) -> None:
    """Also if it is read before a checkpoint holds what came of it: the next one after step 15 is that of the last."""
    if later:
        request.getfixturevalue("read_later")
    with pytest.raises(UserError, match=r"the loss became nan at optimizer step 15 \(micro-batches 28 to 29; \S+ holds "
                       r"them\); lower lr .*train again into an empty --out folder$"):
        fit(Broken(target, SETTINGS), CycleData(), tmp_path, progress=False)
    kept = load_file(tmp_path / "wrong-step-000015-rank-0.safetensors")
    for number in (28, 29):
        wanted = cycle_rows(number)
        for kind in ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL"):
            assert torch.equal(kept[f"{number}.{kind}"], getattr(wanted, kind))
    assert len(kept) == 8, "the batches of this step alone"
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 12


def test_figures_that_are_read_later_are_all_logged(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    request: pytest.FixtureRequest) -> None:
    logged: dict[str, list[tuple[int | None, float]]] = {"now": [], "later": []}
    for name in logged:
        monkeypatch.setattr(TensorBoardLogger, "log_metrics", lambda _self, metrics, step=None, name=name: (
            logged[name].append((step, metrics["loss"])) if "loss" in metrics else None))
        fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path / name, progress=False)
        request.getfixturevalue("read_later")
    assert [step for step, _ in logged["now"]] == list(range(1, 17))
    assert logged["later"] == logged["now"]
    assert all(torch.equal(tensor, trained(tmp_path / "now")[name])
               for name, tensor in trained(tmp_path / "later").items())


def test_the_rows_of_distilled_data_have_names(tiny_run: Path) -> None:
    data = DraftDataModule(tiny_run / "data", BatchConfig(row_length=64, rows_per_batch=2, states="computed"))
    for number in range(4):
        batch, names = data.packed_batch(number).to("cpu"), data.rows_of(number)
        assert len(names) == sum(int(row.max()) + 1 for row in batch.segments_BL)
        starts = iter(names)
        for tokens_L, segments_L in zip(batch.tokens_BL, batch.segments_BL, strict=True):
            for segment in range(int(segments_L.max()) + 1):
                file, row = next(starts).split(":")
                shard = data.train.shards[data.train.files.index(file)]
                first, stop = shard.span(int(row))
                piece = tokens_L[segments_L == segment]
                assert torch.equal(piece, shard.tokens_T[first:stop][: len(piece)].long())


def test_a_run_names_the_rows_of_a_wrong_step(copied_run: Path, target: Target) -> None:
    data = DraftDataModule(copied_run / "data", BatchConfig(row_length=128, rows_per_batch=4, states="computed"))
    module = type("Fourth", (Broken,), {"wrong": 3})(target, dataclasses.replace(SETTINGS, accumulate=1))
    with pytest.raises(UserError, match=r"the loss became nan at optimizer step 4 \(rows train-0\d+\.safetensors:\d+, "
                       r".*(, \d+ more)?; .*wrong-step-000004-rank-0.safetensors holds them\); lower lr .* folder$"):
        fit(module, data, copied_run / "train-again", progress=False)


def test_a_run_is_not_resumed_with_another_number_of_steps_between_checkpoints(target: Target, tmp_path: Path) -> None:
    fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path, progress=False)
    with pytest.raises(UserError, match=r"config.checkpoint_every is 7, was 6"):
        fit(draft_module(Medusa)(target, dataclasses.replace(SETTINGS, checkpoint_every=7)), CycleData(), tmp_path,
            progress=False)


def test_a_full_disk_ends_a_training_that_then_resumes_exactly(target: Target, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    fit(draft_module(Medusa)(target, SETTINGS), CycleData(), tmp_path / "calm", progress=False)
    out, writing = tmp_path / "out", Path.write_bytes

    def full(self: Path, content: Any) -> int:
        if "last.ckpt" in self.name and (out / "last.ckpt").exists():
            writing(self, bytes(content)[:100])
            raise OSError(28, "No space left on device")
        return writing(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match=r"cannot write \S+last.ckpt: No space left on device; make room .*"
                           r"then start again: finished work is kept"):
            fit(draft_module(Medusa)(target, SETTINGS), CycleData(), out, progress=False)
    assert not list(out.rglob("*.partial"))
    assert fit(draft_module(Medusa)(target, SETTINGS), CycleData(), out, progress=False).steps == 16
    assert all(torch.equal(tensor, trained(tmp_path / "calm")[name]) for name, tensor in trained(out).items())


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
