"""The batches of the running optimizer step: a step whose loss is not finite is named and saved.

Shapes: B rows, L positions of a row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L

from ...modules.errors import UserError
from ...modules.features import Features
from .checkpoints import save_weights
from .unread_steps import Batches

KINDS = ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL")
"""Parts of a batch that are kept."""
NAMED = 3
"""Rows that an error names."""


@runtime_checkable
class NamedRows(Protocol):
    """Batches that know which rows of the data they hold."""

    def rows_of(self, number: int, rank: int, world: int) -> Sequence[str]:
        """Names of the rows in micro-batch `number` of one rank."""


class StepGuard:
    """Keeper of the micro-batches of the running optimizer step, for the error of one that goes wrong."""

    def __init__(self) -> None:
        self._batches: list[tuple[int, Features]] = []

    def add(self, number: int, batch: Features) -> None:
        """Keep a micro-batch of the running step, without states."""
        self._batches.append((number, Features(**{kind: getattr(batch, kind) for kind in KINDS})))

    def end_step(self) -> Batches:
        """The micro-batches of the running step, which is over."""
        batches = tuple(self._batches)
        self._batches.clear()
        return batches

    def error(self, loss: float, step: int, batches: Batches, trainer: L.Trainer, slower: str) -> UserError:
        """The error that ends the run for a step, after its batches were written as safetensors, tokens each [B, L].

        Args:
            loss: of the step.
            step: its number.
            batches: what it has read.
            trainer: of the run.
            slower: the remedy of a run that diverges.

        Raises:
            UserError: if the disk is full.
        """
        rank, world = trainer.global_rank, trainer.world_size
        file = Path(trainer.default_root_dir) / f"wrong-step-{step:06d}-rank-{rank}.safetensors"
        save_weights(file, {f"{number}.{kind}": getattr(batch, kind) for number, batch in batches
                            for kind in KINDS})
        rows = _rows(batches, trainer.datamodule, rank, world)  # type: ignore[attr-defined]
        return UserError(f"the loss became {loss} at optimizer step {step} ({rows}; {file} holds them); {slower} and "
                         "train again into an empty --out folder")


def _rows(batches: Batches, data: Any, rank: int, world: int) -> str:
    """The rows of a step, by name where the data know them, else by micro-batch."""
    numbers = [number for number, _ in batches]
    if not isinstance(data, NamedRows):
        return f"micro-batches {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"micro-batch {numbers[0]}"
    names = list(dict.fromkeys(name for number in numbers for name in data.rows_of(number, rank, world)))
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return f"rows {', '.join([*names[:NAMED], *more])}"
