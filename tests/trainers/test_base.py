"""Shared training: it learns, resumes exactly, does not depend on how a step is divided, and reports its errors."""

import dataclasses
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    Drafter,
    Drafts,
    Features,
    Medusa,
    MedusaConfig,
    Target,
    UserError,
)
from draftsmith.modules.target.loading.model_parts import hash_weights
from draftsmith.trainers import DraftModule, FitResult, TrainConfig, draft_module, fit, train_config
from draftsmith.trainers.objectives import weighted_mean_loss
from support.cases import CYCLE, CycleData, cycle_rows, cycle_target, interrupted
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only")
SMALL = train_config(Medusa)(max_steps=8, lr=1e-2, warmup_steps=2, validate_every=3, validation_nodes=4,
                          checkpoint_every=2, drafter=MedusaConfig(num_heads=2), precision="32-true", accelerator="cpu")

PLAIN = draft_module(Medusa)


def config(**changes: Any) -> TrainConfig:
    return dataclasses.replace(SMALL, **changes)


def train(target: Target, out: Path, settings: TrainConfig = SMALL, data: CycleData | None = None,
          kind: type[DraftModule] = PLAIN) -> tuple[DraftModule, FitResult]:
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    counts[list(CYCLE)] = 5
    module = kind(target, settings, token_counts=counts)
    return module, fit(module, data or CycleData(), out, progress=False)


