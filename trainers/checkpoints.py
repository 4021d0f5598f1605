"""Atomic checkpoints, safe against a kill at any time, and trained weights; steps whose figures the host has not read,
of which one whose loss is not finite is named, and its rows are saved; the time of a training, the part that waits for
data, peak memory, and what it has learned between two measurements on held-out text.

Shapes: B rows, L positions of a row."""

import io
import pickle
import resource
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..modules import Features, MeasuredStep, UserError
from ..modules.files.atomic_files import file_sha256, write_atomically
from .objectives import BatchLoss

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


@runtime_checkable
class NamedRows(Protocol):
    """Batches that know which rows of the data they hold."""

    def rows_of(self, number: int, rank: int, world: int) -> Sequence[str]:
        """Names of the rows in micro-batch `number` of one rank."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """An optimizer step whose figures are still to be read."""

    number: int  # Number of the step, from 1
    learned: BatchLoss  # Its loss over all its micro-batches and processes
    learning_rate: float  # Of its update
    batches: tuple[tuple[int, Features], ...]  # Its micro-batches with their numbers, without states

    def error(self, loss: float, trainer: L.Trainer, slower: str) -> UserError:
        """The error of this loss, which ends the run, after the batches that the step has read were written as
        safetensors, tokens each [B, L]. `slower` is the remedy of a run that diverges. UserError if the disk is
        full."""
        rank, world = trainer.global_rank, trainer.world_size
        # Each process keeps its own rows: any of them may have been the wrong one.
        file = Path(trainer.default_root_dir) / f"wrong-step-{self.number:06d}-rank-{rank}.safetensors"
        save_weights(file, {f"{number}.{kind}": getattr(batch, kind) for number, batch in self.batches
                            for kind in KINDS})
        numbers, data = [number for number, _ in self.batches], trainer.datamodule  # type: ignore[attr-defined]
        rows = f"micro-batches {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"micro-batch {numbers[0]}"
        # Only data that were distilled know their rows by name.
        if isinstance(data, NamedRows):
            names = list(dict.fromkeys(name for number in numbers for name in data.rows_of(number, rank, world)))
            more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
            rows = f"rows {', '.join([*names[:NAMED], *more])}"
        return UserError(f"the loss became {loss} at optimizer step {self.number} ({rows}; {file} holds them); {slower}"
                         " and train again into an empty --out folder")


# Time and figures -----------------------------------------------------------------------------------------------------


@runtime_checkable
class TimedBatches(Protocol):
    """Batches that know how long training has waited for them."""

    waited: float  # Seconds so far


@dataclass
class Clock:
    """A clock of training seconds, without validation, checkpoints and the time before the first step: it is stopped
    until `start`; and of the seconds that training waits for its batches, at most: the host waits, and a GPU may be at
    work meanwhile. A resumed run sets `before` and `waited_before` to those of the interrupted one."""

    before: float = 0.0  # Seconds up to the last stop
    waited_before: float = 0.0  # Seconds of waiting that are not those of these batches
    _since: float | None = field(default=None, init=False)
    _batches: TimedBatches | None = field(default=None, init=False)

    def watch(self, batches: object) -> None:
        """Count waiting from here, where the batches know."""
        if isinstance(batches, TimedBatches):
            # The batches count from their own start, which may be before this training.
            self._batches, self.waited_before = batches, self.waited_before - batches.waited

    def start(self) -> None:
        """Start or restart the clock."""
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @property
    def waited(self) -> float:
        """Seconds of waiting so far."""
        return self.waited_before + (0.0 if self._batches is None else self._batches.waited)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the clock is stopped."""
        self.before, self._since = self.seconds, None
        yield
        self.start()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a CUDA device, or resident for any other device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, except on macOS, where the unit is bytes.
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class TrainingCurve:
    """The measured steps so far, and the figures of the optimizer steps after the last of them: a checkpoint holds all
    of it, so that a resumed run goes on with the very sums of the interrupted one."""

    steps: list[MeasuredStep] = field(default_factory=list)  # The measured steps, the untrained drafter's first
    labels: int = 0  # Labels that training has read, repeated ones again
    sums: dict[str, list[float]] = field(default_factory=dict)  # Sum and number of each since the last measurement

    def add(self, figures: Mapping[str, float], labels: float) -> None:
        """Count an optimizer step with its figures and its number of labels."""
        self.labels += round(labels)
        for name in ("loss", "head1/top1", "expected_accepted_length"):
            if name in figures:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + figures[name], count + 1]

    def measured(self, step: int, accepted_length: float) -> None:
        """Close the interval that ends with this step by what held-out text has accepted."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.steps.append(MeasuredStep(
            step=step, accepted_length=accepted_length, labels=self.labels, loss=means.get("loss"),
            accuracy=means.get("head1/top1"), expected_accepted_length=means.get("expected_accepted_length")))
        self.sums = {}
