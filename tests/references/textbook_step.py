"""Slow plain twin of a training step: one conversation in each padded row, and the logits of all positions at once."""

from dataclasses import replace

import torch
from draftsmith.modules.target.draft_vocabulary import draft_index
from draftsmith.trainers.objectives import NEEDS_MASS, Teacher, objective_loss
from torch.nn import functional


def textbook_gradient(module, batch, mixed, part):
    """Back-propagate the summed loss of a batch; returns its weighted count.

    `mixed` is the context of the arithmetic; `part(name)` is one around a part of the work.
    """
    with mixed:
        features = module.encoded(batch) if module.needs_states else batch
        drafts = module.drafter(features)
    # The loss's own graph ends at the draft states, so that its time is known apart from the drafter's.
    apart = {name: None if (states := getattr(drafts, name)) is None else states.detach().requires_grad_()
             for name in ("hidden_BLKD", "estimated_BLKD")}
    with part("vocabulary loss"):
        with mixed:
            total, count = textbook_loss(module, replace(drafts, **apart), features)
        total.backward()
    reached = [(getattr(drafts, name), states.grad) for name, states in apart.items()
               if states is not None and states.grad is not None]
    torch.autograd.backward([states for states, _ in reached], [gradient for _, gradient in reached])
    return count


def textbook_loss(module, drafts, features):
    """(weighted sum of the losses of all draft steps at all positions, weighted count)."""
    ids_Q, size = module.drafter.token_ids_Q, features.tokens_BL.shape
    teacher = None
    if module.needs_teacher:
        masses = module.config.objective in NEEDS_MASS
        teacher = Teacher(module.target, ids_Q, mass=masses)(features.final().flatten(0, 1))
    total, count, weights = 0.0, 0.0, module.weights(len(drafts.offsets))
    places_BA = drafts.indices_BL
    for step, offset in enumerate(drafts.offsets):
        labels_BL, valid_BL = (chosen(values_BL, places_BA) for values_BL in features.labels(offset))
        if ids_Q is not None:
            labels_BL = draft_index(ids_Q, module.target.vocab_size)[labels_BL]
        valid_BL = valid_BL & (labels_BL >= 0)
        if drafts.valid_BLK is not None:
            valid_BL = valid_BL & drafts.valid_BLK[:, :, step]
        logits_BLQ = module.drafter.project(drafts.hidden_BLKD[:, :, step], step)
        loss_N = objective_loss(module.config.objective, logits_BLQ.flatten(0, 1), labels_BL.clamp(min=0).flatten(),
                                ahead(teacher, size, offset - 1, places_BA))
        loss_BL = loss_N.view(labels_BL.shape)
        if module.config.feature_weight:
            states_BLD = (drafts.hidden_BLKD if drafts.estimated_BLKD is None else drafts.estimated_BLKD)[:, :, step]
            final_BLD = features.final().roll(-drafts.estimates[step], 1)
            apart_BL = functional.smooth_l1_loss(states_BLD.float(), final_BLD.float(), reduction="none").mean(-1)
            loss_BL = loss_BL + module.config.feature_weight * apart_BL
        total = total + weights[step] * torch.where(valid_BL, loss_BL, 0.0).sum()
        count = count + weights[step] * valid_BL.sum()
    return total, count


def chosen(values, places_BA):
    """Values [B, L, ...] at the positions after which blocks start, or at all of them."""
    if places_BA is None:
        return values
    return torch.stack([row[places_A] for row, places_A in zip(values, places_BA, strict=True)])


def ahead(teacher, size, places, places_BA=None):
    """The target's distributions `places` positions ahead of each one, or of the chosen ones."""
    if teacher is None:
        return None

    def moved(values):
        if values is None:
            return None
        return chosen(values.view(*size, *values.shape[1:]).roll(-places, 1), places_BA).flatten(0, 1)

    return replace(teacher, logits_NQ=moved(teacher.logits_NQ), log_mass_N=moved(teacher.log_mass_N))
