"""Activation checkpointing: the same gradients from less memory."""

import pytest
import torch
from draftsmith.modules import DraftLM, Eagle3, Eagle3Config, Features, Target, UserError
from draftsmith.modules.parts.decoder_block import GatedMLP
from draftsmith.recipes.counted_work import CountedStorages
from draftsmith.trainers import DraftModule, draft_module, train_config
from support.families import CASES
from support.tiers import others_long
from torch import Tensor


def learns_again(name: str, target: Target) -> bool:
    """True for a family with layers whose states can be computed again."""
    drafter = CASES[name].make(target)
    return isinstance(drafter, DraftLM) or any(isinstance(part, GatedMLP) for part in drafter.modules())


def batch(target: Target, length: int = 24) -> Features:
    """Two rows, the second with two conversations."""
    tokens_BL = torch.randint(4, 90, (2, length), generator=torch.Generator().manual_seed(1))
    order_L = torch.arange(length)
    segments_BL = torch.stack([torch.zeros_like(order_L), (order_L >= length // 2).long()])
    return Features(tokens_BL=tokens_BL, supervised_BL=torch.ones_like(tokens_BL, dtype=torch.bool),
                    segments_BL=segments_BL, positions_BL=order_L - segments_BL * (length // 2))


def gradients(module: DraftModule, rows: Features) -> tuple[dict[str, Tensor], int]:
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
    rows = batch(target)
    expected, _ = gradients(case.module(target), rows)
    found, _ = gradients(wanted, rows)
    assert set(found) == set(expected)
    for weight, gradient in expected.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-6, atol=1e-7, msg=f"{name}: {weight}")


def test_a_step_takes_less_memory(tiny_target: Target) -> None:
    rows, peaks = batch(tiny_target, 400), []
    for again in (False, True):
        config = train_config(Eagle3)(drafter=Eagle3Config(steps=6), objective="hard", activation_checkpointing=again)
        peaks.append(gradients(draft_module(Eagle3)(tiny_target, config), rows)[1])
    assert peaks[1] < 0.8 * peaks[0]
