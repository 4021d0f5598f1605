"""A step with a wrong loss ends the run, which names and keeps its rows; a full disk."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.batches.datamodule import BatchConfig, DraftDataModule
from draftsmith.modules import Features, Medusa, MedusaConfig, Target, UserError
from draftsmith.trainers import DraftModule, draft_module, fit, train_config
from draftsmith.trainers.steps.checkpoints import READ_EVERY, StepGuard
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors.torch import load_file
from support.cases import CycleData, cycle_rows, cycle_target
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

    drafter_class = Medusa

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        if batch_idx == 28:
            self.drafter.heads[0][0].linear.bias.data.fill_(float("nan"))
        return super().training_step(batch, batch_idx)


def trained(out: Path) -> dict[str, Tensor]:
    """Weights of the newest checkpoint."""
    return torch.load(out / "last.ckpt", weights_only=True)["state_dict"]


def test_a_wrong_step_stops_names_its_rows_and_keeps_them(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss became nan at optimizer step 15 \(micro-batches 28 to 29; \S+ holds "
                       r"them\); lower lr .*train again into an empty --out folder$"):
        fit(Broken(target, SETTINGS), CycleData(), tmp_path, progress=False)
    kept = load_file(tmp_path / "wrong-step-000015-rank-0.safetensors")
    for number in (28, 29):
        wanted = cycle_rows(number)
        for kind in ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL"):
            assert torch.equal(kept[f"{number}.{kind}"], getattr(wanted, kind))
    assert len(kept) == 8, "the batches of this step alone"


@pytest.fixture
def read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are read every tenth step, as on an accelerator."""
    monkeypatch.setattr(StepGuard, "due", property(lambda guard: len(guard.unread) >= READ_EVERY))


@pytest.mark.usefixtures("read_later")
def test_a_wrong_step_that_is_read_later_names_its_own_rows(target: Target, tmp_path: Path) -> None:
    """Before a checkpoint holds what came of it: the next one after step 15 is that of the last step, 16."""
    with pytest.raises(UserError, match=r"nan at optimizer step 15 \(micro-batches 28 to 29; "):
        fit(Broken(target, SETTINGS), CycleData(), tmp_path, progress=False)
    kept = load_file(tmp_path / "wrong-step-000015-rank-0.safetensors")
    assert torch.equal(kept["28.tokens_BL"], cycle_rows(28).tokens_BL)
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
    class Fourth(DraftModule):
        drafter_class = Medusa

        def training_step(self, batch: Features, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                self.drafter.heads[0][0].linear.bias.data.fill_(float("nan"))
            return super().training_step(batch, batch_idx)

    data = DraftDataModule(copied_run / "data", BatchConfig(row_length=128, rows_per_batch=4, states="computed"))
    module = Fourth(target, dataclasses.replace(SETTINGS, accumulate=1))
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
