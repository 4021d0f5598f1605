"""Batches for Lightning: micro-batch n is a pure function of the seed, n, the rank and the world size."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning
from torch import Tensor

from ..modules import Features


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Shape and order of the training batches."""

    row_length: int = 512
    """Tokens of a packed row. Longer conversations: windows of stored states; without stored states, cut at the end."""
    rows_per_batch: int = 4
    """Packed rows of one micro-batch on one device."""
    seed: int = 0
    """Of the order of the conversations."""
    source: Literal["features", "tokens"] = "features"
    """features: states stored by `encode`; tokens: the target computes them in the step."""


class DraftDataModule(lightning.LightningDataModule):
    """Token or feature shards of one folder."""

    def __init__(self, folder: str | Path, config: BatchConfig, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        raise NotImplementedError

    def micro_batch(self, number: int, rank: int = 0, world: int = 1) -> Features:
        """Training micro-batch `number` of one rank."""
        raise NotImplementedError

    def validation_features(self) -> list[Features]:
        """The held-out conversations, one a row, one row a batch."""
        raise NotImplementedError


def count_tokens(folder: str | Path) -> Tensor:
    """How often each token of the target's vocabulary occurs among the supervised train tokens: int64 [V]."""
    raise NotImplementedError
