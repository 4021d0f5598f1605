"""A training step waits for its device as often as its family must, and reads figures every few steps: the rest is
enqueued."""

from typing import Any

import pytest
import torch
from draftsmith.data.store.collate import PackedBatch, Piece, packed
from draftsmith.modules import Target
from draftsmith.trainers.losses.metrics import weighted_mean_loss
from draftsmith.trainers.steps.checkpoints import READ_EVERY, FinishedStep, StepGuard
from support.devices.pretended_device import DEVICE, Waits, files, pretended_device
from support.devices.waits import moved, on_device
from support.families import CASES, randomised
from support.tiers import others_long

READING = {"draft-lm-depths": {"modules/parts/causal_drafter.py": 1},
           **{name: {"modules/families/falcon/recurrence.py": 1} for name in CASES if name.startswith("falcon")}}
"""Reads of cases whose step waits: a pass is as wide as the most mask tokens that were drawn for a row, and a recurrent
network takes as many steps as the longest segment has positions: many times the launches that the wait costs."""
UPLOADING = {"modules/target/partial_passes.py", "modules/families/mtp/drafter.py"}
"""Files whose uploads are empty: transformers makes a new cache of empty lists."""


def batch() -> PackedBatch:
    def piece(length: int) -> Piece:
        return Piece(tokens_N=torch.randint(4, 90, (length,)), supervised_N=torch.arange(length) >= 3)

    return packed([[piece(12), piece(9)], [piece(20)]], 24)


def waits_of(name: str, target: Target, **settings: Any) -> Waits:
    """Reads and uploads of the second micro-batch: the target's pass, the drafter's and the loss, without gradients:
    torch's engine for them does not know the device that is not there."""
    with pretended_device() as waits:
        there = on_device(target)
        module = CASES[name].module(there, **settings)
        module.configure_model()
        moved(randomised(module.drafter), there)
        module.to(DEVICE).train()
        given = batch().to(DEVICE)
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
        guard = StepGuard()
        sums = torch.ones(2, 11, dtype=torch.float64).to(DEVICE)
        waits.clear()
        for number in range(READ_EVERY):
            assert not guard.due
            weighted_mean_loss(sums, (1.0, 0.5))[1].clamp(min=1.0)
            guard.unread.append(FinishedStep(number=number, sums_KC=sums, weights=(1.0, 0.5), offsets=(1, 2),
                                             learning_rate=0.1, batches=()))
        assert not waits.reads + waits.uploads
        assert guard.due
        found = list(guard.read())
        assert waits.reads.total() == 1
        assert [step.number for step, _ in found] == list(range(READ_EVERY))
        assert all(sums.device.type == "cpu" for _, sums in found)
        assert not guard.due
        assert list(guard.read()) == []
