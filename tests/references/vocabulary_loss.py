"""Slow plain twin of `draftsmith.trainers.losses`: one token at a time, whole logits, autograd."""

from torch import Tensor


def supervised(features, row, index, offset):
    """Whether the token `offset` places after `index` is one of the same conversation that the assistant wrote."""
    there, segments = index + offset, features.segments_BL[row].tolist()
    inside = there < len(segments) and segments[index] == segments[there] >= 0
    return inside and bool(features.supervised_BL[row, there])


def plain_loss(project, drafts, features, weights, *, teacher=None, entry=lambda token: token) -> tuple[Tensor, float]:
    """(weighted sum of losses, weighted count); `entry(token)` is its place in the draft vocabulary, -1 for none."""
    total, count = drafts.hidden_BLKD.sum() * 0.0, 0.0
    rows, length = features.tokens_BL.shape
    for row, index in [(row, index) for row in range(rows) for index in range(length)]:
        for step, offset in enumerate(drafts.offsets):
            if not supervised(features, row, index, offset):
                continue
            if (label := entry(int(features.tokens_BL[row, index + offset]))) < 0:
                continue
            log_q = project(drafts.hidden_BLKD[row, index, step], step).log_softmax(-1)
            p = None if teacher is None else teacher(features.final()[row, index + offset - 1]).softmax(-1)
            total = total - weights[step] * (log_q[label] if p is None else (p * log_q).sum())
            count += weights[step]
    return total, count
