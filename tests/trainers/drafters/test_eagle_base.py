"""EAGLE's draft steps in training: the first one alone at the start of a run, all of them afterwards, each weighted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import Eagle3Config, Features, UserError
from draftsmith.modules.interfaces.drafter import Drafts
from draftsmith.trainers import Eagle3Module, Eagle3TrainConfig, fit
from support.cycle import CycleData, cycle_rows, cycle_target

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only")


def config(**changes: Any) -> Eagle3TrainConfig:
    given = {"max_steps": 8, "lr": 1e-3, "warmup_steps": 2, "validate_every": 8, "validation_nodes": 4, "accumulate": 2,
             "checkpoint_every": 8, "precision": "32-true", "accelerator": "cpu", "drafter": Eagle3Config(steps=3)}
    return Eagle3TrainConfig(**{**given, **changes})


class Watched(Eagle3Module):
    """Keeps the number of draft steps of each micro-batch."""

    def training_drafts(self, features: Features) -> tuple[Drafts, Features]:
        found, features = super().training_drafts(features)
        self.seen = [*getattr(self, "seen", []), len(found.offsets)]
        return found, features


@pytest.mark.parametrize(("share", "alone"), [(0.0, 0), (0.5, 4), (0.6, 5)])
def test_the_first_step_is_trained_alone_for_its_share(share: float, alone: int, tmp_path: Path) -> None:
    module = Watched(cycle_target(), config(first_step_share=share))
    fit(module, CycleData(), tmp_path, progress=False)
    assert module.seen == [1] * (2 * alone) + [3] * (2 * (8 - alone)), "micro-batches of a step must agree"


def test_its_loss_is_that_of_a_drafter_with_one_step() -> None:
    target = cycle_target()
    both = Eagle3Module(target, config(first_step_share=0.5)), Eagle3Module(target, config(
        drafter=Eagle3Config(steps=1)))
    for module in both:
        module.configure_model()
        module.train()
    found, expected = (module.loss(cycle_rows(3)) for module in both)
    assert found.offsets == expected.offsets == (2,)
    torch.testing.assert_close(found.total, expected.total)


@pytest.mark.parametrize(("given", "weights"), [
    (None, (1.0, 0.5, 0.25)), ((1.0, 2.0, 0.0), (1.0, 2.0, 0.0)), ((1.0, 0.3), (1.0, 0.3, 0.3))])
def test_each_step_has_its_weight(given: tuple[float, ...] | None, weights: tuple[float, ...]) -> None:
    module = Eagle3Module(cycle_target(), config(decay=0.5, step_weights=given))
    module.configure_model()
    module.train()
    learned = module.loss(cycle_rows(3))
    assert learned.weights == weights
    parts = [float(row[2]) for row in learned.sums_KC]
    expected = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    assert float(learned.total.detach()) == pytest.approx(expected)


@pytest.mark.parametrize(("changes", "said"), [
    ({"first_step_share": 1.0}, "first_step_share must be at least 0 and below 1, got 1.0; 0 trains all"),
    ({"step_weights": ()}, r"the first above 0 and none negative, got \[\]"),
    ({"step_weights": (0.0, 1.0)}, r"the first above 0 and none negative, got \[0.0, 1.0\]"),
    ({"step_weights": (1.0, -1.0)}, r"got \[1.0, -1.0\]")])
def test_wrong_values_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(**changes)
