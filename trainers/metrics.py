"""What a training step is told by: sums and counts for each draft step, reduced last.

Shapes: K draft steps, C columns of sums, N rows, Q entries of the draft vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

import torch
from torch import Tensor

RANKS = (1, 2, 3, 5, 10)
"""A hit at rank r: the label is among the r best guesses."""
COLUMNS = ("count", "missed", "loss", "alpha", "alpha_count", "feature", *(f"top{rank}" for rank in RANKS))
"""Sums kept for each draft step: labels learned, labels outside the draft vocabulary, the whole loss; the chance that
rejection sampling accepts the draft's token, and how many labels it was formed for; the feature loss before its
weight; hits by rank."""


def rank_hits(logits_NQ: Tensor, labels_N: Tensor, valid_N: Tensor) -> Tensor:
    """How many valid labels are among the r best entries, for each r of RANKS; float32.

    A label's rank is the number of strictly greater logits: one comparison instead of a sort of the vocabulary.
    Counting in int32 is five times as fast as in the int64 that `sum` takes by itself, to which it copies the mask.
    """
    better_N = (logits_NQ > logits_NQ.gather(1, labels_N[:, None])).sum(1, dtype=torch.int32)
    ranks_R = torch.tensor(RANKS, device=logits_NQ.device)
    return ((better_N[:, None] < ranks_R) & valid_N[:, None]).sum(0).to(torch.float32)


def weighted_mean_loss(sums_KC: Tensor, weights_K: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(sum, count) of the training loss: draft step k counts `weights_K[k]` times, in the loss and in the count."""
    weights = torch.tensor(weights_K, dtype=sums_KC.dtype, device=sums_KC.device)
    return (weights * sums_KC[:, COLUMNS.index("loss")]).sum(), (weights * sums_KC[:, 0]).sum()


def describe(sums_KC: Tensor, weights_K: Sequence[float], offsets: Sequence[int]) -> dict[str, float]:
    """Readable figures of the sums of one optimizer step or one held-out set.

    `alpha` is the mean over the labels learned, where the target's whole distribution was formed: over the whole
    vocabulary with any teacher, over a reduced one with the objectives that need it.

    `expected_accepted_length` is a teacher-forced estimate for a chain, steps taken as independent: 1 + top1 of the
    first head + top1 of the first times top1 of the second + ... It is no measurement; that is `accepted_length`. It
    stands only where each draft step predicts further ahead than the one before.
    """
    total, weight = weighted_mean_loss(sums_KC, weights_K)
    figures = {"loss": float(total / weight)} if float(weight) else {}
    chances = []
    for step, row in enumerate(sums_KC.tolist(), start=1):
        sums = dict(zip(COLUMNS, row, strict=True))
        if not sums["count"]:
            return figures
        figures |= {f"head{step}/{name}": value for name, value in _of_step(sums).items()}
        chances.append(sums["top1"] / (sums["count"] + sums["missed"]))
    if any(later <= earlier for earlier, later in pairwise(offsets)):
        return figures
    return figures | {"expected_accepted_length": 1 + sum(accumulate(chances, mul))}


def _of_step(sums: dict[str, float]) -> dict[str, float]:
    figures = {name: sums[name] / sums["count"] for name in ("loss", "top1", "top5")}
    figures["coverage"] = sums["count"] / (sums["count"] + sums["missed"])
    if sums["alpha_count"]:
        figures["alpha"] = sums["alpha"] / sums["alpha_count"]
    if sums["feature"]:
        figures["feature"] = sums["feature"] / sums["count"]
    return figures
