"""Distillation losses: one value for each row of the draft's logits and the target's distribution.

All are computed in float32 or wider, as sums over one row; the caller chunks, weights and reduces them.

p is the target's distribution, q the draft's, both over the draft vocabulary. Where that is a reduced one, p is
renormalised over it, with one exception: the acceptance alpha = sum_v min(p_v, q_v) takes the target's own
probabilities, so that mass outside the draft vocabulary counts as loss (it cannot be accepted).

A place's draft steps may be weighted by the chances of the steps before: a guess counts as far as a draft gets to it.
These weights are constants of a step: no gradient passes through them.

Shapes: N predicted tokens, Q entries of the draft vocabulary, V of the target's, D hidden size, P places, K draft
steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...modules.target.draft_vocabulary import OutputRows
from ...modules.target.model import Target
from ...modules.verification.sampling import widened

ObjectiveName = Literal["hard", "argmax", "soft", "reverse_kl", "jsd", "tvd", "hard_tvd", "lk_alpha", "lk_hybrid"]
"""Names for recipes; each is a function in this file."""
HARD_SHARE, TVD_SHARE = 0.1, 1.8  # Of `hard_tvd`: DSpark's 0.1 of cross entropy, 0.9 of |p - q| (arXiv:2607.05147)
JSD_BETA = 0.5  # Weight of the target in the mixture of `jsd`: the symmetric divergence
LK_ETA = 3.0  # Rate at which `lk_hybrid` changes from KL to acceptance (arXiv:2602.23881)
ACCEPTANCE_ELEMENTS = 1 << 21  # Logits whose acceptance is computed at once: forty rows of a usual vocabulary
LEAST_LOG_P = -100.0  # Least log p in nats, for tokens that the target excludes: divergences stay finite


@dataclass(frozen=True, kw_only=True)
class TeacherOutput:
    """The target's distribution at N predicted tokens."""

    logits_NQ: Tensor  # Its logits over the draft vocabulary
    log_mass_N: Tensor | None  # Log of the target's probability of the draft vocabulary; None when not computed

    @cached_property
    def p_NQ(self) -> Tensor:
        """The probabilities over the draft vocabulary, renormalised, computed once for all draft steps that predict
        these tokens; in float32 at least: half precision would resolve none of a large vocabulary."""
        return widened(self.logits_NQ).softmax(-1)

    @cached_property
    def log_p_NQ(self) -> Tensor:
        """Their logarithms, likewise, at least `LEAST_LOG_P`."""
        return widened(self.logits_NQ).log_softmax(-1).clamp(min=LEAST_LOG_P)


class Teacher:
    """The target as teacher: its distribution over the draft vocabulary `ids_Q` (None is the whole one) from its final
    states. `mass` finds the target's probability of a reduced vocabulary too, which the acceptance needs, at the cost
    of its whole output layer."""

    def __init__(self, target: Target, ids_Q: Tensor | None = None, *, mass: bool = False) -> None:
        self.rows = OutputRows(target, ids_Q)
        self.whole = OutputRows(target) if mass and ids_Q is not None else None  # None where it is not needed

    @torch.no_grad()
    def __call__(self, final_ND: Tensor, log_sums_N: Tensor | None = None) -> TeacherOutput:
        """The target's distribution for its final states; `log_sums_N` is that of `log_sums`, where it is known."""
        logits_NQ = self.rows(final_ND)
        log_mass_N = None if self.rows.ids_Q is not None else final_ND.new_zeros(len(final_ND))
        if self.whole is not None:
            log_mass_N = widened(logits_NQ).logsumexp(-1) - (
                self.log_sums(final_ND) if log_sums_N is None else log_sums_N)
        return TeacherOutput(logits_NQ=logits_NQ, log_mass_N=log_mass_N)

    @torch.no_grad()
    def log_sums(self, final_ND: Tensor) -> Tensor:
        """Log of the sum of all exponentiated logits of the target, [N], in the format of autocast, in which the draft
        vocabulary's are. Raises ValueError where nothing needs it."""
        if self.whole is None:
            raise ValueError("this teacher finds no mass of a reduced vocabulary; use Teacher(target, ids, mass=True)")
        return widened(self.whole.unpacked(final_ND)).logsumexp(-1)


