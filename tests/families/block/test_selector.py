"""The selector of DFlash 2 and its convolutions: no-ops at the start, the choice by its formula, what it learns, and
that samples among its candidates leave the target's law exact."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import BlockDraft, BlockDraftConfig, Target, UserError
from draftsmith.trainers import draft_module, train_config
from draftsmith.trainers.losses.metrics import weighted_mean_loss
from support.families import randomised

from .test_corrections import check_choices, features_of, scores

CONFIG = BlockDraftConfig(block_size=4, num_layers=1, aligned="same", correction="selector", rank=8, conv=True)


def test_new_convolutions_and_a_new_selector_change_nothing(tiny_target: Target) -> None:
    """Bit by bit, also when they are added to a trained drafter, and after an artifact's rebuilding."""
    plain = randomised(BlockDraft.create(replace(CONFIG, correction="none", conv=False), tiny_target))
    drafter = BlockDraft.create(CONFIG, tiny_target, start=plain).eval()
    other = BlockDraft.rebuild(drafter.describe(), tiny_target.identity)
    other.load_state_dict(drafter.state_dict())
    other.bind(tiny_target)
    features = features_of(tiny_target, plain)
    with torch.no_grad():
        wanted = plain(features).hidden_BLKD
        for one in (drafter, other.eval()):
            found = one(features).hidden_BLKD
            assert torch.equal(found[..., : tiny_target.hidden_size], wanted)
            for step in range(3):
                logits = one.project(found[:, :, step], step)
                assert torch.equal(logits.argmax(-1), plain.project(wanted[:, :, step], step).argmax(-1))


def test_the_choice_is_that_of_the_formula(tiny_target_f64: Target) -> None:
    """U(b) + <A[a] * (P h), C[b]> among the sixteen likeliest of U; log q is normalised over these alone."""
    drafter = randomised(BlockDraft.create(CONFIG, tiny_target_f64).double())
    features, own = features_of(tiny_target_f64, drafter), drafter.correction
    with torch.no_grad():
        slots_KD = drafter(features).hidden_BLKD[0, 5, :, : tiny_target_f64.hidden_size]
        path = (44, 61)
        for depth, before in enumerate([int(features.tokens_BL[0, 6]), *path]):
            base = tiny_target_f64.logits(slots_KD[depth])
            state = own.predecessor_codebook.weight[before] * (own.hidden_projection.weight @ slots_KD[depth])
            wanted = torch.full_like(base, -torch.inf)
            best = base.topk(16).indices
            wanted[best] = base[best] + own.successor_codebook.weight[best] @ state
            found = scores(drafter, features, path[:depth])
            torch.testing.assert_close(found, wanted.log_softmax(-1), atol=1e-9, rtol=1e-9)
            assert float(found.exp().sum()) == pytest.approx(1)
            assert int((found > -torch.inf).sum()) == 16


def test_a_label_that_is_no_candidate_teaches_the_choice_nothing(tiny_target_f64: Target) -> None:
    """In training: cross entropy of the slots alone, and of the choice where the label is offered, whose mean counts as
    much as that of all slots, however few these labels are."""
    module = draft_module(BlockDraft)(tiny_target_f64, train_config(BlockDraft)(
        objective="hard", step_weights=0.5, drafter=CONFIG))
    module.configure_model()
    drafter = randomised(module.drafter.double()).train()
    drafter.correction.most = 30
    features = features_of(tiny_target_f64, drafter)
    learned, hidden = module.loss(features), drafter(features).hidden_BLKD
    assert learned.weights == (1.0, 0.5, 0.25) * 2
    expected, chosen_loss = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    offered, missed, shares = 0, 0, [0.0, 0.0]
    for step in range(3):
        for place in range(10 - step):
            state, label = hidden[0, place, step], int(features.tokens_BL[0, place + 2 + step])
            base = tiny_target_f64.logits(state[: tiny_target_f64.hidden_size])
            expected, shares[0] = expected - 0.5**step * base.log_softmax(-1)[label], shares[0] + 0.5**step
            chosen = drafter.project(state, step)
            if label in base.topk(30).indices.tolist():
                chosen_loss, offered = chosen_loss - 0.5**step * chosen.log_softmax(-1)[label], offered + 1
                shares[1] += 0.5**step
            else:
                assert bool(chosen[label] == -torch.inf)
                missed += 1
    assert offered > 3
    assert missed > 3
    expected = expected + chosen_loss * shares[0] / shares[1]
    torch.testing.assert_close(learned.total, expected, atol=1e-9, rtol=1e-9)
    divisor = weighted_mean_loss(learned.sums_KC, learned.weights)[1]
    torch.testing.assert_close(float(divisor), 2 * shares[0], atol=1e-9, rtol=1e-9)
    counts = learned.sums_KC[:3, :2].sum(0).tolist()
    assert counts == [offered, missed]
    found = torch.autograd.grad(learned.total, list(drafter.parameters()), allow_unused=True)
    for one, other in zip(found, torch.autograd.grad(expected, list(drafter.parameters()), allow_unused=True),
                          strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_samples_among_the_candidates_leave_the_targets_law(tiny_target_f64: Target) -> None:
    """By enumeration of a tree of two levels with two children each, at temperature 0.7; the draft of the slots alone
    is not what was drawn from."""
    drafter = randomised(BlockDraft.create(CONFIG, tiny_target_f64).double())
    drafter.correction.most = 3
    drafter.correction.successor_codebook.weight.data *= 8
    check_choices(drafter, tiny_target_f64, 3)


def test_a_width_without_whole_groups_is_refused() -> None:
    target: Any = SimpleNamespace(hidden_size=40, identity=SimpleNamespace(name="odd"))
    with pytest.raises(UserError, match="conv has kernels for groups of 16 components, and odd is 40 wide; set conv"):
        BlockDraft.fitted(CONFIG, target)
