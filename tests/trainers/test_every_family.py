"""A training step of every family: the same loss and gradient however its conversations are divided over rows, batches
and processes (one stands for several; `test_processes.py` starts two), in rows of many thousand tokens, with states
computed again, and in bfloat16 within rounding; and how often it waits."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data.store.feature_shards import PackedBatch, Piece, packed, pad
from draftsmith.modules import DraftLM, Eagle3, Eagle3Config, Features, Medusa, Target, UserError
from draftsmith.modules.parts.decoder_block import GatedMLP
from draftsmith.recipes.counted_work import CountedStorages
from draftsmith.trainers import DraftModule, draft_module, train_config
from draftsmith.trainers.base import READ_EVERY
from draftsmith.trainers.checkpoints import FinishedStep, TrainingCurve
from draftsmith.trainers.objectives import COLUMNS, BatchLoss, describe, weighted_mean_loss
from support.cases import gradients, module_of
from support.devices.pretended_device import DEVICE, Waits, files, pretended_device
from support.devices.waits import moved, on_device
from support.families import CASES, randomised
from support.processes import python
from support.tiers import others_long
from torch import Tensor

LENGTHS = (16, 9, 12, 21, 8, 10)
Step = tuple[Tensor, dict[str, Tensor]]


def conversations(target: Target) -> list[Piece]:
    """Conversations of other lengths and other shares of labels; one is a window that starts amid its conversation."""
    made = torch.Generator().manual_seed(2)
    return [Piece(tokens_N=torch.randint(4, target.vocab_size, (length,), generator=made),
                  supervised_N=torch.arange(length) % (3 + place) > 1, first=5 if place == 1 else 0)
            for place, length in enumerate(LENGTHS)]


def equal(found: Step, expected: Step, largest: float | None = None) -> None:
    """Both to nine digits; gradients relative to the largest of all, as what clipping sees, or to this one."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-9, rtol=1e-9)
    assert found[1].keys() == expected[1].keys()
    largest = largest or max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-9 * max(1.0, largest), rtol=1e-9)


@pytest.mark.parametrize("name", others_long(CASES))
def test_rows_and_micro_batches_change_nothing(name: str, tiny_target_f64: Target) -> None:
    module, pieces = module_of(CASES[name], tiny_target_f64, training=False), conversations(tiny_target_f64)
    a, b, c, d, e, f = pieces
    expected = gradients(module, [pad(pieces)])
    equal(gradients(module, [pad([piece]) for piece in pieces]), expected)
    equal(gradients(module, [packed([[f, b, d], [e, a, c]], 48).to("cpu")]), expected)
    equal(gradients(module, [packed([[a, b, c, d, e, f]]).to("cpu")]), expected)
    equal(gradients(module, [packed([[d], [a, e]], 40).to("cpu"), packed([[c, f, b]], 32).to("cpu")]), expected)


