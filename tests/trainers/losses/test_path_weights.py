"""Weights of a place's draft steps: closed forms, slow twins, the gradient of the accepted length, and the chunked loss
with them, by token and by sampled place."""

import dataclasses
from typing import Any

import pytest
import torch
from draftsmith.modules import Features, Target, UserError
from draftsmith.modules.interfaces.drafter import Drafts
from draftsmith.trainers import TrainConfig
from draftsmith.trainers.losses.chunked_losses import VocabularyLoss
from draftsmith.trainers.losses.metrics import weighted_mean_loss
from draftsmith.trainers.losses.objectives import Teacher, path_weights
from references import objectives
from references.vocabulary_loss import supervised
from torch import Tensor

OFFSETS = (2, 3, 4)


def plain_weights(name: str, chances: list[float], valid: list[bool]) -> tuple[list[float], list[float]]:
    """(weights, shares) of one place, by the sums of products of the formulas."""
    taken = [chance if there else 1.0 for chance, there in zip(chances, valid, strict=True)]
    steps, weights = range(len(taken)), []
    for k in steps:
        total = 0.0
        for j in steps:
            if j < k or not (valid[j] and valid[k]):
                continue
            product = 1.0
            for i in range(j + 1):
                if name == "d_pace":
                    product *= 0.5 * taken[i] + 0.5 if valid[i] else 1.0
                elif i != k:
                    product *= taken[i]
            total += product
        weights.append(total)
    if name == "d_pace":
        return weights, weights
    count = max(1, sum(valid))
    return [weight / count for weight in weights], [there / count for there in valid]


@pytest.mark.parametrize("name", ["d_pace", "e2e"])
def test_weights_equal_their_slow_twins(name: Any) -> None:
    torch.manual_seed(0)
    chances = torch.rand(40, 5, dtype=torch.float64)
    chances[::3] = chances[::3].round()  # also zeros and ones
    valid = torch.rand(40, 5) < 0.8
    weights, shares = path_weights(name, chances, valid, range(2, 7))
    for row in range(40):
        wanted, divisors = plain_weights(name, chances[row].tolist(), valid[row].tolist())
        torch.testing.assert_close(weights[row].tolist(), wanted)
        torch.testing.assert_close(shares[row].tolist(), divisors)


def test_closed_forms_and_steps_that_start_anew() -> None:
    ones, none = torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool)
    assert path_weights("d_pace", ones, none, (*OFFSETS, 5))[0].tolist() == [[4, 3, 2, 1]]
    assert path_weights("d_pace", 0 * ones, none, (*OFFSETS, 5))[0].tolist() == [[0.9375, 0.4375, 0.1875, 0.0625]]
    assert path_weights("e2e", 0 * ones, none, (*OFFSETS, 5))[0].tolist() == [[0.25, 0, 0, 0]]
    assert path_weights("d_pace", ones, none, (2, 3, 2, 3))[0].tolist() == [[2, 1, 2, 1]]


def test_end_to_end_weights_have_the_gradient_of_the_accepted_length() -> None:
    """If the first guess is surely wrong, it alone learns."""
    torch.manual_seed(1)
    chances = torch.rand(9, 4, dtype=torch.float64)
    chances[0, 0] = 0.0
    chances.requires_grad_()
    valid = torch.rand(9, 4).argsort(1).argsort(1) < 3
    valid[0] = True
    taken = torch.where(valid, chances, 1.0)
    losses = 1 - (taken.cumprod(1) * valid).sum(1) / valid.sum(1).clamp(min=1)
    wanted, = torch.autograd.grad(losses.sum(), chances)
    weights, _ = path_weights("e2e", chances.detach(), valid, range(4))
    torch.testing.assert_close(-weights, wanted, atol=1e-12, rtol=1e-12)
    assert wanted[0, 0] < 0
    assert wanted[0, 1:].abs().sum() == 0


