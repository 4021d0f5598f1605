"""Each objective against its slow twin, value and gradient, over a whole and a reduced vocabulary."""

import math
from typing import Any

import pytest
import torch
from draftsmith.modules import Target
from draftsmith.trainers.losses.objectives import (
    JSD_BETA,
    LK_ETA,
    NEEDS_MASS,
    OBJECTIVES,
    Teacher,
    TeacherOutput,
    log_alpha,
    objective_loss,
)
from references import objectives as plain
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
