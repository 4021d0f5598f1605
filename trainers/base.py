"""The training that every family shares: one LightningModule, one `fit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning as L


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained, whatever its family."""

    max_steps: int = 300
    """Optimizer steps of the whole run."""
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 20
    """Optimizer steps over which the learning rate rises from zero; a cosine takes it back afterwards."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW; biases and other vectors are exempt."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off."""
    accumulate: int = 1
    """Micro-batches to an optimizer step. The step equals that of one batch which holds all of them."""
    labels: Literal["hard", "soft"] = "hard"
    """`hard` learns the token that follows; `soft` learns the target's whole distribution there."""
    decay: float = 0.8
    """Weight of draft step k in the loss is decay ** k (arXiv:2401.10774, section 2.2.1)."""
    validate_every: int = 50
    """Optimizer steps between two measurements of the accepted length on held-out text."""
    validation_nodes: int = 16
    """Largest number of nodes, root included, of the draft tree that validation decodes with."""
    checkpoint_every: int = 25
    """Optimizer steps between two checkpoints; an interrupted run loses at most these."""
    precision: Literal["auto", "32-true", "bf16-mixed", "64-true"] = "auto"
    """Precision of the drafter's arithmetic; `auto` is bf16-mixed on CUDA and 32-true elsewhere."""
    accelerator: str = "auto"
    """Lightning's name of the device kind: auto, cpu, gpu."""
    devices: int = 1
    """Devices (processes) on each machine."""
    strategy: str = "auto"
    """Lightning's name of the distribution strategy: auto, ddp."""
    seed: int = 0
    """Seed of everything random in the training step."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a finished run leaves behind."""

    checkpoint: Path
    """The drafter's own weights (safetensors) at the step with the greatest accepted length."""
    accepted_length: float
    """Tokens per target pass, bonus included, decoded on held-out text at that step."""
    by_position: tuple[float, ...]
    """Share of passes that accepted at least the 1st, 2nd, ... drafted token, at that step."""
    step: int
    """That optimizer step."""
    steps: int
    """Optimizer steps of the whole run."""


class DraftModule(L.LightningModule):
    """Trains a drafter beside a frozen target, which stays outside the module tree."""


def fit(module: DraftModule, datamodule: L.LightningDataModule, out: Path, *, progress: bool = True) -> FitResult:
    """Train `module` (by `module.config`), resuming from `out/last.ckpt` when it is there; leave the best weights in it."""
    raise NotImplementedError
