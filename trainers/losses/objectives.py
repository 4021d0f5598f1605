"""Distillation losses: one value for each row of the draft's logits and the target's distribution.

All are computed in float32 or wider, as sums over one row; the caller chunks, weights and reduces them.

p is the target's distribution, q the draft's, both over the draft vocabulary. Where that is a reduced one, p is
renormalised over it, with one exception: the acceptance alpha = sum_v min(p_v, q_v) takes the target's own
probabilities, so that mass outside the draft vocabulary counts as loss (it cannot be accepted).

Shapes: N predicted tokens, Q entries of the draft vocabulary, V of the target's, D hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...modules.errors import UserError
from ...modules.target.draft_vocabulary import OutputRows
from ...modules.target.model import Target

ObjectiveName = Literal["hard", "soft", "reverse_kl", "jsd", "tvd", "lk_alpha", "lk_hybrid"]
"""Names for recipes; each is a function in this file."""
LEAST_LOG_P = -100.0
"""Lower bound of log p in nats, for tokens that the target excludes (minus infinity): divergences stay finite."""


def wide(logits: Tensor) -> Tensor:
    """The logits in float32, or in float64 if they already are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class TeacherOutput:
    """The target's distribution at N predicted tokens."""

    log_p_NQ: Tensor
    """Log-probabilities over the draft vocabulary, renormalised."""
    log_mass_N: Tensor | None
    """Log of the target's probability of the whole draft vocabulary; None when it was not computed."""

    @cached_property
    def p_NQ(self) -> Tensor:
        """The probabilities, computed once for all draft steps that predict these tokens."""
        return self.log_p_NQ.exp()


class Teacher:
    """The target as teacher: its distribution from its final states.

    Args:
        target: the teacher model.
        ids_Q: the reduced draft vocabulary; None for the whole one.
        mass: compute the target's whole distribution even for a reduced vocabulary, at the cost of its whole output
            layer for every token, since the acceptance needs it.
    """

    def __init__(self, target: Target, ids_Q: Tensor | None = None, *, mass: bool = False) -> None:
        self.inside_Q = ids_Q if mass else None
        self.rows = OutputRows(target, None if mass else ids_Q)

    @property
    def entries(self) -> int:
        """Logits computed for each token."""
        return len(self.rows.weight_QD)

    @torch.no_grad()
    def __call__(self, final_ND: Tensor) -> TeacherOutput:
        """The target's distribution for its final states."""
        logits = wide(self.rows(final_ND))
        if self.inside_Q is not None:
            inside_NQ = logits[:, self.inside_Q]
            return teacher_output_of(inside_NQ, inside_NQ.logsumexp(-1) - logits.logsumexp(-1))
        return teacher_output_of(logits, None if self.rows.ids_Q is not None else logits.new_zeros(len(logits)))


def teacher_output_of(logits_NQ: Tensor, log_mass_N: Tensor | None) -> TeacherOutput:
    """The distribution of the target's logits over the draft vocabulary."""
    return TeacherOutput(log_p_NQ=wide(logits_NQ).log_softmax(-1).clamp(min=LEAST_LOG_P), log_mass_N=log_mass_N)


def hard(logits_NQ: Tensor, labels_N: Tensor) -> Tensor:
    """-log q(label) of each row, in nats: cross entropy with the next token."""
    return functional.cross_entropy(wide(logits_NQ), labels_N, reduction="none")