def weights(out: Path) -> dict[str, Tensor]:
    """Drafter weights of the newest checkpoint, that of the last step."""
    return torch.load(out / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def target() -> Target:
    return cycle_target()


def test_a_run_is_not_resumed_with_another_draft_vocabulary(target: Target, tmp_path: Path) -> None:
    settings = config(drafter=MedusaConfig(num_heads=2, vocabulary_size=30))
    train(target, tmp_path, settings)
    counts = torch.arange(target.vocab_size)
    module = PLAIN(target, settings, token_counts=counts)
    with pytest.raises(UserError, match=r"started with other settings \(draft_vocabulary is '[0-9a-f]+', was '"):
        fit(module, CycleData(), tmp_path, progress=False)


@pytest.mark.parametrize(("objective", "shape"),
                         [("hard", {}), ("soft", {"output": "copy"}), ("hard", {"vocabulary_size": 20})])
def test_an_interrupted_run_ends_in_the_same_bits(objective: Any, shape: dict[str, Any], target: Target,
                                                  tmp_path: Path) -> None:
    settings = config(accumulate=3, objective=objective, drafter=MedusaConfig(num_heads=2, **shape))
    _, whole = train(target, tmp_path / "whole", settings)
    # Micro-batch 1: before any checkpoint, amid an accumulation. 13: after the one of step 4, whose interval ends at 6.
    for at in (1, 13, 20):
        with interrupted(PLAIN, at):
            train(target, tmp_path / "parts", settings)
    module, parts = train(target, tmp_path / "parts", settings)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    machine = {"seconds": 0.0, "data_wait": 0.0, "peak_memory_bytes": 0}
    assert dataclasses.replace(parts, checkpoint=whole.checkpoint, **machine) == dataclasses.replace(whole, **machine)
    assert parts.checkpoint.read_bytes() == whole.checkpoint.read_bytes()
    best = {f"drafter.{name}": tensor for name, tensor in module.drafter.state_dict().items()}
    assert best.keys() == expected.keys()


def test_resuming_at_another_place_would_show(target: Target, tmp_path: Path) -> None:
    train(target, tmp_path / "whole")
    train(target, tmp_path / "other", config(seed=0, max_steps=8), CycleData(merge=2))
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "other")
    assert not all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_finished_run_is_not_trained_again(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = train(target, tmp_path)
    before = (tmp_path / "last.ckpt").read_bytes()
    monkeypatch.setattr(PLAIN, "training_step", lambda self, batch, batch_idx: pytest.fail("it was trained"))
    module, second = train(target, tmp_path)
    assert second == first
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert module.drafter.heads[0][0].linear.weight.any()


def test_signals_are_given_back_after_a_training_and_after_an_error(target: Target, tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    train(target, tmp_path / "whole", config(max_steps=2))
    assert [signal.getsignal(number) for number in numbers] == before
    with interrupted(PLAIN, 1):
        train(target, tmp_path / "parts")
    assert [signal.getsignal(number) for number in numbers] == before


CHOOSING = train_config(BlockDraft)(
    max_steps=3, lr=1e-2, warmup_steps=1, validate_every=3, validation_nodes=4, checkpoint_every=3, objective="soft",
    precision="32-true", accelerator="cpu", clip=0.05, drafter=BlockDraftConfig(
        block_size=3, num_layers=1, aligned="same", causal=False, correction="selector", rank=4))


@pytest.mark.parametrize(("drafter", "settings"), [(Medusa, config(clip=0.05)), (BlockDraft, CHOOSING)])
def test_accumulated_micro_batches_equal_one_batch(drafter: type[Drafter], settings: TrainConfig, target: Target,
                                                   tmp_path: Path) -> None:
    """Their counts of labels differ, so that a mean of means would differ; both are clipped. So do their shares of
    labels that are candidates."""
    kind = draft_module(drafter)
    train(target, tmp_path / "one", settings, CycleData(merge=3), kind)
    train(target, tmp_path / "three", dataclasses.replace(settings, accumulate=3), kind=kind)
    one, three = weights(tmp_path / "one"), weights(tmp_path / "three")
    for name, tensor in one.items():
        torch.testing.assert_close(three[name], tensor, atol=2e-5, rtol=1e-4)
    assert any(tensor.abs().max() > 1e-3 for tensor in one.values())


def test_the_gradient_is_that_of_the_weighted_mean(target: Target, tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Watched(DraftModule):
        drafter_class = Medusa

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            seen.append(self.drafter.heads[1][0].linear.weight.grad.clone())
            super().configure_gradient_clipping(*args, **kwargs)

    train(target, tmp_path, config(max_steps=1, accumulate=2), kind=Watched)
    drafter = Medusa.create(MedusaConfig(num_heads=2), target)
    total, count = torch.zeros(()), 0.0
    for number in (0, 1):
        features = target.encode(cycle_rows(number))
        drafts = drafter(features)
        for step, offset in enumerate(drafts.offsets):
            labels, valid = features.labels(offset)
            logits = drafter.project(drafts.hidden_BLKD[:, :, step][valid], step)
            total = total + 0.8**step * torch.nn.functional.cross_entropy(logits, labels[valid], reduction="sum")
            count += 0.8**step * float(valid.sum())
    (total / count).backward()
    torch.testing.assert_close(seen[0], drafter.heads[1][0].linear.weight.grad, atol=1e-6, rtol=1e-4)


class OffByOne(DraftModule):
    """A module that learns the token one position too far ahead."""

    drafter_class = Medusa

    def build_drafter(self) -> Medusa:
        drafter = super().build_drafter()
        drafter.forward = lambda features: Drafts(  # type: ignore[method-assign]
            hidden_BLKD=drafter._states(features.final()), offsets=(3, 4))
        return drafter


def first_head_accuracy(target: Target, module: DraftModule) -> float:
    features = target.encode(cycle_rows(77, rows=20))
    labels, valid = features.labels(2)
    states = module.drafter._states(features.final())[:, :, 0][valid]
    return float((module.drafter.project(states, 0).argmax(-1) == labels[valid]).float().mean())


def test_a_deterministic_text_is_learned_unless_labels_are_off_by_one(target: Target, tmp_path: Path) -> None:
    settings = config(max_steps=250, lr=2e-2, warmup_steps=10, validate_every=250, checkpoint_every=250,
                      drafter=MedusaConfig(num_heads=2, output="copy"))
    module, result = train(target, tmp_path / "right", settings)
    assert first_head_accuracy(target, module) > 0.95
    assert result.accepted_length > 2
    wrong, _ = train(target, tmp_path / "wrong", settings, kind=OffByOne)
    assert first_head_accuracy(target, wrong) < 0.5


def test_a_drafter_built_before_fit_borrows_from_where_the_target_is(target: Target, tmp_path: Path) -> None:
    bound: list[Target] = []

    class Watched(DraftModule):
        drafter_class = Medusa

        def build_drafter(self) -> Medusa:
            drafter = super().build_drafter()
            bind = drafter.bind
            drafter.bind = lambda target: (bound.append(target), bind(target))[1]  # type: ignore[method-assign]
            return drafter

    module = Watched(target, SMALL)
    module.configure_model()
    drafter = module.drafter
    fit(module, CycleData(), tmp_path, progress=False)
    assert module.drafter is drafter
    assert bound[0] is target


def test_weights_may_follow_progress_and_are_constant_within_a_step(target: Target, tmp_path: Path) -> None:
    asked, totals, seen = list[float](), list[Tensor](), list[tuple[Any, Tensor]]()

    class Scheduled(DraftModule):
        """The weight of the second head grows with progress."""

        drafter_class = Medusa

        def weights(self, steps: int) -> tuple[float, ...]:
            asked.append(self.progress_at(self.global_step))
            # As if time passed between two micro-batches.
            return (1.0, asked[-1] + 0.1 * len(asked))

        def training_step(self, batch: Features, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            assert self._pending is not None
            self.told = weighted_mean_loss(self._pending.sums_KC, self._pending.weights)
            totals.append(loss.detach() / 2)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            seen.append((sum(totals), self.told[0]))
            assert self.figures["loss"] == pytest.approx(float(self.told[0] / self.told[1]))
            totals.clear()

    train(target, tmp_path, config(accumulate=2, max_steps=4), kind=Scheduled)
    assert asked == [0.0, 0.25, 0.5, 0.75], "once an optimizer step"
    for summed, told in seen:
        torch.testing.assert_close(float(summed), float(told), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("objective", ["reverse_kl", "jsd", "tvd", "lk_alpha", "lk_hybrid"])
def test_every_objective_lowers_its_loss(objective: Any, target: Target, tmp_path: Path) -> None:
    settings = config(objective=objective, max_steps=30, drafter=MedusaConfig(num_heads=2, output="copy"))
    module, result = train(target, tmp_path, settings)
    assert result.curve[-1].loss < 0.9 * result.curve[1].loss
    assert 0 < module.figures["head1/alpha"] < 1


class Blind(Medusa):
    """A drafter that reads no target states."""

    reads_states = False

    def forward(self, features: Features) -> Drafts:
        final_BLD = self.output_rows().weight_QD[features.tokens_BL]
        return super().forward(dataclasses.replace(features, final_BLD=final_BLD))


@pytest.mark.parametrize(("settings", "passes"), [({}, 0), ({"objective": "soft"}, 3)])
def test_the_target_runs_in_a_step_only_when_it_is_read(settings: dict[str, Any], passes: int, target: Target,
                                                        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = target.encode
    monkeypatch.setattr(target, "encode", lambda features, taps=(): (encoded.append(1), encode(features, taps))[1])
    train(target, tmp_path, config(max_steps=3, **settings), kind=draft_module(Blind))
    assert len(encoded) == passes + 2, "the two held-out rows are decoded all the same"


def test_the_target_is_untouched_and_in_no_checkpoint(target: Target, tmp_path: Path) -> None:
    before = hash_weights(target.model)
    module, _ = train(target, tmp_path)
    assert hash_weights(target.model) == before
    assert all(parameter.grad is None for parameter in target.model.parameters())
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert set(stored["state_dict"]) == {f"drafter.{name}" for name in module.drafter.state_dict()}
    assert (tmp_path / "last.ckpt").stat().st_size < 100_000


@pytest.mark.parametrize("output", ["shared", "copy"])
def test_half_precision_arithmetic_keeps_float32_weights(output: Any, target: Target, tmp_path: Path) -> None:
    settings = config(precision="bf16-mixed", objective="soft", drafter=MedusaConfig(num_heads=2, output=output))
    module, _ = train(target, tmp_path, settings)
    for parameter in module.drafter.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all()
    train(target, tmp_path / "full", dataclasses.replace(settings, precision="32-true"))
    expected, found = weights(tmp_path / "full"), weights(tmp_path)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=0.03, rtol=0.05)


def test_stored_states_train_like_computed_ones(target: Target, tmp_path: Path) -> None:
    class Stored(CycleData):
        def on_before_batch_transfer(self, batch: Features, dataloader_idx: int) -> Features:
            return target.encode(batch)

    train(target, tmp_path / "online")
    train(target, tmp_path / "stored", data=Stored())
    online, stored = weights(tmp_path / "online"), weights(tmp_path / "stored")
    assert all(torch.equal(stored[name], tensor) for name, tensor in online.items())


class Unsupervised(CycleData):
    """Data without answers."""

    def on_before_batch_transfer(self, batch: Features, dataloader_idx: int) -> Features:
        return dataclasses.replace(batch, supervised_BL=torch.zeros_like(batch.supervised_BL))


def test_a_run_without_supervision_stops(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to learn in the first 8 optimizer steps: no token is supervised"):
        train(target, tmp_path, config(max_steps=100), Unsupervised())


def test_a_vocabulary_without_the_texts_tokens_stops(target: Target, tmp_path: Path) -> None:
    settings = config(drafter=MedusaConfig(vocabulary_size=4))
    module = PLAIN(target, settings, token_counts=torch.arange(target.vocab_size) < 10)
    with pytest.raises(UserError, match=r"all \d+ labels lie outside the reduced vocabulary; raise vocabulary_size"):
        fit(module, CycleData(), tmp_path, progress=False)


def test_another_runs_checkpoint_is_refused(target: Target, tmp_path: Path) -> None:
    train(target, tmp_path)
    with pytest.raises(UserError, match=r"other settings \(config.lr is 0.5, was 0.01\); choose another --out"):
        train(target, tmp_path, config(lr=0.5))


def test_a_damaged_checkpoint_is_refused(target: Target, tmp_path: Path) -> None:
    train(target, tmp_path)
    stored = (tmp_path / "last.ckpt").read_bytes()
    (tmp_path / "last.ckpt").write_bytes(stored[: len(stored) // 2])
    with pytest.raises(UserError, match=r"last.ckpt is damaged .* delete it"):
        train(target, tmp_path)


@pytest.mark.parametrize(("change", "named"), [
    (lambda stored, weight: stored.pop("draftsmith"), "draftsmith"),
    (lambda stored, weight: stored["draftsmith"].pop("seconds"), "seconds"),
    (lambda stored, weight: stored["state_dict"].pop(weight), "its weight {weight}"),
    (lambda stored, weight: stored["state_dict"].update({weight: torch.zeros(3)}), "its weight {weight}"),
    (lambda stored, weight: stored["state_dict"].update({weight: "x"}), "its weight {weight}"),
], ids=["no settings", "no counter", "no weight", "another shape", "no tensor"])
def test_a_checkpoint_that_torch_can_read_and_training_cannot_is_refused(
    change: Callable[[dict[str, Any], str], Any], named: str, target: Target, tmp_path: Path
) -> None:
    train(target, tmp_path)
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    weight = next(iter(stored["state_dict"]))
    change(stored, weight)
    torch.save(stored, tmp_path / "last.ckpt")
    said = named.format(weight=re.escape(weight))
    with pytest.raises(UserError, match=rf"damaged \({said} is not as it was written\); delete it to start"):
        train(target, tmp_path)


def test_a_run_without_held_out_text_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no held-out text"):
        train(target, tmp_path, data=CycleData(held_out=0))


def test_a_folder_that_cannot_be_made_is_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/out: Not a directory; something else is in the way"):
        train(target, tmp_path / "file" / "out")


def test_a_reduced_vocabulary_needs_counts(target: Target) -> None:
    with pytest.raises(UserError, match="vocabulary_size is 20, but the tokens of the training data were not counted"):
        PLAIN(target, config(drafter=MedusaConfig(vocabulary_size=20)))


@pytest.mark.parametrize(("instructions", "accelerator", "expected"), [
    ({"avx512_bf16": True}, "auto", "bf16-mixed"),
    ({"amx_bf16": True, "avx512_bf16": False}, "cpu", "bf16-mixed"),
    ({"avx512_bf16": False, "avx512_f": True}, "cpu", "32-true"),
    ({}, "auto", "32-true"),
])
def test_the_machine_chooses_the_arithmetic(instructions: dict[str, bool], accelerator: str, expected: str,
                                            monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    seen = []

    class Watched(DraftModule):
        drafter_class = Medusa

        def training_step(self, batch: Features, batch_idx: int) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

    settings = config(precision="auto", accelerator=accelerator, max_steps=1)
    _, result = train(target, tmp_path, settings, kind=Watched)
    assert result.precision == expected
    assert seen == [expected == "bf16-mixed"]
