"""What a draft distribution is judged by: one loss a row, of the draft's logits and the target's distribution there.

All are computed in float32 or wider, as sums over one row; whoever calls them chunks, weighs and reduces.

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

from ..modules.errors import UserError
from ..modules.target.draft_vocabulary import OutputRows
from ..modules.target.model import Target

ObjectiveName = Literal["hard", "soft", "reverse_kl", "jsd", "tvd", "lk_alpha", "lk_hybrid"]
"""What a recipe can choose from; each is a function of this file."""
LEAST_LOG_P = -100.0
"""Where the target excludes a token (minus infinity), log p is cut off here, in nats: divergences stay finite."""


def wide(logits: Tensor) -> Tensor:
    """The same in float32, or in float64 where it was that."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The target's distribution at N predicted tokens."""

    log_p_NQ: Tensor
    """Log-probabilities over the draft vocabulary, renormalised."""
    log_mass_N: Tensor | None
    """Log of the target's probability of the whole draft vocabulary; None where nobody formed it."""

    @cached_property
    def p_NQ(self) -> Tensor:
        """The probabilities, formed once for all draft steps that predict these tokens."""
        return self.log_p_NQ.exp()


class Teacher:
    """Tells the target's distribution from its final states.

    Args:
        target: the model to learn from.
        ids_Q: the reduced draft vocabulary; None for the whole one.
        mass: form the target's whole distribution even over a reduced vocabulary, at the price of its whole output
            layer for every token, since the acceptance needs it.
    """

    def __init__(self, target: Target, ids_Q: Tensor | None = None, *, mass: bool = False) -> None:
        self.inside_Q = ids_Q if mass else None
        self.rows = OutputRows(target, None if mass else ids_Q)

    @property
    def entries(self) -> int:
        """Logits that it forms for a token."""
        return len(self.rows.weight_QD)

    @torch.no_grad()
    def __call__(self, final_ND: Tensor) -> Taught:
        """The target's distribution behind its final states."""
        logits = wide(self.rows(final_ND))
        if self.inside_Q is not None:
            inside_NQ = logits[:, self.inside_Q]
            return taught(inside_NQ, inside_NQ.logsumexp(-1) - logits.logsumexp(-1))
        return taught(logits, None if self.rows.ids_Q is not None else logits.new_zeros(len(logits)))


def taught(logits_NQ: Tensor, log_mass_N: Tensor | None) -> Taught:
    """The distribution of the target's logits over the draft vocabulary."""
    return Taught(log_p_NQ=wide(logits_NQ).log_softmax(-1).clamp(min=LEAST_LOG_P), log_mass_N=log_mass_N)


def hard(logits_NQ: Tensor, labels_N: Tensor) -> Tensor:
    """-log q(label) of each row, in nats: cross entropy with the token that follows."""
    return functional.cross_entropy(wide(logits_NQ), labels_N, reduction="none")


def soft(logits_NQ: Tensor, teaching: Taught) -> Tensor:
    """-sum p log q: cross entropy with the target's distribution, KL(p || q) up to a constant."""
    return functional.cross_entropy(wide(logits_NQ), teaching.p_NQ, reduction="none")


def top_cross_entropy(logits_NQ: Tensor, teaching: Taught, *, k: int) -> Tensor:
    """-sum p log q over the target's k likeliest tokens, neither renormalised over them (arXiv:2408.15766)."""
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    top = teaching.p_NQ.topk(min(k, log_q_NQ.shape[-1]), dim=-1)
    return -(top.values * log_q_NQ.gather(-1, top.indices)).sum(-1)


def forward_kl(log_q_NQ: Tensor, teaching: Taught) -> Tensor:
    """KL(p || q) = sum p (log p - log q)."""
    return (teaching.p_NQ * (teaching.log_p_NQ - log_q_NQ)).sum(-1)


def reverse_kl(logits_NQ: Tensor, teaching: Taught) -> Tensor:
    """KL(q || p) = sum q (log q - log p) (arXiv:2310.08461, table 1)."""
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    return (log_q_NQ.exp() * (log_q_NQ - teaching.log_p_NQ)).sum(-1)