def soft(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """-sum p log q: cross entropy with the target's distribution, KL(p || q) up to a constant."""
    return functional.cross_entropy(wide(logits_NQ), teacher_output.p_NQ, reduction="none")


def top_cross_entropy(logits_NQ: Tensor, teacher_output: TeacherOutput, *, k: int) -> Tensor:
    """-sum p log q over the target's k most probable tokens, without renormalisation (arXiv:2408.15766)."""
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    top = teacher_output.p_NQ.topk(min(k, log_q_NQ.shape[-1]), dim=-1)
    return -(top.values * log_q_NQ.gather(-1, top.indices)).sum(-1)


def forward_kl(log_q_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """KL(p || q) = sum p (log p - log q)."""
    return (teacher_output.p_NQ * (teacher_output.log_p_NQ - log_q_NQ)).sum(-1)


def reverse_kl(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """KL(q || p) = sum q (log q - log p) (arXiv:2310.08461, table 1)."""
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    return (log_q_NQ.exp() * (log_q_NQ - teacher_output.log_p_NQ)).sum(-1)


def jsd(logits_NQ: Tensor, teacher_output: TeacherOutput, *, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (arXiv:2306.13649, eq. 1)."""
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    log_m_NQ = torch.logaddexp(teacher_output.log_p_NQ + math.log(beta), log_q_NQ + math.log1p(-beta))
    from_q_N = (log_q_NQ.exp() * (log_q_NQ - log_m_NQ)).sum(-1)
    return beta * forward_kl(log_m_NQ, teacher_output) + (1 - beta) * from_q_N


def tvd(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """Total variation distance, half of sum |p - q|; its signal nearly vanishes where p and q hardly overlap."""
    return 0.5 * (teacher_output.p_NQ - wide(logits_NQ).softmax(-1)).abs().sum(-1)


def log_alpha(log_q_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """Log of sum_v min(p_v, q_v), the probability that rejection sampling accepts a token from q (arXiv:2211.17192).

    Raises:
        ValueError: if the target's probability of the draft vocabulary is unknown.
    """
    if teacher_output.log_mass_N is None:
        raise ValueError("the acceptance over a reduced vocabulary needs the mass inside it; use Teacher(mass=True)")
    return torch.minimum(teacher_output.log_p_NQ + teacher_output.log_mass_N[:, None], log_q_NQ).logsumexp(-1)


def lk_alpha(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """-log alpha (arXiv:2602.23881): the gradient of 1 - alpha, over alpha; cross entropy where p is one token."""
    return -log_alpha(wide(logits_NQ).log_softmax(-1), teacher_output)


def lk_hybrid(logits_NQ: Tensor, teacher_output: TeacherOutput, *, eta: float) -> Tensor:
    """lam KL(p || q) + (1 - lam) (1 - alpha), lam = exp(-eta alpha) held constant (arXiv:2602.23881).

    KL dominates while little is accepted, the acceptance later; each token has its own lam.
    """
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    alpha_N = log_alpha(log_q_NQ, teacher_output).exp()
    share_N = (-eta * alpha_N.detach()).exp()
    return share_N * forward_kl(log_q_NQ, teacher_output) + (1 - share_N) * (1 - alpha_N)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A distillation loss and its parameters."""

    name: ObjectiveName = "hard"
    """Name of the loss."""
    jsd_beta: float = 0.5
    """Weight of the target in the mixture of `jsd`."""
    lk_eta: float = 3.0
    """Rate at which `lk_hybrid` changes from KL to acceptance."""
    top_weight: float = 0.0
    """Weight of the cross entropy over the target's most probable tokens alone, relative to the objective's 1."""
    top_k: int = 10
    """Number of these tokens."""
    hard_share: float = 0.0
    """Share of the cross entropy with the next token; the objective has the rest."""

    def __post_init__(self) -> None:
        if not 0 <= self.top_weight < math.inf:
            raise UserError(f"top_weight must be a finite number of at least 0, got {self.top_weight}")
        if not 0 <= self.hard_share <= 1:
            raise UserError(f"hard_share must lie between 0 and 1, got {self.hard_share}")
        if self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.name not in ("hard", *self._with_teacher()):
            known = ", ".join(("hard", *self._with_teacher()))
            raise UserError(f"objective must be one of {known}, got {self.name!r}")
        if not 0 < self.jsd_beta < 1:
            raise UserError(f"jsd_beta must lie between 0 and 1, got {self.jsd_beta}")
        if not 0 <= self.lk_eta < math.inf:
            raise UserError(f"lk_eta must be a finite number of at least 0, got {self.lk_eta}")

    def _with_teacher(self) -> dict[str, Callable[[Tensor, TeacherOutput], Tensor]]:
        return {"soft": soft, "reverse_kl": reverse_kl, "jsd": partial(jsd, beta=self.jsd_beta), "tvd": tvd,
                "lk_alpha": lk_alpha, "lk_hybrid": partial(lk_hybrid, eta=self.lk_eta)}

    @property
    def needs_teacher(self) -> bool:
        """True if it reads the target's distribution."""
        return self.name != "hard" or self.top_weight > 0

    @property
    def needs_mass(self) -> bool:
        """True if it reads the acceptance and therefore the target's whole distribution."""
        return self.name in ("lk_alpha", "lk_hybrid")

    def __call__(self, logits_NQ: Tensor, labels_N: Tensor, teacher_output: TeacherOutput | None) -> Tensor:
        """The loss of each row, [N]."""
        if not self.needs_teacher:
            return hard(logits_NQ, labels_N)
        if teacher_output is None:
            raise ValueError(f"the objective {self.name} needs the target's distribution; give a teacher")
        own = self._with_teacher().get(self.name)
        loss_N = hard(logits_NQ, labels_N) if own is None else own(logits_NQ, teacher_output)
        if self.hard_share and own is not None:
            loss_N = (1 - self.hard_share) * loss_N + self.hard_share * hard(logits_NQ, labels_N)
        if not self.top_weight:
            return loss_N
        return loss_N + self.top_weight * top_cross_entropy(logits_NQ, teacher_output, k=self.top_k)
