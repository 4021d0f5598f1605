"""Cases: the kinds of drafters on which the tests of all families run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from draftsmith.modules import Adapter, Drafter, Target
from draftsmith.modules.interfaces.drafter import DrafterConfig
from draftsmith.trainers import DraftModule, draft_module
from support.cycle import cycle_target

D = TypeVar("D", bound=Drafter)
IDS = torch.tensor([0, 1, 2, 5, 9, *range(28, 48), 60])
"""A reduced vocabulary that contains the cycle of tests/support/cycle.py."""


def _unchanged(_target: Target) -> None:
    """No change of the target, as in most families."""


@dataclass(frozen=True)
class Case:
    """One kind of drafter for a tiny target."""

    make: Callable[[Target], Drafter]  # A new drafter, bound to the target that verifies its drafts
    module: Callable[..., DraftModule]  # Its LightningModule, from (target, **training settings)
    change: Callable[[Target], Adapter | None] = _unchanged
    """A change of the target as training might make it, for families that train it: the same every time."""
    steps: int = 80  # Optimizer steps in which it learns the cycle of tests/support/cycle.py
    lr: float = 1.5e-2  # Learning rate with which it does
    learned: float = 0.9  # Share of right guesses of the first step that it exceeds then
    teacher: Callable[[], Target] = cycle_target  # The target that it learns the cycle with

    def verifier(self, target: Target) -> Target:
        """The target that verifies its drafts: the given one, or a changed copy of it."""
        adapter = self.change(target)
        return target if adapter is None else target.adapted(adapter)


def case(drafter: type[Drafter], config: Any, ids: torch.Tensor | None = None, *,
         module: type[DraftModule] | None = None, **settings: Any) -> Case:
    """A drafter of this shape, trained as its family is, or by this module."""
    kind = module or draft_module(drafter)

    def made(target: Target, **given: Any) -> DraftModule:
        counts = torch.zeros(target.vocab_size)
        if ids is not None:
            counts[ids] = 1.0
        return kind(target, kind.settings()(drafter=config, **settings | given), token_counts=counts)

    return Case(make=lambda target: drafter.create(config, target, ids), module=made)


def randomised(drafter: D) -> D:
    """The drafter with noise on all weights, so that none keeps a special initial value."""
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += (0.3 if parameter.ndim == 1 else 0.3 / parameter.shape[-1] ** 0.5) * noise.to(parameter)
    return drafter.eval()


def asked_for(config: DrafterConfig) -> dict[str, Any]:
    """The settings that a drafter which continues one of this configuration has only if its recipe states them."""
    return {name: value for name, value in vars(config).items()
            if name in config.training_only or not config.inherits(name, config)}