def rows_of(target: Target, places: list[list[int]] | None) -> tuple[Features, Drafts, Tensor]:
    """Two rows with gaps, draft states after all positions or after some, and an output layer."""
    torch.manual_seed(2)
    features = target.encode(Features.from_rows([(torch.randint(4, target.vocab_size, (length,)).tolist(),
                                                  (torch.rand(length) < 0.8).tolist()) for length in (10, 13)]))
    hidden = torch.randn(2, 13, 3, target.hidden_size, dtype=torch.float64)
    valid = torch.rand(2, 13, 3) < 0.9
    drafts = Drafts(hidden_BLKD=hidden, offsets=OFFSETS, valid_BLK=valid)
    if places is not None:
        index, rows = torch.tensor(places), torch.arange(2)[:, None]
        drafts = Drafts(hidden_BLKD=hidden[rows, index], offsets=OFFSETS, valid_BLK=valid[rows, index],
                        indices_BL=index)
    drafts.hidden_BLKD.requires_grad_()
    return features, drafts, torch.randn(target.vocab_size, target.hidden_size, dtype=torch.float64)


@pytest.mark.parametrize("left", [7, 0], ids=["reduced", "whole"])
@pytest.mark.parametrize("places", [None, [[0, 3, 4, 7, 12], [2, 5, 6, 8, 9]]], ids=["all", "sampled"])
@pytest.mark.parametrize(("objective", "paths"), [("hard", None), ("hard", "d_pace"), ("tvd", "e2e"), ("soft", None)])
def test_the_chunked_loss_equals_the_sum_over_places(objective: Any, paths: Any, places: Any, left: int,
                                                     tiny_target_f64: Target) -> None:
    """A token of seven is outside the reduced vocabulary: no step learns it, and no draft gets past it by the text."""
    target = tiny_target_f64
    features, drafts, weight = rows_of(target, places)
    ids = [token for token in range(target.vocab_size) if not left or token % left]
    index_V = torch.full((target.vocab_size,), -1)
    index_V[ids] = torch.arange(len(ids))
    weight = weight[ids]
    steps = (1.0, 1.0, 1.0) if paths else (1.0, 0.5, 0.25)
    loss = VocabularyLoss(project=lambda hidden, step: hidden @ weight.mT / (1 + step), entries=len(ids),
                          weights=steps, objective=objective, paths=paths, chunk_elements=4 * len(ids),
                          teacher=None if objective == "hard" else Teacher(
                              target, torch.tensor(ids) if left else None, mass=True))
    total, sums = loss(drafts, features, index_V)
    found = torch.autograd.grad(total, drafts.hidden_BLKD)[0]
    expected, divisor, missed = torch.zeros((), dtype=torch.float64), 0.0, 0
    indices = torch.arange(13).expand(2, -1) if drafts.indices_BL is None else drafts.indices_BL
    for row, place in [(row, place) for row in range(2) for place in range(indices.shape[1])]:
        index, valid, learned, losses, chances = int(indices[row, place]), [], [], [], []
        for step, offset in enumerate(OFFSETS):
            there = bool(drafts.valid_BLK[row, place, step]) and supervised(features, row, index, offset)
            valid.append(there)
            losses.append(torch.zeros(()))
            chances.append(1.0)
            learned.append(False)
            if not there:
                continue
            label = int(index_V[features.tokens_BL[row, index + offset]])
            learned[-1], missed = label >= 0, missed + (label < 0)
            q = (drafts.hidden_BLKD[row, place, step] @ weight.mT / (1 + step)).softmax(-1)
            p = target.logits(features.final()[row, index + offset - 1]).softmax(-1)
            if learned[-1]:
                losses[-1] = objectives.loss(objective, p, q, ids, label)
            if paths == "d_pace":
                chances[-1] = float(q[label].detach()) if learned[-1] else 0.0
            elif learned[-1] or places is not None:
                chances[-1] = float(objectives.alpha(p, q, ids).detach())
        weights, shares = plain_weights(paths, chances, valid) if paths else (steps, steps)
        for there, one, own, share in zip(learned, losses, weights, shares, strict=True):
            if there:
                expected, divisor = expected + own * one, divisor + share
    assert (missed > 0) is bool(left)
    torch.testing.assert_close(total, expected.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found, torch.autograd.grad(expected, drafts.hidden_BLKD)[0], atol=1e-9, rtol=1e-9)
    assert float(weighted_mean_loss(sums, steps)[1]) == pytest.approx(divisor)


def test_weights_are_refused_that_are_none() -> None:
    for wrong in (0.0, 1.5, "pace"):
        with pytest.raises(UserError, match=r"train\.step_weights must be (a number |above 0|at most 1)"):
            dataclasses.replace(TrainConfig(), step_weights=wrong)
