"""Distillation losses, one value for each row of the draft's logits and the target's distribution, and the figures of a
training step.

Losses are computed in float32 or wider, as sums over one row; the caller chunks, weights and reduces them.

p is the target's distribution, q the draft's, both over the draft vocabulary. Where that is a reduced one, p is
renormalised over it, with one exception: the acceptance alpha = sum_v min(p_v, q_v) takes the target's own
probabilities, so that mass outside the draft vocabulary counts as loss (it cannot be accepted).

A place's draft steps may be weighted by the chances of the steps before: a guess counts as far as a draft gets to it.
These weights are constants of a step: no gradient passes through them.

Shapes: N predicted tokens, Q entries of the draft vocabulary, V of the target's, D hidden size, P places, K draft
steps, C columns of sums."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..modules import Target
from ..modules.target.draft_vocabulary import OutputRows
from ..modules.verification.sampling import widened

ObjectiveName = Literal["hard", "argmax", "soft", "reverse_kl", "jsd", "tvd", "hard_tvd", "hard_soft", "lk_alpha",
                        "lk_hybrid"]
"""Names for recipes; each is a function in this file."""
HARD_SHARE, TVD_SHARE = 0.1, 1.8
"""Of `hard_tvd`: DSpark's 0.1 of cross entropy, 0.9 of |p - q| (arXiv:2607.05147); `hard_soft` is PARD-2's 0.1 of cross
entropy next to the whole of the divergence (arXiv:2605.08632)."""
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
    "hard_soft": None, "lk_alpha": lk_alpha, "lk_hybrid": lk_hybrid}
"""The losses by name, None for those that read the label too."""
NEEDS_MASS: tuple[ObjectiveName, ...] = ("lk_alpha", "lk_hybrid")  # Losses that read the target's whole distribution


def objective_loss(name: ObjectiveName, logits_NQ: Tensor, labels_N: Tensor,
                   teacher_output: TeacherOutput | None) -> Tensor:
    """The loss of each row by its name, [N], in nats but for `tvd` and the part of `lk_hybrid` that is 1 - alpha.
    ValueError if it reads the target's distribution and there is none."""
    if name == "hard":
        return hard(logits_NQ, labels_N)
    if teacher_output is None:
        raise ValueError(f"the objective {name} needs the target's distribution; give a teacher")
    if (loss := OBJECTIVES[name]) is None:
        apart_N = soft(logits_NQ, teacher_output) if name == "hard_soft" else TVD_SHARE * tvd(logits_NQ, teacher_output)
        return HARD_SHARE * hard(logits_NQ, labels_N) + apart_N
    return loss(logits_NQ, teacher_output)


PathWeights = Literal["d_pace", "e2e", "cat"]
"""`d_pace` (arXiv:2605.18810): by the draft's probabilities of the labels, smoothed; `e2e` (arXiv:2607.25852): by the
probabilities that its tokens are accepted, with which the gradient of total variation is that of the accepted
length; `cat` (arXiv:2605.08632): by the target's probabilities of the labels."""
SMOOTHING = 0.5  # Share of a chance that D-PACE takes for granted: else a new draft's weights would vanish


