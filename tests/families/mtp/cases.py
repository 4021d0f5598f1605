"""The target's own head: here a layer of the target's kind with random weights, as if it had come along."""

from typing import Any

import torch
from draftsmith.modules import Mtp, MtpConfig, Target
from draftsmith.modules.families.mtp.drafter import HeadShape
from draftsmith.modules.target.submodel import fields_of, one_layer
from draftsmith.trainers import DraftModule, draft_module, train_config
from draftsmith.trainers.train_config import Start
from support.cases import IDS, Case


def head(target: Target, *, state_first: bool = False) -> Mtp:
    """A random head, not bound."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Mtp(MtpConfig(), target, HeadShape(model=fields_of(one_layer(target, sparse=False)),
                                                  state_first=state_first))


def _case(config: MtpConfig, ids: torch.Tensor | None = None, *, state_first: bool = False) -> Case:
    def made(target: Target, **given: Any) -> DraftModule:
        counts = torch.zeros(target.vocab_size)
        if ids is not None:
            counts[ids] = 1.0
        module = draft_module(Mtp)(target, train_config(Mtp)(drafter=config, **given), token_counts=counts)
        module.continue_from(Start(drafter=head(target, state_first=state_first), weights_sha256=""))
        return module

    return Case(make=lambda target: Mtp.create(config, target, ids, head(target, state_first=state_first)), module=made)


CASES = {
    "mtp": _case(MtpConfig()),
    "mtp-reduced": _case(MtpConfig(steps=2, vocabulary_size=len(IDS)), IDS, state_first=True),
}
