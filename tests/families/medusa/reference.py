"""Slow plain twin of Medusa-2's joint loss: one token at a time, the teacher's states from the original target."""

import dataclasses

from references.vocabulary_loss import plain_loss
from torch import Tensor


def joint_loss(module, features, weights) -> Tensor:
    """Weighted sum of the losses of the adapted target's own predictions and of the heads on its states."""
    original, traced = module.target.encode(features), module.learning.target.trace(features)
    drafts = module.drafter(traced)
    own = dataclasses.replace(drafts, hidden_BLKD=traced.final()[:, :, None], offsets=(1,), estimates=None)
    heads, _ = plain_loss(module.target, module.drafter.project, drafts, original, weights[1:],
                          ids=module.drafter.token_ids_Q)
    language, _ = plain_loss(module.target, lambda hidden, _step: module.learning.target.logits(hidden), own, original,
                             weights[:1], objective="soft")
    return heads + language
