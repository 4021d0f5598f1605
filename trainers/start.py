"""A trained drafter that a training continues, and what its settings say of the recipe's."""

from copy import copy
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..modules.errors import UserError
from ..modules.files.json_records import shortened
from ..modules.interfaces.drafter import Drafter, DrafterConfig
from ..modules.target.adapter import Adapter
from .train_config import TrainConfig

WARMUP_SHARE = 4
"""A continued training has a warm-up this many times shorter: the rise is there for the large gradients of new weights.
A few steps of it stay, as AdamW's first ones are as long as the learning rate whatever the gradient."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A drafter in the number format of its artifact, not bound to a target."""

    drafter: Drafter
    """The drafter; without values for a sketch of its target."""
    adapter: Adapter | None = None
    """Changes of the target's weights that belong to it; None if there are none, and for a sketch."""
    weights_sha256: str
    """Hash of its weights."""

    @property
    def draft_ids_Q(self) -> Tensor | None:
        """Ids of its reduced draft vocabulary; any for a sketch, which has no values."""
        ids_Q = self.drafter.token_ids_Q
        return torch.arange(len(ids_Q)) if ids_Q is not None and ids_Q.is_meta else ids_Q


def continued(config: TrainConfig, start: Start, family: str, *, adapts: bool) -> TrainConfig:
    """The settings of a training that continues `start`; `adapts` if the target is trained too. UserError if it is of
    another family, or does not fit the settings."""
    if start.drafter.family != family:
        raise UserError(f"train.start holds a drafter of the family {start.drafter.family}, and this recipe trains "
                        f"{family}; name an artifact of {family}, or set family to {start.drafter.family}")
    if start.adapter is not None and not adapts:
        raise UserError("train.start holds a drafter that guesses for a changed target, whose changes only medusa2 "
                        f"trains; set family to medusa2, or name an artifact of {family} without changes of the target")
    return replace(config, drafter=continued_settings(config.drafter, start.drafter.config))


def continued_settings(config: DrafterConfig, start: DrafterConfig) -> DrafterConfig:
    """The settings of a drafter that continues another one's training: those that only change training are the
    recipe's; of the others, which decide weights or what they compute, the ones that the recipe leaves at the family's
    default are the start's. UserError if the recipe sets one of these to a value to which the weights are not carried
    over."""
    usual = type(config)()
    apart = [name for one in fields(config) if (name := one.name) not in config.training_only
             and getattr(config, name) != getattr(start, name)]
    # A mixture of both may be none that the settings' own checks accept: what does not fit is refused first.
    found = copy(config)
    vars(found).update({name: getattr(start, name) for name in apart
                        if getattr(config, name) == getattr(usual, name) and config.inherits(name, start)})
    for name in apart:
        wanted, former = getattr(found, name), getattr(start, name)
        if wanted != former and not found.carries(name, start):
            said = shortened(former)
            raise UserError(f"drafter.{name} is {shortened(wanted)}, and the drafter of train.start has {said}, whose "
                            f"weights do not fit; set drafter.{name} to {said}, or leave train.start out for a new "
                            "drafter")
    return replace(found)
