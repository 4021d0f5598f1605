"""Packed linear layers of drafters: the same scores, packed again when a weight changes, never while training."""

import copy

import pytest
import torch
from draftsmith.modules import DecodeSettings, Drafter, Request, StaticTree, Target, Topology, decode
from draftsmith.modules.target.linear_forms import Packing, can_pack
from support.families import CASES, randomised
from torch import nn

TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))
PACKABLE = [name for name in CASES if not name.startswith(("medusa-2", "prompt-tokens"))]
"""The others differ in their target alone, or have no linear layer."""


def decoded(drafter: Drafter, target: Target) -> list[float]:
    """Log-probabilities at the root after a text, from a state of their own, and after decoding a few tokens."""
    decode(target, [Request((5, 9, 11), 0, 4)], DecodeSettings(), drafter=drafter, policy=StaticTree(TREE))
    seen: list[float] = []
    original = drafter.expand

    def watch(state: object, frontier: object) -> object:
        scores = original(state, frontier)  # type: ignore[arg-type]
        seen.extend(scores.log_probs_BFHQ.flatten()[:40].tolist())
        return scores

    drafter.expand = watch  # type: ignore[assignment, method-assign]
    try:
        decode(target, [Request((5, 9, 11), 0, 4)], DecodeSettings(), drafter=drafter, policy=StaticTree(TREE))
    finally:
        del drafter.expand
    return seen


@pytest.mark.parametrize("name", PACKABLE)
def test_one_changed_element_is_packed_again(name: str, tiny_target: Target) -> None:
    drafter = randomised(CASES[name].make(tiny_target))
    assert can_pack(drafter)
    before = decoded(drafter, tiny_target)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear) and module.weight.numel() >= 1024:
                # The second element: a sum over a few of many passes it over.
                module.weight.view(-1)[1] += 3.0
    after, fresh = decoded(drafter, tiny_target), decoded(copy.deepcopy(drafter), tiny_target)
    assert after != pytest.approx(before, abs=1e-3)
    assert after == pytest.approx(fresh, abs=1e-5)
    assert not any("forward" in module.__dict__ for module in drafter.modules())


@pytest.mark.parametrize("name", PACKABLE)
def test_training_gives_the_packed_forms_back(name: str, tiny_target: Target) -> None:
    drafter = randomised(CASES[name].make(tiny_target))
    decoded(drafter, tiny_target)
    assert drafter.packing._layers is not None
    assert drafter.train().packing._layers is None


def test_a_target_that_is_not_packed_wants_no_packed_draft(tiny_target: Target) -> None:
    drafter = randomised(CASES["medusa-copy"].make(tiny_target))
    before = tiny_target.linears.packing
    assert before.packed_from == 1
    tiny_target.linears.use(Packing(packed_from=0))
    try:
        drafter.start(1, 32)
        assert drafter.packing._layers is None
    finally:
        tiny_target.linears.use(before)
    drafter.start(1, 32)
    assert drafter.packing._layers is not None
