"""A training step in bfloat16 with float32 weights: loss and gradients of every family against its float32 twin."""

import random

import pytest
import torch
from draftsmith.modules import Features, Target
from support.families import CASES, randomised
from support.tiers import others_long
from torch import Tensor

LOSS, GRADIENT = 0.01, 0.08
"""Largest relative error of the loss, and of all gradients together in the Euclidean norm. A bfloat16 number is rounded
by up to 0.4 %."""


def batch(target: Target) -> Features:
    """Two conversations in rows of their own."""
    rng = random.Random(5)
    return Features.from_rows([([rng.randrange(4, target.vocab_size) for _ in range(length)],
                                [place >= 2 for place in range(length)]) for length in (40, 31)])


def step(name: str, target: Target, *, half: bool) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient of each trained weight) of one micro-batch as Lightning computes it."""
    module = CASES[name].module(target)
    torch.manual_seed(7)
    module.configure_model()
    randomised(module.drafter)
    module.train()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        learned = module.loss(batch(target))
    learned.total.backward()
    gradients = {key: weight.grad for key, weight in module.named_parameters() if weight.grad is not None}
    assert all(weight.dtype == torch.float32 for weight in module.parameters() if weight.requires_grad)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    return float(learned.total.detach()), gradients


@pytest.mark.parametrize("name", others_long(CASES))
def test_half_precision_trains_as_its_float32_twin(name: str, tiny_target: Target) -> None:
    (loss, gradients), (expected, wanted) = (step(name, tiny_target, half=half) for half in (True, False))
    assert gradients.keys() == wanted.keys()
    assert loss != expected
    whole = torch.cat([wanted[key].flatten() for key in wanted])
    apart = torch.cat([gradients[key].flatten() for key in wanted]) - whole
    assert abs(loss - expected) <= LOSS * abs(expected)
    # Rounding puts other tokens among a selector's candidates, and with them the places at which a choice is learned.
    most = 2 * GRADIENT if name == "block-selector" else GRADIENT
    assert float(apart.norm()) <= most * float(whole.norm())
