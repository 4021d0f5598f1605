"""A step with a wrong loss ends the run, which names and keeps its rows; checkpoints by time; a full disk."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from draftsmith.data.batches.datamodule import BatchConfig, DraftDataModule
from draftsmith.modules import Features, MedusaConfig, Target, UserError
from draftsmith.trainers import MedusaModule, MedusaTrainConfig, callbacks, fit
from draftsmith.trainers.losses.metrics import COLUMNS
from draftsmith.trainers.steps.step_guard import FEWEST, StepGuard
from draftsmith.trainers.steps.unread_steps import READ_EVERY, UnreadSteps
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors.torch import load_file
from support.cycle import CycleData, cycle_rows, cycle_target
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only")
SETTINGS = MedusaTrainConfig(max_steps=16, lr=1e-2, warmup_steps=1, validate_every=100, validation_nodes=4,
                             checkpoint_every=6, accumulate=2, drafter=MedusaConfig(num_heads=2), precision="32-true",
                             accelerator="cpu", spike=3.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return cycle_target()


class Spiked(MedusaModule):
    """A module whose loss is 100 times too large in some micro-batches."""

    at: tuple[int, ...] = (28,)

    def loss(self, features: Features) -> Any:
        found = super().loss(features)
        if self.now not in self.at:
            return found
        scale = torch.ones_like(found.sums_KC)
        scale[:, COLUMNS.index("loss")] = 100
        return found._replace(total=100 * found.total, sums_KC=found.sums_KC * scale)

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        self.now = batch_idx
        return super().training_step(batch, batch_idx)


def spiked(target: Target, out: Path, *at: int, **changes: Any) -> Any:
    module = Spiked(target, dataclasses.replace(SETTINGS, **changes))
    module.at = at
    return fit(module, CycleData(), out, progress=False)


def trained(out: Path) -> dict[str, Tensor]:
    """Weights of the newest checkpoint."""
    return torch.load(out / "last.ckpt", weights_only=True)["state_dict"]


def test_a_spike_stops_names_its_rows_and_keeps_them(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is .*, \d+\.\d times the median of the last 14 steps, at optimizer "
                       r"step 15 \(micro-batches 28 to 29; \S+ holds them\); lower lr .*raise spike \(now 3.0\)"):
        spiked(target, tmp_path, 28)
    kept = load_file(tmp_path / "wrong-step-000015-rank-0.safetensors")
    for number in (28, 29):
        wanted = cycle_rows(number)
        for kind in ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL"):
            assert torch.equal(kept[f"{number}.{kind}"], getattr(wanted, kind))
    assert len(kept) == 8, "the batches of this step alone"


def test_a_spike_stops_a_resumed_run_at_the_same_step_and_a_larger_bound_goes_on(
    target: Target, tmp_path: Path
) -> None:
    spiked(target, tmp_path / "calm", 28, spike=None)
    for _ in range(2):
        # The second time it goes on from step 12: the losses before it are in the checkpoint.
        with pytest.raises(UserError, match=r"of the last 14 steps, at optimizer step 15"):
            spiked(target, tmp_path / "out", 28)
    spiked(target, tmp_path / "out", 28, spike=1000.0)
    assert all(torch.equal(tensor, trained(tmp_path / "calm")[name]) for name, tensor in
               trained(tmp_path / "out").items())


@pytest.fixture
def read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are read every tenth step, as on an accelerator."""
    monkeypatch.setattr(UnreadSteps, "due", property(lambda unread: len(unread.steps) >= READ_EVERY))


@pytest.mark.usefixtures("read_later")
def test_a_spike_that_is_read_later_names_its_own_step_and_rows(target: Target, tmp_path: Path) -> None:
    """Before a checkpoint holds what came of it: the next one after step 15 is that of the last step, 16."""
    with pytest.raises(UserError, match=r"of the last 14 steps, at optimizer step 15 \(micro-batches 28 to 29; "):
        spiked(target, tmp_path, 28)
    kept = load_file(tmp_path / "wrong-step-000015-rank-0.safetensors")
    assert torch.equal(kept["28.tokens_BL"], cycle_rows(28).tokens_BL)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 12


