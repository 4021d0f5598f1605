"""Losses and gradients of a training module in float64, for exact comparisons."""

import torch
from draftsmith.modules import Features, Target
from draftsmith.trainers import DraftModule
from draftsmith.trainers.losses.metrics import weighted_mean_loss
from support.families import CASES, randomised
from torch import Tensor


def module_of(name: str, target: Target, *, training: bool = True) -> DraftModule:
    """The training module of a case at three quarters of a run, when all weights are trained, with random weights."""
    module = CASES[name].module(target, max_minutes=1.0)
    module.configure_model()
    module.seconds = 45.0
    randomised(module.drafter)
    return module.to(target.dtype).train(training)


def gradients(module: DraftModule, batches: list[Features]) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean loss, gradient of each trained weight) of one optimizer step over these micro-batches, as
    `DraftModule.training_step` sums and `on_before_optimizer_step` divides them."""
    module.zero_grad()
    sums_KC, weights = None, ()
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        learned = module.loss(batch)
        learned.total.backward()
        sums_KC = learned.sums_KC if sums_KC is None else sums_KC + learned.sums_KC
        weights = learned.weights
    assert sums_KC is not None
    total, count = weighted_mean_loss(sums_KC, weights)
    return total / count, {name: parameter.grad / count for name, parameter in module.named_parameters()
                           if parameter.grad is not None}
