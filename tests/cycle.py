"""Endless training text in which every token decides the next: a walk along one fixed cycle of token ids."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from draftsmith.modules import Features, Target
from draftsmith.modules.tiny import tiny_model, tiny_tokenizer
from torch.utils.data import DataLoader, IterableDataset

CYCLE = tuple(range(30, 46))
PROMPT = 3
LENGTH = 24


def cycle_target() -> Target:
    return Target(tiny_model(), tiny_tokenizer(), name="tiny-random")


def cycle_rows(number: int, rows: int = 2, padding: int = 0) -> Features:
    """Rows that begin anywhere on the cycle; `number` decides where. The first PROMPT tokens are not supervised."""
    starts = torch.randint(len(CYCLE), (rows,), generator=torch.Generator().manual_seed(number)).tolist()
    tokens = [[CYCLE[(start + place) % len(CYCLE)] for place in range(LENGTH)] for start in starts]
    supervised = [place >= PROMPT for place in range(LENGTH)]
    batch = Features.from_rows([(row, supervised) for row in tokens])
    if not padding:
        return batch
    wide = Features.from_rows([(row + [0] * padding, supervised + [False] * padding) for row in tokens])
    wide.segments_BL[:, LENGTH:] = -1
    return wide


class _Endless(IterableDataset[Features]):
    def __init__(self, first: int, rank: int, world: int) -> None:
        self.first, self.rank, self.world = first, rank, world

    def __iter__(self) -> Iterator[Features]:
        number = self.first
        while True:
            yield cycle_rows(number * self.world + self.rank)
            number += 1


class CycleData(L.LightningDataModule):
    """Micro-batch n of rank r is global batch n * world + r, as the data room does it."""

    def __init__(self, held_out: int = 2) -> None:
        super().__init__()
        self.held_out = held_out

    def train_dataloader(self) -> Any:
        first = self.trainer.global_step * self.trainer.accumulate_grad_batches
        return DataLoader(_Endless(first, self.trainer.global_rank, self.trainer.world_size), batch_size=None)

    def validation_features(self) -> list[Features]:
        return [cycle_rows(10_000 + number, rows=1) for number in range(self.held_out)]