def test_figures_that_are_read_later_are_all_logged(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    logged: dict[str, list[tuple[int | None, float]]] = {"now": [], "later": []}
    for name in logged:
        monkeypatch.setattr(TensorBoardLogger, "log_metrics", lambda _self, metrics, step=None, name=name: (
            logged[name].append((step, metrics["loss"])) if "loss" in metrics else None))
        spiked(target, tmp_path / name, spike=None)
        request.getfixturevalue("read_later")
    assert [step for step, _ in logged["now"]] == list(range(1, 17))
    assert logged["later"] == logged["now"]
    assert all(torch.equal(tensor, trained(tmp_path / "now")[name])
               for name, tensor in trained(tmp_path / "later").items())


def test_early_losses_and_ordinary_ones_do_not_stop(target: Target, tmp_path: Path) -> None:
    assert spiked(target, tmp_path, 2 * FEWEST - 2).steps == 16, "fewer losses than a median needs"
    guard = StepGuard(2.0)
    for loss in [1.0] * 8 + [50.0] * 2:
        assert not guard.is_wrong(loss)
        guard.pass_step(loss)
    assert not guard.is_wrong(2.0)
    assert guard.is_wrong(2.01)
    assert guard.is_wrong(math.inf)
    assert StepGuard(None).is_wrong(math.nan)
    assert not StepGuard(None).is_wrong(1e30)


def test_the_rows_of_distilled_data_have_names(tiny_run: Path) -> None:
    data = DraftDataModule(tiny_run / "data", BatchConfig(row_length=64, rows_per_batch=2, states="computed"))
    for number in range(4):
        batch, names = data.micro_batch(number), data.rows_of(number)
        assert len(names) == sum(int(row.max()) + 1 for row in batch.segments_BL)
        starts = iter(names)
        for tokens_L, segments_L in zip(batch.tokens_BL, batch.segments_BL, strict=True):
            for segment in range(int(segments_L.max()) + 1):
                file, row = next(starts).split(":")
                shard = data.train.shards[data.train.files.index(file)]
                first, stop = shard.span(int(row))
                piece = tokens_L[segments_L == segment]
                assert torch.equal(piece, shard.tokens_T[first:stop][: len(piece)].long())


def test_a_run_names_the_rows_of_a_wrong_step(
    copied_run: Path, target: Target
) -> None:
    class Broken(MedusaModule):
        def training_step(self, batch: Features, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                self.drafter.heads[0][0].linear.bias.data.fill_(float("nan"))
            return super().training_step(batch, batch_idx)

    data = DraftDataModule(copied_run / "data", BatchConfig(row_length=128, rows_per_batch=4, states="computed"))
    module = Broken(target, dataclasses.replace(SETTINGS, accumulate=1, spike=None))
    with pytest.raises(UserError, match=r"the loss became nan at optimizer step 4 \(rows train-0\d+\.safetensors:\d+, "
                       r".*(, \d+ more)?; .*wrong-step-000004-rank-0.safetensors holds them\); lower lr .* folder$"):
        fit(module, data, copied_run / "train-again", progress=False)


# Checkpoints by time -------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_saved_after_so_many_minutes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved, save = [0.0], [], lightning.Trainer.save_checkpoint

    def noted(self: lightning.Trainer, path: Path) -> None:
        saved.append(self.global_step)
        save(self, path)

    class Slow(MedusaModule):
        """Every step takes 25 seconds."""

        def training_step(self, batch: Features, batch_idx: int) -> Tensor:
            now[0] += 25.0
            return super().training_step(batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.time, "monotonic", lambda: now[0])
        patch.setattr(lightning.Trainer, "save_checkpoint", noted)
        settings = dataclasses.replace(SETTINGS, accumulate=1, max_steps=10, checkpoint_every=8, checkpoint_minutes=1.0)
        fit(Slow(target, settings), CycleData(), tmp_path / "timed", progress=False)
    assert saved == [3, 6, 8, 10], "after 75 seconds each, then by step, then the last"
    plain = dataclasses.replace(settings, checkpoint_minutes=None)
    fit(MedusaModule(target, plain), CycleData(), tmp_path / "plain", progress=False)
    assert all(torch.equal(tensor, trained(tmp_path / "plain")[name])
               for name, tensor in trained(tmp_path / "timed").items())


def test_a_run_resumes_with_another_time_between_checkpoints(target: Target, tmp_path: Path) -> None:
    fit(MedusaModule(target, SETTINGS), CycleData(), tmp_path, progress=False)
    changed = dataclasses.replace(SETTINGS, checkpoint_minutes=5.0, spike=9.0)
    assert fit(MedusaModule(target, changed), CycleData(), tmp_path, progress=False).steps == 16
    with pytest.raises(UserError, match=r"config.checkpoint_every is 7, was 6"):
        fit(MedusaModule(target, dataclasses.replace(SETTINGS, checkpoint_every=7)), CycleData(), tmp_path,
            progress=False)


def test_a_full_disk_ends_a_training_that_then_resumes_exactly(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(MedusaModule(target, SETTINGS), CycleData(), tmp_path / "calm", progress=False)
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
            fit(MedusaModule(target, SETTINGS), CycleData(), out, progress=False)
    assert not list(out.rglob("*.partial"))
    assert fit(MedusaModule(target, SETTINGS), CycleData(), out, progress=False).steps == 16
    assert all(torch.equal(tensor, trained(tmp_path / "calm")[name]) for name, tensor in trained(out).items())


@pytest.mark.parametrize(("changes", "message"), [
    ({"spike": 1.0}, r"spike must be above 1, the median itself, got 1.0; try 4"),
    ({"checkpoint_minutes": 0.0}, r"checkpoint_minutes must be above 0, got 0.0"),
])
def test_settings_out_of_bounds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SETTINGS, **changes)
