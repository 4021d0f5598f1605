"""Slow plain twin of `draftsmith.trainers.chunked_losses`: one token at a time, whole logits, autograd."""

from torch import Tensor

from references import objectives


def supervised(features, row, index, offset):
    """True if the token `offset` places after `index` is one of the same conversation that the assistant wrote."""
    there, segments = index + offset, features.segments_BL[row].tolist()
    inside = there < len(segments) and segments[index] == segments[there] >= 0
    return inside and bool(features.supervised_BL[row, there])


def plain_loss(
    target, project, drafts, features, weights, *, objective="hard", ids=None, feature_weight=0.0
) -> tuple[Tensor, float]:
    """(weighted sum of losses, weighted count); `ids` are the target ids of the draft vocabulary's entries."""
    ids = list(range(target.vocab_size)) if ids is None else ids.tolist()
    total, count = drafts.hidden_BLKD.sum() * 0.0, 0.0
    rows, length = features.tokens_BL.shape
    for row, index in [(row, index) for row in range(rows) for index in range(length)]:
        for step, offset in enumerate(drafts.offsets):
            present = drafts.valid_BLK is None or bool(drafts.valid_BLK[row, index, step])
            if not (present and supervised(features, row, index, offset)):
                continue
            if (label := int(features.tokens_BL[row, index + offset])) not in ids:
                continue
            state = drafts.hidden_BLKD[row, index, step]
            p = target.logits(features.final()[row, index + offset - 1]).softmax(-1)
            loss = objectives.loss(objective, p, project(state, step).softmax(-1), ids, ids.index(label))
            if feature_weight:
                held = state if drafts.estimated_BLKD is None else drafts.estimated_BLKD[row, index, step]
                loss = loss + feature_weight * smooth_l1(held, features.final()[row, index + drafts.estimates[step]])
            total, count = total + weights[step] * loss, count + weights[step]
    return total, count


def smooth_l1(state, estimated):
    apart = (state - estimated).abs()
    return sum(value**2 / 2 if value < 1 else value - 0.5 for value in apart) / len(apart)
