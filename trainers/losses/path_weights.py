"""Weights of a place's draft steps by the chances of the steps before: a guess counts as far as a draft gets to it.

They are constants of a step: no gradient passes through them.

Shapes: P places, K draft steps.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

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

    A label outside the draft vocabulary makes a step that is not learned: its share enters no divisor.
    A step that does not predict further ahead, by its offset, than the one before starts anew.
    """
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
