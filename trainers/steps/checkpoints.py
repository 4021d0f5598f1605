"""Atomic checkpoints, safe against a kill at any moment, trained weights, and the guard of steps before the host reads
their figures: one whose loss is not finite is named, and its rows are saved.

Shapes: B rows, L positions of a row, K draft steps, C columns of sums.
"""

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...modules.errors import UserError
from ...modules.features import Features
from ...modules.files.atomic_files import file_sha256, write_atomically

PARTS = {"state_dict": dict, "optimizer_states": list, "lr_schedulers": list, "loops": dict, "callbacks": dict,
         "global_step": int, "epoch": int, "pytorch-lightning_version": str, "draftsmith": dict}  # Read parts and types


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, written atomically and read without executing any code from them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint; see `write_atomically`."""
        # Into memory first: on a full disk torch.save raises a RuntimeError like that of a programming error.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_atomically(Path(path), lambda partial: partial.write_bytes(content.getbuffer()))

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
        """Read tensors and plain values only. Raises UserError when the file is damaged."""
        try:
            # torch itself checks no sums: a flipped bit would be another weight.
            with zipfile.ZipFile(path) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError, AssertionError,
                zipfile.BadZipFile) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"the checkpoint {path} is damaged ({reason}); delete it to start training "
                            "again") from error
        parts = content if isinstance(content, dict) else {}
        if wrong := [name for name, kind in PARTS.items() if not isinstance(parts.get(name), kind)]:
            raise UserError(f"the checkpoint {path} is damaged ({wrong[0]} is not as it was written); delete it to "
                            "start training again")
        return content


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> str:
    """Write weights as safetensors, the same bytes for the same weights; returns their SHA-256 in hex."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(path, lambda partial: save_file(plain, partial))
    return file_sha256(path)


def load_weights(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read weights on the CPU. Raises UserError when the file is missing or is not the one with this hash."""
    try:
        if file_sha256(path) != sha256:
            raise SafetensorError("they are not the ones that training saved")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the trained weights {path} cannot be read ({error}); delete that folder to train "
                        "again") from error


def require_same_settings(stored: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse a checkpoint of a run with other settings. Raises UserError, which names each difference."""
    former, wanted = _flat(stored), _flat(own)
    if changed := [name for name in wanted if wanted[name] != former.get(name)]:
        listed = ", ".join(f"{name} is {wanted[name]!r}, was {former.get(name)!r}" for name in changed)
        raise UserError(f"the run in this folder was started with other settings ({listed}); choose another --out "
                        "folder, or go back to those settings")


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


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