def hard(logits_NQ: Tensor, labels_N: Tensor) -> Tensor:
    """-log q(label) of each row, in nats: cross entropy with the next token."""
    return functional.cross_entropy(widened(logits_NQ), labels_N, reduction="none")


def soft(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """-sum p log q: cross entropy with the target's distribution, KL(p || q) up to a constant."""
    return functional.cross_entropy(widened(logits_NQ), teacher_output.p_NQ, reduction="none")


def argmax(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """-log q(argmax p): cross entropy with the target's most probable token, which greedy decoding writes."""
    return functional.cross_entropy(widened(logits_NQ), teacher_output.logits_NQ.argmax(-1), reduction="none")


def forward_kl(log_q_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """KL(p || q) = sum p (log p - log q)."""
    return (teacher_output.p_NQ * (teacher_output.log_p_NQ - log_q_NQ)).sum(-1)


def reverse_kl(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """KL(q || p) = sum q (log q - log p) (arXiv:2310.08461, table 1)."""
    log_q_NQ = widened(logits_NQ).log_softmax(-1)
    return (log_q_NQ.exp() * (log_q_NQ - teacher_output.log_p_NQ)).sum(-1)


def jsd(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q (arXiv:2306.13649, eq. 1), b = JSD_BETA."""
    log_q_NQ = widened(logits_NQ).log_softmax(-1)
    # In logarithms: a mixture of probabilities that underflow would be zero.
    log_m_NQ = torch.logaddexp(teacher_output.log_p_NQ + math.log(JSD_BETA), log_q_NQ + math.log1p(-JSD_BETA))
    from_q_N = (log_q_NQ.exp() * (log_q_NQ - log_m_NQ)).sum(-1)
    return JSD_BETA * forward_kl(log_m_NQ, teacher_output) + (1 - JSD_BETA) * from_q_N


def tvd(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """Total variation distance, half of sum |p - q|; its signal nearly vanishes where p and q hardly overlap."""
    return 0.5 * (teacher_output.p_NQ - widened(logits_NQ).softmax(-1)).abs().sum(-1)


def log_alpha(log_q_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """Log of sum_v min(p_v, q_v), the probability that rejection sampling accepts a token from q (arXiv:2211.17192).
    ValueError if the target's probability of the draft vocabulary is unknown."""
    if teacher_output.log_mass_N is None:
        raise ValueError("the acceptance over a reduced vocabulary needs the mass inside it; use Teacher(mass=True)")
    return torch.minimum(teacher_output.log_p_NQ + teacher_output.log_mass_N[:, None], log_q_NQ).logsumexp(-1)


@torch.no_grad()
def accepted(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """The acceptance sum_v min(p_v, q_v) of each row, [N]; ValueError if the draft vocabulary's mass is unknown."""
    if teacher_output.log_mass_N is None:
        raise ValueError("the acceptance over a reduced vocabulary needs the mass inside it; use Teacher(mass=True)")
    mass_N1 = teacher_output.log_mass_N.exp()[:, None]
    # A figure for the log must be cheap compared with the loss: a few rows at a time, in their own memory.
    pieces = [widened(logits_NQ[:0]).sum(-1)]
    rows = max(1, ACCEPTANCE_ELEMENTS // logits_NQ.shape[-1])
    for first in range(0, len(logits_NQ), rows):
        piece = slice(first, first + rows)
        q_NQ = widened(logits_NQ[piece]).softmax(-1)
        pieces.append(torch.minimum(q_NQ, teacher_output.p_NQ[piece] * mass_N1[piece], out=q_NQ).sum(-1))
    return torch.cat(pieces)


def lk_alpha(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """-log alpha (arXiv:2602.23881): the gradient of 1 - alpha, over alpha; cross entropy where p is one token."""
    return -log_alpha(widened(logits_NQ).log_softmax(-1), teacher_output)


def lk_hybrid(logits_NQ: Tensor, teacher_output: TeacherOutput) -> Tensor:
    """lam KL(p || q) + (1 - lam) (1 - alpha), lam = exp(-LK_ETA alpha) held constant (arXiv:2602.23881): KL dominates
    while little is accepted, the acceptance later; each token has its own lam."""
    log_q_NQ = widened(logits_NQ).log_softmax(-1)
    alpha_N = log_alpha(log_q_NQ, teacher_output).exp()
    # Detached, as in the paper: with a gradient the share itself would be trained to shift the weights.
    share_N = (-LK_ETA * alpha_N.detach()).exp()
    return share_N * forward_kl(log_q_NQ, teacher_output) + (1 - share_N) * (1 - alpha_N)


OBJECTIVES: dict[ObjectiveName, Callable[[Tensor, TeacherOutput], Tensor] | None] = {
    "hard": None, "argmax": argmax, "soft": soft, "reverse_kl": reverse_kl, "jsd": jsd, "tvd": tvd, "hard_tvd": None,
    "lk_alpha": lk_alpha, "lk_hybrid": lk_hybrid}  # The losses by name, None for those that read the label alone
NEEDS_MASS: tuple[ObjectiveName, ...] = ("lk_alpha", "lk_hybrid")  # Losses that read the target's whole distribution


def objective_loss(
    name: ObjectiveName, logits_NQ: Tensor, labels_N: Tensor, teacher_output: TeacherOutput | None
) -> Tensor:
    """The loss of each row by its name, [N], in nats but for `tvd` and the part of `lk_hybrid` that is 1 - alpha.
    ValueError if it reads the target's distribution and there is none."""
    if name == "hard":
        return hard(logits_NQ, labels_N)
    if teacher_output is None:
        raise ValueError(f"the objective {name} needs the target's distribution; give a teacher")
    if (loss := OBJECTIVES[name]) is None:
        return HARD_SHARE * hard(logits_NQ, labels_N) + TVD_SHARE * tvd(logits_NQ, teacher_output)
    return loss(logits_NQ, teacher_output)


PathWeights = Literal["d_pace", "e2e"]
"""`d_pace` (arXiv:2605.18810): by the draft's probabilities of the labels, smoothed; `e2e` (arXiv:2607.25852): by the
probabilities that its tokens are accepted, with which the gradient of total variation is that of the accepted
length."""
SMOOTHING = 0.5  # Share of a chance that D-PACE takes for granted: else a new draft's weights would vanish


def path_weights(name: PathWeights, chances_PK: Tensor, valid_PK: Tensor, offsets: Sequence[int]
                 ) -> tuple[Tensor, Tensor]:
    """(weight of each step in the sum of losses, its share in the divisor of that sum), [P, K] each, 0 where not valid.

    With c the chances, those of steps that are not learned taken for 1, sums over learned steps alone:

    `d_pace`: w_k = sum_{j >= k} prod_{i <= j} (1 - s) c_i + s; the divisor is the sum of the weights.
    `e2e`: w_k = 1/n sum_{j >= k} prod_{i <= j, i != k} c_i for n learned steps, whose loss 1 - c_k has the gradient of
    1 - 1/n sum_j prod_{i <= j} c_i; the divisor is the number of places.

    A label outside the draft vocabulary makes a step that is not learned: its share enters no divisor. A step that does
    not predict further ahead, by its offset, than the one before starts anew."""
    starts = [0, *(step for step in range(1, len(offsets)) if offsets[step] <= offsets[step - 1]), len(offsets)]
    weights, shares = [], []
    for start, stop in pairwise(starts):
        valid_PJ = valid_PK[:, start:stop]
        chances_PJ = torch.where(valid_PJ, chances_PK[:, start:stop], 1.0)
        if name == "d_pace":
            reached_PJ = ((1 - SMOOTHING) * chances_PJ + SMOOTHING).masked_fill(~valid_PJ, 1.0).cumprod(1) * valid_PJ
            weights.append(reached_PJ.flip(1).cumsum(1).flip(1) * valid_PJ)
            shares.append(weights[-1])
            continue
        # From the end: the steps from k on that are reached once step k is. A division by c_k would fail where it is 0.
        after = [valid_PJ[:, -1].to(chances_PJ)]
        for step in reversed(range(stop - start - 1)):
            after.insert(0, valid_PJ[:, step] + chances_PJ[:, step + 1] * after[0])
        before_PJ = torch.cat([torch.ones_like(chances_PJ[:, :1]), chances_PJ[:, :-1].cumprod(1)], dim=1)
        shares.append(valid_PJ / valid_PJ.sum(1, keepdim=True).clamp(min=1).to(chances_PJ))
        weights.append(before_PJ * torch.stack(after, dim=1) * shares[-1])
    return torch.cat(weights, dim=1), torch.cat(shares, dim=1)
