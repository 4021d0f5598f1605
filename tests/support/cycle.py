"""Endless deterministic training text: a walk along one fixed cycle of token ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from draftsmith.modules import Features, Target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
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
