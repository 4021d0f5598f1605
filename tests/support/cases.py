"""Cases: the kinds of drafters on which the tests of all families run, and the endless text that they learn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning as L
import pytest
import torch
from draftsmith.modules import Adapter, Drafter, Features, Target
from draftsmith.modules.interfaces.drafter import DrafterConfig
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.trainers import DraftModule, draft_module
from draftsmith.trainers.objectives import weighted_mean_loss
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

CYCLE = tuple(range(30, 46))
LENGTH = 24


def cycle_target() -> Target:
    return Target(tiny_model(), tiny_tokenizer(), name="tiny-random")


def cycle_rows(number: int, rows: int = 2) -> Features:
    """Rows from a random start on the cycle with a prompt of 3 to 7 unsupervised tokens, both set by `number`."""
    starts = torch.randint(len(CYCLE), (rows,), generator=torch.Generator().manual_seed(number)).tolist()
    tokens = [[CYCLE[(start + place) % len(CYCLE)] for place in range(LENGTH)] for start in starts]
    supervised = [place >= 3 + number % 5 for place in range(LENGTH)]
    return Features.from_rows([(row, supervised) for row in tokens])


def merged(batches: list[Features]) -> Features:
    """The rows of several batches as one batch."""
    return Features(**{name: torch.cat([getattr(batch, name) for batch in batches])
                       for name in ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL")})


class _Endless(IterableDataset[Features]):
    def __init__(self, first: int, rank: int, world: int, merge: int) -> None:
        self.first, self.rank, self.world, self.merge = first, rank, world, merge

    def __iter__(self) -> Iterator[Features]:
        number = self.first
        while True:
            first = (number * self.world + self.rank) * self.merge
            yield merged([cycle_rows(first + part) for part in range(self.merge)])
            number += 1


class CycleData(L.LightningDataModule):
    """Micro-batch n of rank r is global batch n * world + r, as in the data room; `merge` of them form one."""

    def __init__(self, held_out: int = 2, merge: int = 1) -> None:
        super().__init__()
        self.held_out, self.merge = held_out, merge

    def train_dataloader(self) -> Any:
        trainer = self.trainer
        first = trainer.global_step * trainer.accumulate_grad_batches
        return DataLoader(_Endless(first, trainer.global_rank, trainer.world_size, self.merge), batch_size=None)

    def validation_features(self) -> list[Features]:
        return [cycle_rows(10_000 + number, rows=1) for number in range(self.held_out)]


class Power(Exception):
    """An interruption of the run."""


@contextmanager
def interrupted(kind: Any, at: int) -> Iterator[None]:
    """The training of this kind of module that the block starts is interrupted in one micro-batch."""
    step = kind.training_step

    def training_step(self: Any, batch: Features, batch_idx: int) -> torch.Tensor:
        if batch_idx == at:
            raise Power
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "training_step", training_step)
        with pytest.raises(Power):
            yield


D = TypeVar("D", bound=Drafter)
IDS = torch.tensor([0, 1, 2, 5, 9, *range(28, 48), 60])  # A reduced vocabulary that contains `CYCLE`


def _unchanged(_target: Target) -> None:
    """No change of the target, as in most families."""


@dataclass(frozen=True)
class Case:
    """One kind of drafter for a tiny target."""

    make: Callable[[Target], Drafter]  # A new drafter, bound to the target that verifies its drafts
    module: Callable[..., DraftModule]  # Its LightningModule, from (target, **training settings)
    change: Callable[[Target], Adapter | None] = _unchanged
    """A change of the target as training might make it, for families that train it: the same every time."""
    steps: int = 80  # Optimizer steps in which it learns `CYCLE`
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


def module_of(case: Case, target: Target, *, training: bool = True) -> DraftModule:
    """The training module of a case at three quarters of a run, when all weights are trained, with random weights."""
    module = case.module(target, max_minutes=1.0)
    module.configure_model()
    module.seconds = 45.0
    randomised(module.drafter)
    return module.to(target.dtype).train(training)


def gradients(module: DraftModule, batches: list[Features]) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean loss, gradient of each trained weight) of one optimizer step over these micro-batches, as
    `DraftModule.training_step` sums and `on_before_optimizer_step` divides them."""
    module.zero_grad()
    sums_KC, weights = None, ()
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        learned = module.loss(batch)
        learned.total.backward()
        sums_KC = learned.sums_KC if sums_KC is None else sums_KC + learned.sums_KC
        weights = learned.weights
    assert sums_KC is not None
    total, count = weighted_mean_loss(sums_KC, weights)
    return total / count, {name: parameter.grad / count for name, parameter in module.named_parameters()
                           if parameter.grad is not None}
