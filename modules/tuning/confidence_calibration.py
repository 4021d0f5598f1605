"""Calibration of how a drafter judges its guesses: the chances that it gives them, and the share that was right.

Shapes: N guesses, P places where a draft starts, K draft steps, C bins of chances, X width of the drafter's states.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..features import Features
from ..interfaces.drafter import Drafter
from ..interfaces.proposer import JudgesGuesses

BINS = 10  # Equal bins of chances between 0 and 1
TEMPERATURES = tuple(2.0 ** (quarter / 4) for quarter in range(-8, 13))
"""Temperatures among which a drafter's judgement of its guesses is calibrated: from 1/4 to 8."""
_CHUNK = 512  # Positions whose logits are computed at once


def calibration_error(log_chances_N: Tensor, right_N: Tensor) -> float:
    """Distance between mean chance and share of right guesses of a bin, averaged over guesses (arXiv:1706.04599, eq.
    3); 0 without guesses."""
    chances_N = log_chances_N.double().exp().clamp(max=1)
    bins_N = (chances_N * BINS).long().clamp(max=BINS - 1)
    gaps_C = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins_N, chances_N - right_N.double())
    return float(gaps_C.abs().sum()) / max(1, len(right_N))


@torch.no_grad()
def calibrate_judgement(drafter: Drafter, features: Sequence[Features]) -> Tensor:
    """Give the judgement of each draft step a temperature, [K], so that the product of the judged chances down to it is
    calibrated on held-out greedy answers (sequential temperature scaling, arXiv:2607.05147): those before it are fixed.
    Raises ValueError for a drafter that does not judge its guesses.
    """
    if not (isinstance(drafter, JudgesGuesses) and drafter.judges):
        raise ValueError("this drafter does not judge its guesses")
    drafter.judge_temperatures_K.fill_(1.0)
    found: list[list[Tensor]] = [[] for _ in drafter.judge_temperatures_K]
    for batch in features:
        drafts = drafter(batch)
        # Guesses after a wrong one, or beyond the answer, are not verified; a block starts with a token of the answer.
        reached_BL = batch.labels(1)[1]
        for step, offset in enumerate(drafts.offsets):
            labels_BL, there_BL = batch.labels(offset)
            reached_BL = reached_BL & there_BL
            rights, logits = [], []
            for states_NX in torch.split(drafts.hidden_BLKD[:, :, step].flatten(0, 1), _CHUNK):
                guesses_N = drafter.project(states_NX, step).argmax(-1)
                rights.append(guesses_N if drafter.token_ids_Q is None else drafter.token_ids_Q[guesses_N])
                logits.append(drafter.judge(states_NX, step))
            right_BL = (torch.cat(rights) == labels_BL.flatten()).view_as(there_BL)
            found[step].append(torch.stack([torch.cat(logits).double(), right_BL.flatten().double(),
                                            reached_BL.flatten().double()]))
    before_P, right_P, chosen = torch.zeros(1), torch.ones(1), []
    for parts in found:
        logits_P, rights_P, reached_P = torch.cat(parts, dim=1).cpu()
        right_P, best = right_P * rights_P, (torch.inf, 1.0, before_P)
        for temperature in TEMPERATURES:
            log_chance_P = before_P + logsigmoid(logits_P / temperature)
            error = calibration_error(log_chance_P[reached_P > 0], right_P[reached_P > 0])
            # Of equal errors the one nearest to no change.
            best = min(best, (error, temperature, log_chance_P), key=lambda one: (one[0], abs(log(one[1]))))
        chosen.append(best[1])
        before_P = best[2]
    chosen_K = torch.tensor(chosen).to(drafter.judge_temperatures_K)
    drafter.judge_temperatures_K.copy_(chosen_K)
    return chosen_K
