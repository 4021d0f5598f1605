"""Figures of a training step: sums and counts for each draft step, reduced last, and the loss before its division.

Shapes: K draft steps, C columns of sums, N rows, Q entries of the draft vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor


class BatchLoss(NamedTuple):
    """Summed loss and counts of one micro-batch or several; to be divided once the count is complete."""

    total: Tensor  # The weighted sum of losses, differentiable
    sums_KC: Tensor  # Sums of `metrics.COLUMNS`
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