def test_random_numbers_of_a_micro_batch_do_not_depend_on_the_processes() -> None:
    """Dropout and noise of global micro-batch 12 are the same whether one, two or three processes train."""
    drawn = []
    for world in (1, 2, 3):
        module = SimpleNamespace(config=SimpleNamespace(seed=7, accumulate=1), gathered=None, parameters=list,
                                 trainer=SimpleNamespace(world_size=world, strategy=None), global_rank=12 % world)
        DraftModule.on_train_batch_start(module, Features.from_rows([([1], [True])]), 12 // world)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_run_is_resumed_by_any_processes_that_read_as_many_micro_batches(tiny_target: Target) -> None:
    """With as many the steps hold the same conversations, and the next micro-batch is counted as these processes read
    them; with others they would not."""
    def module(devices: int, accumulate: int, strategy: str = "ddp") -> DraftModule:
        made = draft_module(Medusa)(tiny_target, train_config(Medusa)(
            devices=devices, strategy=strategy, accumulate=accumulate))
        made.configure_model()
        return made

    read = {"ready": 24, "started": 24, "processed": 24, "completed": 23}
    loops = {"fit_loop": {"epoch_loop.batch_progress": {"total": dict(read), "current": dict(read)}}}
    checkpoint: dict[str, Any] = {"global_step": 12, "loops": loops, "state_dict": module(2, 2).state_dict()}
    module(2, 2).on_save_checkpoint(checkpoint)
    with pytest.raises(UserError, match=r"other settings \(config.accumulate \* devices \* num_nodes is 8, was 4\); "
                                        "choose another --out folder"):
        module(4, 2).on_load_checkpoint(checkpoint)
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["total"] == read
    module(1, 4, "auto").on_load_checkpoint(checkpoint)
    expected = {"ready": 48, "started": 48, "processed": 48, "completed": 47}
    assert loops["fit_loop"]["epoch_loop.batch_progress"] == {"total": expected, "current": expected}
    module(4, 1, "deepspeed_stage_1").on_load_checkpoint(checkpoint)
    assert loops["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 12


DENSE = "draftsmith.modules.target.attention.segment_attention.DENSE_LENGTH"
SCRIPT = Path(__file__).resolve().parents[1] / "references" / "long_row.py"


def two_rows(target: Target) -> PackedBatch:
    """A row of three conversations, and one of a window that starts amid its conversation, padded."""
    def piece(length: int, first: int = 0) -> Piece:
        tokens_N = torch.randint(4, target.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
        return Piece(tokens_N=tokens_N, supervised_N=torch.arange(length) % 5 > 1, first=first)

    return packed([[piece(9), piece(14), piece(7)], [piece(19, first=6), piece(6)]], 33)


@pytest.mark.parametrize("name", others_long(
    [name for name in CASES if name not in ("mtp", "mtp-reduced")]))
def test_long_rows_learn_as_short_ones_do(name: str, tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a target's own head after the first one keep the mask of all positions."""
    module, batch = module_of(CASES[name], tiny_target_f64), two_rows(tiny_target_f64).to("cpu")
    expected = gradients(module, [batch])
    monkeypatch.setattr(DENSE, 0)
    monkeypatch.setattr("draftsmith.modules.families.draft_lm.drafter.DENSE_LENGTH", 0)
    monkeypatch.setattr(Features, "visible", None)
    equal(gradients(module, [batch]), expected, largest=1.0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("family", "bound"), [("eagle3", 400), ("kangaroo", 200)])
def test_a_step_on_32768_tokens_takes_memory_by_the_token(family: str, bound: int) -> None:
    """One boolean mask of all positions takes 1,024 MiB; the whole step took 275 MiB (EAGLE-3) and 129 (Kangaroo)."""
    answer = python(str(SCRIPT), family, "32768")
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert float(answer.stdout) < bound


LOSS, GRADIENT = 0.01, 0.08
"""Largest relative error of the loss, and of all gradients together in the Euclidean norm. A bfloat16 number is rounded
by up to 0.4 %."""


def two_conversations(target: Target) -> Features:
    """Two conversations in rows of their own."""
    rng = random.Random(5)
    return Features.from_rows([([rng.randrange(4, target.vocab_size) for _ in range(length)],
                                [place >= 2 for place in range(length)]) for length in (40, 31)])


def mixed_step(name: str, target: Target, *, half: bool) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient of each trained weight) of one micro-batch as Lightning computes it."""
    module = CASES[name].module(target)
    torch.manual_seed(7)
    module.configure_model()
    randomised(module.drafter)
    module.train()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        learned = module.loss(two_conversations(target))
    learned.total.backward()
    gradients = {key: weight.grad for key, weight in module.named_parameters() if weight.grad is not None}
    assert all(weight.dtype == torch.float32 for weight in module.parameters() if weight.requires_grad)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    return float(learned.total.detach()), gradients


@pytest.mark.parametrize("name", others_long(CASES))
def test_half_precision_trains_as_its_float32_twin(name: str, tiny_target: Target) -> None:
    (loss, gradients), (expected, wanted) = (mixed_step(name, tiny_target, half=half) for half in (True, False))
    assert gradients.keys() == wanted.keys()
    assert loss != expected
    whole = torch.cat([wanted[key].flatten() for key in wanted])
    apart = torch.cat([gradients[key].flatten() for key in wanted]) - whole
    assert abs(loss - expected) <= LOSS * abs(expected)
    # Rounding puts other tokens among a selector's candidates, and with them the places at which a choice is learned.
    most = 2 * GRADIENT if name == "block-selector" else GRADIENT
    assert float(apart.norm()) <= most * float(whole.norm())


def learns_again(name: str, target: Target) -> bool:
    """True for a family with layers whose states can be computed again."""
    drafter = CASES[name].make(target)
    return isinstance(drafter, DraftLM) or any(isinstance(part, GatedMLP) for part in drafter.modules())


def measured_gradients(module: DraftModule, rows: Features) -> tuple[dict[str, Tensor], int]:
    """(gradients of the trained weights by name, most bytes alive in the step)."""
    module.configure_model()
    module.drafter.train()
    torch.manual_seed(0)
    with CountedStorages() as count:
        module.loss(rows).total.backward()
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}, count.peak


@pytest.mark.parametrize("name", others_long(CASES))
def test_gradients_are_the_same_or_the_family_is_refused(name: str, tiny_target: Target) -> None:
    case, target = CASES[name], tiny_target
    wanted = case.module(target, activation_checkpointing=True)
    if not learns_again(name, target):
        with pytest.raises(UserError, match=r"the .* drafter has none; set train\.activation_checkpointing: false"):
            wanted.configure_model()
        return
    rows = two_rows(target).to("cpu")
    expected, _ = measured_gradients(case.module(target), rows)
    found, _ = measured_gradients(wanted, rows)
    assert set(found) == set(expected)
    for weight, gradient in expected.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-6, atol=1e-7, msg=f"{name}: {weight}")


def test_a_step_takes_less_memory(tiny_target: Target) -> None:
    rows, peaks = Features.from_rows([(torch.randint(4, 90, (400,)).tolist(), [True] * 400)] * 2), []
    for again in (False, True):
        config = train_config(Eagle3)(drafter=Eagle3Config(steps=6), objective="hard", activation_checkpointing=again)
        peaks.append(measured_gradients(draft_module(Eagle3)(tiny_target, config), rows)[1])
    assert peaks[1] < 0.8 * peaks[0]


READING = {**{name: {"modules/parts/causal_drafter.py": 1} for name in ("draft-lm-depths", "draft-lm-taps")},
           **{name: {"modules/families/falcon/recurrence.py": 1} for name in CASES if name.startswith("falcon")}}
"""Reads of cases whose step waits: a pass is as wide as the most mask tokens that were drawn for a row, and a recurrent
network takes as many steps as the longest segment has positions: many times the launches that the wait costs."""
UPLOADING = {"modules/target/partial_passes.py", "modules/families/mtp/drafter.py"}
"""Files whose uploads are empty: transformers makes a new cache of empty lists."""


def waits_of(name: str, target: Target, **settings: Any) -> Waits:
    """Reads and uploads of the second micro-batch: the target's pass, the drafter's and the loss, without gradients:
    torch's engine for them does not know the device that is not there."""
    with pretended_device() as waits:
        there = on_device(target)
        module = CASES[name].module(there, **settings)
        module.configure_model()
        moved(randomised(module.drafter), there)
        module.to(DEVICE).train()
        given = two_rows(target).to(DEVICE)
        for _ in range(2):
            waits.clear()
            with torch.no_grad():
                module.loss(given)
        return waits.copy()


@pytest.mark.parametrize("name", others_long(CASES))
def test_a_training_step_does_not_wait(name: str, tiny_target: Target) -> None:
    waits = waits_of(name, tiny_target)
    assert files(waits.reads) == READING.get(name, {}), waits.reads
    assert set(files(waits.uploads)) <= UPLOADING, waits.uploads


@pytest.mark.parametrize("objective", ["soft", "lk_hybrid"])
def test_objectives_with_a_teacher_do_not_wait(objective: str, tiny_target: Target) -> None:
    waits = waits_of("eagle3-reduced", tiny_target, objective=objective)
    assert not waits.reads + waits.uploads, (waits.reads, waits.uploads)


def test_figures_are_read_together() -> None:
    """Of so many steps at once; before that nothing crosses to the host."""
    with pretended_device() as waits:
        module = SimpleNamespace(unread=[], describe=describe, curve=TrainingCurve(), data_wait=0.0, logger=None,
                                 _learned=0.0, config=SimpleNamespace(max_steps=None))
        sums = torch.ones(2, len(COLUMNS), dtype=torch.float64).to(DEVICE)
        waits.clear()
        for number in range(READ_EVERY):
            weighted_mean_loss(sums, (1.0, 0.5))[1].clamp(min=1.0)
            module.unread.append(FinishedStep(number=number, learned=BatchLoss(sums, sums, (1.0, 0.5), (1, 2)),
                                              learning_rate=0.1, batches=()))
        assert not waits.reads + waits.uploads
        DraftModule.read_figures(module)  # type: ignore[arg-type]
        assert waits.reads.total() == 1
        assert (module.unread, module.curve.labels) == ([], 2 * READ_EVERY)
        DraftModule.read_figures(module)  # type: ignore[arg-type]
        assert waits.reads.total() == 1
