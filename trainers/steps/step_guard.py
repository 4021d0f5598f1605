"""Steps before the host reads their figures: one whose loss is not finite is named, and its rows are saved.

Shapes: B rows, L positions of a row, K draft steps, C columns of sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import lightning as L
import torch
from torch import Tensor

from ...modules.errors import UserError
from ...modules.features import Features
from .checkpoints import save_weights

KINDS = ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL")  # Parts of a batch that are kept
NAMED = 3  # Rows that an error names


READ_EVERY = 10  # Optimizer steps on an accelerator between two reads of their figures; a CPU's are read at once
Batches = tuple[tuple[int, Features], ...]  # Micro-batches of a step with their numbers, without states


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """An optimizer step whose figures are still to be read."""

    number: int  # Number of the step, from 1
    sums_KC: Tensor  # Sums of `metrics.COLUMNS` over all its micro-batches and processes
    weights: tuple[float, ...]  # Weight of each draft step in the loss
    offsets: tuple[int, ...]  # Distance in tokens to the token that each draft step predicts
    learning_rate: float  # Of its update
    batches: Batches  # Its micro-batches


@runtime_checkable
class NamedRows(Protocol):
    """Batches that know which rows of the data they hold."""

    def rows_of(self, number: int, rank: int, world: int) -> Sequence[str]:
        """Names of the rows in micro-batch `number` of one rank."""


@dataclass
class StepGuard:
    """Keeper of the micro-batches of the running optimizer step, and of finished steps that the host has not read: on
    an accelerator every read of figures waits for all its work, so several steps are read at once."""

    batches: list[tuple[int, Features]] = field(default_factory=list)  # Of the running step by number, without states
    unread: list[FinishedStep] = field(default_factory=list)  # Whose figures are still to be read, in order

    @property
    def due(self) -> bool:
        """True once the finished steps are to be read."""
        return bool(self.unread) and (self.unread[0].sums_KC.device.type == "cpu" or len(self.unread) >= READ_EVERY)

    def read(self) -> Iterator[tuple[FinishedStep, Tensor]]:
        """(step, its sums on the host) of all finished steps, in one read; none of them is kept."""
        read, self.unread = self.unread, []
        if read:
            yield from zip(read, torch.stack([step.sums_KC for step in read]).cpu(), strict=True)

    def error(self, loss: float, step: int, batches: Batches, trainer: L.Trainer, slower: str) -> UserError:
        """The error that ends the run for a step, after the batches that it has read were written as safetensors,
        tokens each [B, L]. `slower` is the remedy of a run that diverges. UserError if the disk is full."""
        rank, world = trainer.global_rank, trainer.world_size
        # Each process keeps its own rows: any of them may have been the wrong one.
        file = Path(trainer.default_root_dir) / f"wrong-step-{step:06d}-rank-{rank}.safetensors"
        save_weights(file, {f"{number}.{kind}": getattr(batch, kind) for number, batch in batches
                            for kind in KINDS})
        numbers, data = [number for number, _ in batches], trainer.datamodule  # type: ignore[attr-defined]
        rows = f"micro-batches {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"micro-batch {numbers[0]}"
        # Only data that were distilled know their rows by name.
        if isinstance(data, NamedRows):
            names = list(dict.fromkeys(name for number in numbers for name in data.rows_of(number, rank, world)))
            more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
            rows = f"rows {', '.join([*names[:NAMED], *more])}"
        return UserError(f"the loss became {loss} at optimizer step {step} ({rows}; {file} holds them); {slower} and "
                         "train again into an empty --out folder")