def path_weights(name: PathWeights, chances_PK: Tensor, valid_PK: Tensor,
                 offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(weight of each step in the sum of losses, its share in the divisor of that sum), [P, K] each, 0 where not valid.

    With c the chances, those of steps that are not learned taken for 1, sums over learned steps alone:

    `d_pace`: w_k = sum_{j >= k} prod_{i <= j} (1 - s) c_i + s; the divisor is the sum of the weights.
    `e2e`: w_k = 1/n sum_{j >= k} prod_{i <= j, i != k} c_i for n learned steps, whose loss 1 - c_k has the gradient of
    1 - 1/n sum_j prod_{i <= j} c_i; the divisor is the number of places.
    `cat`: w_k = prod_{i < k} c_i; the divisor is the sum of the weights.

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
        before_PJ = torch.cat([torch.ones_like(chances_PJ[:, :1]), chances_PJ[:, :-1].cumprod(1)], dim=1)
        if name == "cat":
            weights.append(before_PJ * valid_PJ)
            shares.append(weights[-1])
            continue
        # From the end: the steps from k on that are reached once step k is. A division by c_k would fail where it is 0.
        after = [valid_PJ[:, -1].to(chances_PJ)]
        for step in reversed(range(stop - start - 1)):
            after.insert(0, valid_PJ[:, step] + chances_PJ[:, step + 1] * after[0])
        shares.append(valid_PJ / valid_PJ.sum(1, keepdim=True).clamp(min=1).to(chances_PJ))
        weights.append(before_PJ * torch.stack(after, dim=1) * shares[-1])
    return torch.cat(weights, dim=1), torch.cat(shares, dim=1)


# Figures of a step ---------------------------------------------------------------------------------------------------


class BatchLoss(NamedTuple):
    """Summed loss and counts of one micro-batch or several; to be divided once the count is complete."""

    total: Tensor  # The weighted sum of losses, differentiable
    sums_KC: Tensor  # Sums of `COLUMNS`
    weights: tuple[float, ...]  # Weight of each draft step in the total
    offsets: tuple[int, ...]  # Distance in tokens from a position to the token that each draft step predicts


RANKS = (1, 2, 3, 5, 10)  # Ranks r of reported hits: the label is among the r best guesses
COLUMNS = ("count", "missed", "loss", "alpha", "alpha_count", "feature", "share", *(f"top{rank}" for rank in RANKS))
"""Sums of each draft step: labels learned, labels outside the draft vocabulary, the whole loss; the probability that
rejection sampling accepts the draft's token, and the number of labels with it; the unweighted feature loss; the divisor
of the loss, the number of labels learned unless each has a weight of its own; hits by rank."""


def rank_hits(logits_NQ: Tensor, labels_N: Tensor, valid_N: Tensor) -> Tensor:
    """Number of valid labels among the r best entries, for each r of RANKS; float32. A label of -1 is no entry. Its
    rank is the number of strictly greater logits: one comparison in place of sorting the vocabulary. Counting in int32
    is five times as fast as in int64, the default of `sum`, to which it would copy the mask."""
    better_N = (logits_NQ > logits_NQ.gather(1, labels_N.clamp(min=0)[:, None])).sum(1, dtype=torch.int32)
    counted_N = valid_N & (labels_N >= 0)
    # One by one: the host would wait until a list of ranks is on the device.
    return torch.stack([((better_N < rank) & counted_N).sum() for rank in RANKS]).to(torch.float32)


def weighted_mean_loss(sums_KC: Tensor, weights_K: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(sum, count) of the training loss: draft step k has weight `weights_K[k]` in both."""
    loss_K, share_K = (sums_KC[:, COLUMNS.index(name)] for name in ("loss", "share"))
    return weighted(loss_K, weights_K), weighted(share_K, weights_K)


def weighted(values_K: Tensor, weights_K: Sequence[float]) -> Tensor:
    """The weighted sum of a few numbers; the weights stay on the host, which waits for no upload of them."""
    return torch.stack([weight * value for weight, value in zip(weights_K, values_K.unbind(), strict=True)]).sum()


def balance(sums_KC: Tensor, weights_K: Sequence[float], choices: int) -> Tensor:
    """Scale losses and divisors of the first steps, the choices among candidates, in place, so that their mean counts
    as their first weight next to the mean of the other steps, however few labels are candidates; returns the factor.
    The sums are those of a whole optimizer step."""
    shares_K = sums_KC[:, COLUMNS.index("share")]
    own, others = (weighted(shares_K[part], weights_K[part]) for part in (slice(choices), slice(choices, None)))
    factor = torch.where(own > 0, weights_K[0] * others / own, 0.0)
    for name in ("loss", "share"):
        sums_KC[:choices, COLUMNS.index(name)] *= factor
    return factor


def describe(sums_KC: Tensor, weights_K: Sequence[float], offsets: Sequence[int]) -> dict[str, float]:
    """Figures by name from the sums of one optimizer step or one held-out set.

    `alpha` is the mean over the labels learned and needs the target's whole distribution: with the whole vocabulary any
    teacher computes it, with a reduced one only the objectives that read it.

    `expected_accepted_length` is a teacher-forced estimate for a chain with independent steps: 1 + top1 of the first
    head + top1 of the first times top1 of the second + ... The measured figure is `accepted_length`. It is left out
    unless each draft step predicts further ahead than the one before."""
    total, share = weighted_mean_loss(sums_KC, weights_K)
    figures = {"loss": float(total / share)} if float(share) else {}
    chances = []
    for step, (row, weight) in enumerate(zip(sums_KC.tolist(), weights_K, strict=True), start=1):
        if not weight:  # Nothing was computed.
            continue
        sums = dict(zip(COLUMNS, row, strict=True))
        if not sums["count"]:
            return figures
        own = {"loss": sums["loss"] / sums["share"], **{name: sums[name] / sums["count"] for name in ("top1", "top5")}}
        own["coverage"] = sums["count"] / (sums["count"] + sums["missed"])
        if sums["alpha_count"]:
            own["alpha"] = sums["alpha"] / sums["alpha_count"]
        if sums["feature"]:
            own["feature"] = sums["feature"] / sums["count"]
        figures |= {f"head{step}/{name}": value for name, value in own.items()}
        # A label outside the draft vocabulary is never guessed.
        chances.append(sums["top1"] / (sums["count"] + sums["missed"]))
    # Steps that start anew are those of another loss about the same drafts.
    first = next((place for place, (one, other) in enumerate(pairwise(offsets), start=1) if other < one), len(offsets))
    if any(later <= earlier for earlier, later in pairwise(offsets[:first])):
        return figures
    return figures | {"expected_accepted_length": 1 + sum(accumulate(chances[:first], mul))}
