"""EAGLE's draft steps in training: each has its weight."""

from typing import Any

import pytest
from draftsmith.modules import Eagle3Config, EagleConfig
from draftsmith.trainers import Eagle3Module, Eagle3TrainConfig, EagleModule, EagleTrainConfig
from support.cycle import cycle_rows, cycle_target


@pytest.mark.parametrize(("kind", "config", "shape", "weights"), [
    (Eagle3Module, Eagle3TrainConfig, Eagle3Config, (1.0, 0.8, 0.8**2)),
    (EagleModule, EagleTrainConfig, EagleConfig, (1.0, 1.0, 1.0))])
def test_each_step_has_its_weight(kind: Any, config: Any, shape: Any, weights: tuple[float, ...]) -> None:
    target = cycle_target()
    module = kind(target, config(drafter=shape(steps=3)))
    module.configure_model()
    module.train()
    learned = module.loss(target.encode(cycle_rows(3), module.drafter.taps))
    assert learned.weights == weights
    parts = [float(row[2]) for row in learned.sums_KC]
    expected = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    assert float(learned.total.detach()) == pytest.approx(expected)