def jsd(logits_NQ: Tensor, teaching: Taught, *, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (arXiv:2306.13649, eq. 1)."""
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    log_m_NQ = torch.logaddexp(teaching.log_p_NQ + math.log(beta), log_q_NQ + math.log1p(-beta))
    from_q_N = (log_q_NQ.exp() * (log_q_NQ - log_m_NQ)).sum(-1)
    return beta * forward_kl(log_m_NQ, teaching) + (1 - beta) * from_q_N


def tvd(logits_NQ: Tensor, teaching: Taught) -> Tensor:
    """Total variation distance, half of sum |p - q|; its signal nearly vanishes where p and q hardly overlap."""
    return 0.5 * (teaching.p_NQ - wide(logits_NQ).softmax(-1)).abs().sum(-1)


def log_alpha(log_q_NQ: Tensor, teaching: Taught) -> Tensor:
    """Log of the chance sum_v min(p_v, q_v) that rejection sampling accepts a token drawn from q (arXiv:2211.17192).

    Raises:
        ValueError: if the target's probability of the draft vocabulary is unknown.
    """
    if teaching.log_mass_N is None:
        raise ValueError("the acceptance over a reduced vocabulary needs the mass inside it; use Teacher(mass=True)")
    return torch.minimum(teaching.log_p_NQ + teaching.log_mass_N[:, None], log_q_NQ).logsumexp(-1)


def lk_alpha(logits_NQ: Tensor, teaching: Taught) -> Tensor:
    """-log alpha (arXiv:2602.23881): the gradient of 1 - alpha, over alpha; cross entropy where p is one token."""
    return -log_alpha(wide(logits_NQ).log_softmax(-1), teaching)


def lk_hybrid(logits_NQ: Tensor, teaching: Taught, *, eta: float) -> Tensor:
    """lam KL(p || q) + (1 - lam) (1 - alpha), lam = exp(-eta alpha) held constant (arXiv:2602.23881).

    Cross entropy leads while little is accepted, the acceptance itself later; lam is that of each token.
    """
    log_q_NQ = wide(logits_NQ).log_softmax(-1)
    alpha_N = log_alpha(log_q_NQ, teaching).exp()
    share_N = (-eta * alpha_N.detach()).exp()
    return share_N * forward_kl(log_q_NQ, teaching) + (1 - share_N) * (1 - alpha_N)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One of them, with its parameters."""

    name: ObjectiveName = "hard"
    """Which."""
    jsd_beta: float = 0.5
    """Weight of the target in the mixture of `jsd`."""
    lk_eta: float = 3.0
    """How fast `lk_hybrid` turns to the acceptance."""
    top_weight: float = 0.0
    """Weight, beside the objective's 1, of the cross entropy over the target's likeliest tokens alone."""
    top_k: int = 10
    """How many they are."""

    def __post_init__(self) -> None:
        if not 0 <= self.top_weight < math.inf:
            raise UserError(f"top_weight must be a finite number of at least 0, got {self.top_weight}")
        if self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.name not in ("hard", *self._with_teacher()):
            known = ", ".join(("hard", *self._with_teacher()))
            raise UserError(f"objective must be one of {known}, got {self.name!r}")
        if not 0 < self.jsd_beta < 1:
            raise UserError(f"jsd_beta must lie between 0 and 1, got {self.jsd_beta}")
        if not 0 <= self.lk_eta < math.inf:
            raise UserError(f"lk_eta must be a finite number of at least 0, got {self.lk_eta}")

    def _with_teacher(self) -> dict[str, Callable[[Tensor, Taught], Tensor]]:
        return {"soft": soft, "reverse_kl": reverse_kl, "jsd": partial(jsd, beta=self.jsd_beta), "tvd": tvd,
                "lk_alpha": lk_alpha, "lk_hybrid": partial(lk_hybrid, eta=self.lk_eta)}

    @property
    def needs_teacher(self) -> bool:
        """Whether it reads the target's distribution, not the label alone."""
        return self.name != "hard" or self.top_weight > 0

    @property
    def needs_mass(self) -> bool:
        """Whether it reads the acceptance, hence the target's whole distribution."""
        return self.name in ("lk_alpha", "lk_hybrid")

    def __call__(self, logits_NQ: Tensor, labels_N: Tensor, teaching: Taught | None) -> Tensor:
        """The loss of each row, [N]."""
        if not self.needs_teacher:
            return hard(logits_NQ, labels_N)
        if teaching is None:
            raise ValueError(f"the objective {self.name} needs the target's distribution; give a teacher")
        own = self._with_teacher().get(self.name)
        loss_N = hard(logits_NQ, labels_N) if own is None else own(logits_NQ, teaching)
        if not self.top_weight:
            return loss_N
        return loss_N + self.top_weight * top_cross_entropy(logits_NQ, teaching, k=self.top_k)
