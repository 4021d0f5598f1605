"""Each objective against its slow twin, value and gradient, over a whole and a reduced vocabulary; weights of a place's
draft steps: closed forms, slow twins, the gradient of the accepted length, and the chunked loss with them, by token and
by sampled place."""

import math
from typing import Any

import pytest
import torch
from draftsmith.modules import Drafts, Features, Target
from draftsmith.trainers.chunked_losses import VocabularyLoss
from draftsmith.trainers.objectives import (
    JSD_BETA,
    LK_ETA,
    NEEDS_MASS,
    OBJECTIVES,
    Teacher,
    TeacherOutput,
    log_alpha,
    objective_loss,
    path_weights,
    weighted_mean_loss,
)
from references import objectives as plain
from references.vocabulary_loss import supervised
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")

NAMES = tuple(OBJECTIVES)
IDS = torch.arange(3, 90, 4)


def case(target: Target, ids: Tensor | None, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Final states of the target, draft logits and labels."""
    final = torch.randn(rows, target.hidden_size, dtype=torch.float64)
    entries = target.vocab_size if ids is None else len(ids)
    return final, 3 * torch.randn(rows, entries, dtype=torch.float64), torch.randint(entries, (rows,))


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_equal_the_plain_twins(name: Any, ids: Tensor | None, tiny_target_f64: Target) -> None:
    final, logits, labels = case(tiny_target_f64, ids)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = objective_loss(name, one, labels, Teacher(tiny_target_f64, ids, mass=name in NEEDS_MASS)(final))
    p = tiny_target_f64.logits(final).softmax(-1)
    entries = list(range(p.shape[1])) if ids is None else ids.tolist()
    expected = torch.stack([plain.loss(name, p[row], other[row].softmax(-1), entries, int(label), JSD_BETA, LK_ETA)
                            for row, label in enumerate(labels)])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    scale = torch.arange(1.0, len(labels) + 1, dtype=torch.float64)
    (found * scale).sum().backward()
    (expected * scale).sum().backward()
    torch.testing.assert_close(one.grad, other.grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lk_hybrid"])
def test_gradients_are_those_of_small_differences(name: Any, tiny_target_f64: Target) -> None:
    """`lk_hybrid` detaches its share, so its gradient is no derivative of its value: the twin above checks it."""
    final, logits, labels = case(tiny_target_f64, IDS, rows=2)
    teacher_output = Teacher(tiny_target_f64, IDS, mass=True)(final)
    assert torch.autograd.gradcheck(lambda rows: objective_loss(name, rows, labels, teacher_output),
                                    logits.requires_grad_())


def test_the_acceptance_counts_the_mass_outside_as_lost(tiny_target_f64: Target) -> None:
    final, _, _ = case(tiny_target_f64, IDS)
    p = tiny_target_f64.logits(final).softmax(-1)
    teacher_output = Teacher(tiny_target_f64, IDS, mass=True)(final)
    # The acceptance of a draft that equals the renormalised target is the target's mass inside the vocabulary.
    alpha = log_alpha(teacher_output.log_p_NQ, teacher_output).exp()
    torch.testing.assert_close(alpha, p[:, IDS].sum(-1))
    assert (alpha < 0.9).all()
    whole = Teacher(tiny_target_f64)(final)
    torch.testing.assert_close(log_alpha(whole.log_p_NQ, whole).exp(), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_losses_are_computed_in_float32(name: Any) -> None:
    logits, labels = torch.randn(3, 50).bfloat16(), torch.tensor([1, 2, 3])
    teacher_output = TeacherOutput(logits_NQ=torch.randn(3, 50).bfloat16(), log_mass_N=torch.zeros(3))
    found = objective_loss(name, logits, labels, teacher_output)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, objective_loss(name, logits.float(), labels, teacher_output))


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits_stay_finite(name: Any) -> None:
    """The draft is sure of the wrong token, the target excludes half of the vocabulary."""
    logits = torch.full((1, 8), -1e4)
    logits[0, 7] = 1e4
    known = torch.tensor([[0.0, 1.0, 2.0, 3.0, *[-math.inf] * 4]])
    rows = logits.requires_grad_()
    loss = objective_loss(name, rows, torch.tensor([1]), TeacherOutput(logits_NQ=known, log_mass_N=torch.zeros(1)))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_a_perfect_draft_has_no_loss(tiny_target_f64: Target) -> None:
    final, _, labels = case(tiny_target_f64, None)
    teacher_output = Teacher(tiny_target_f64)(final)
    for name in ("reverse_kl", "jsd", "tvd", "lk_alpha", "lk_hybrid"):
        loss = objective_loss(name, teacher_output.log_p_NQ, labels, teacher_output)  # type: ignore[arg-type]
        torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)


def test_a_one_hot_target_makes_lk_alpha_cross_entropy() -> None:
    logits, labels = torch.randn(3, 20, dtype=torch.float64), torch.tensor([4, 0, 19])
    known = torch.full((3, 20), -math.inf, dtype=torch.float64)
    known[torch.arange(3), labels] = 0.0
    teacher_output = TeacherOutput(logits_NQ=known, log_mass_N=torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(objective_loss("lk_alpha", logits, labels, teacher_output),
                               objective_loss("hard", logits, labels, None))


def test_a_teacher_is_required(tiny_target_f64: Target) -> None:
    final, logits, labels = case(tiny_target_f64, IDS)
    with pytest.raises(ValueError, match="soft needs the target's distribution"):
        objective_loss("soft", logits, labels, None)
    with pytest.raises(ValueError, match="needs the mass inside it"):
        objective_loss("lk_alpha", logits, labels, Teacher(tiny_target_f64, IDS)(final))


OFFSETS = (2, 3, 4)


def plain_weights(name: str, chances: list[float], valid: list[bool]) -> tuple[list[float], list[float]]:
    """(weights, shares) of one place, by the sums of products of the formulas."""
    taken = [chance if there else 1.0 for chance, there in zip(chances, valid, strict=True)]
    steps, weights = range(len(taken)), []
    if name == "cat":
        weights = [float(math.prod(taken[:k]) * valid[k]) for k in steps]
        return weights, weights
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


@pytest.mark.parametrize("name", ["d_pace", "e2e", "cat"])
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
@pytest.mark.parametrize(("objective", "paths"), [("hard", None), ("hard", "d_pace"), ("tvd", "e2e"), ("soft", None),
                                                  ("hard_soft", "cat")])
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
                losses[-1] = plain.loss(objective, p, q, ids, label)
            if paths == "d_pace":
                chances[-1] = float(q[label].detach()) if learned[-1] else 0.0
            elif paths == "cat":
                chances[-1] = float(plain.inside(p, ids)[label]) if learned[-1] else 0.0
            elif learned[-1] or places is not None:
                chances[-1] = float(plain.alpha(p, q, ids).detach())
        weights, shares = plain_weights(paths, chances, valid) if paths else (steps, steps)
        for there, one, own, share in zip(learned, losses, weights, shares, strict=True):
            if there:
                expected, divisor = expected + own * one, divisor + share
    assert (missed > 0) is bool(left)
    torch.testing.assert_close(total, expected.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found, torch.autograd.grad(expected, drafts.hidden_BLKD)[0], atol=1e-9, rtol=1e-9)
    assert float(weighted_mean_loss(sums, steps)[1]) == pytest.approx(divisor)
