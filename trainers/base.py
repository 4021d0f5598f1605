"""The training that every family shares: one LightningModule, one `fit`.

The loss of an optimizer step is one weighted mean over everything that the step saw: all its micro-batches, all ranks.
Its count is known only after the last of them, so each micro-batch back-propagates its *sum*, and the gradient is
divided by the reduced count just before it is clipped. Padding, packing, accumulation and world size change nothing.

Shapes: B rows, L positions, D hidden size, K draft steps, C columns of sums, V vocabulary.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from ..modules.calibration import decoded_acceptance
from ..modules.drafter import Drafter
from ..modules.errors import UserError
from ..modules.features import Features
from ..modules.target import Target
from ..modules.vocabulary import OutputRows, draft_index
from .callbacks import BEST, LAST, DecodedAcceptance, LastCheckpoint, ProgressLine, nothing_held_out
from .checkpoints import AtomicCheckpointIO, load_weights, make_folder
from .losses import VocabularyLoss
from .metrics import describe, weighted_mean_loss
from .schedules import warmup_cosine

PATIENCE = 8
"""Optimizer steps without one supervised token after which a run stops: long prompts may fill a step, not eight."""


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

    def __post_init__(self) -> None:
        for name in ("max_steps", "accumulate", "validate_every", "checkpoint_every", "devices"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.validation_nodes < 2:
            raise UserError(f"validation_nodes must be at least 2 (a root and one draft), got {self.validation_nodes}")
        for name in ("warmup_steps", "weight_decay", "clip", "seed"):
            if (value := getattr(self, name)) < 0:
                raise UserError(f"{name} must not be negative, got {value}")
        if not 0 < self.decay <= 1:
            raise UserError(f"decay must be above 0 and at most 1, got {self.decay}")
        if not self.lr > 0:
            raise UserError(f"lr must be above 0, got {self.lr}")
        if self.labels not in ("hard", "soft"):
            raise UserError(f"labels must be 'hard' or 'soft', got {self.labels!r}")


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
    """Trains a drafter beside a frozen target, which stays outside the module tree.

    A family says how its drafter is built, and which trained weights its output layer has.

    Args:
        target: the frozen model.
        config: how to train; a family's own config says also what.
        token_counts: how often each token is a label, [V]; for families that reduce the draft vocabulary.
    """

    drafter: Drafter

    def __init__(self, target: Target, config: TrainConfig, *, token_counts: Tensor | None = None) -> None:
        super().__init__()
        self.target, self.config, self.token_counts = target, config, token_counts
        self.figures: dict[str, float] = {}
        self._sums_KC: Tensor | None = None
        self._learned = 0.0

    def build_drafter(self) -> Drafter:
        """A new drafter, bound to the target."""
        raise NotImplementedError

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `drafter.project` reads for one draft step; none where it borrows them."""
        return ()

    def setup(self, stage: str) -> None:
        """Move the target, which Lightning does not know, and what the drafter borrows with it."""
        self.target.to(self.trainer.strategy.root_device)
        if "drafter" in self._modules:
            self.drafter.bind(self.target)

    def configure_model(self) -> None:
        """Build the drafter once; loading a checkpoint and fitting both come here."""
        if "drafter" not in self._modules:
            self.drafter = self.build_drafter()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with warm-up and cosine; vectors are not decayed."""
        trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        vectors = [parameter for parameter in trained if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.config.weight_decay},
                  {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.config.lr)
        factor = warmup_cosine(self.config.warmup_steps, self.config.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Features, device: torch.device, dataloader_idx: int) -> Features:
        """A batch moves itself."""
        return batch.to(device)

    # The loss --------------------------------------------------------------------------------------------------------

    def weights(self, steps: int) -> tuple[float, ...]:
        """Weight of each draft step in the loss."""
        return tuple(self.config.decay**step for step in range(steps))

    def encoded(self, features: Features) -> Features:
        """The batch with the target's states: stored ones, or computed now in the target's own precision."""
        if features.final_BLD is not None:
            return features
        with torch.autocast(self.target.device.type, enabled=False):
            return self.target.encode(features, self.drafter.taps)

    def loss(self, features: Features) -> tuple[Tensor, Tensor]:
        """(total, sums_KC) of a batch, see `VocabularyLoss`: to be divided by its count once that is complete."""
        features = self.encoded(features)
        drafts = self.drafter(features)
        ids_Q = self.drafter.token_ids_Q
        steps = len(drafts.offsets)
        loss = VocabularyLoss(
            project=self.drafter.project,
            entries=self.target.vocab_size if ids_Q is None else len(ids_Q),
            weights=self.weights(steps),
            parameters=tuple(dict.fromkeys(weight for step in range(steps) for weight in self.output_parameters(step))),
            teacher=OutputRows(self.target, ids_Q) if self.config.labels == "soft" else None,
        )
        return loss(drafts, features, None if ids_Q is None else draft_index(ids_Q, self.target.vocab_size))

    def on_train_batch_start(self, batch: Features, batch_idx: int) -> None:
        """Let all chance in a step depend on the seed and the micro-batch alone: a resumed run repeats it."""
        torch.manual_seed((self.config.seed * 1_000_003 + batch_idx) * self.trainer.world_size + self.global_rank)

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        """Back-propagate the sum of the losses of one micro-batch.

        Lightning divides by the number of micro-batches, DDP by the number of ranks: both are taken back here.
        """
        total, sums_KC = self.loss(batch)
        self._sums_KC = sums_KC if self._sums_KC is None else self._sums_KC + sums_KC
        return total * (self.config.accumulate * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the summed gradient into that of the mean, before it is clipped; refuse to step on nonsense."""
        if self._sums_KC is None:
            raise RuntimeError("an optimizer step came before any micro-batch")
        sums_KC = self.trainer.strategy.reduce(self._sums_KC, reduce_op="sum")
        self._sums_KC = None
        weights = self.weights(len(sums_KC))
        total, count = (float(value) for value in weighted_mean_loss(sums_KC, weights))
        self._check(total, count, float(sums_KC[:, 1].sum()))
        for parameter in self.drafter.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(count, 1.0))
        self.figures = describe(sums_KC, weights) | {"learning_rate": optimizer.param_groups[0]["lr"]}
        if self.logger is not None:
            self.logger.log_metrics(self.figures, step=self.global_step + 1)

    def _check(self, total: float, count: float, missed: float) -> None:
        step = self.global_step + 1
        if not math.isfinite(total):
            raise UserError(f"the loss became {total} at optimizer step {step}; lower lr (now {self.config.lr}) or "
                            f"clip (now {self.config.clip}), and train again into an empty --out folder")
        self._learned += count
        if not self._learned and step >= min(PATIENCE, self.config.max_steps):
            reason = "no token is supervised; check the chat template and the data"
            if missed:
                reason = f"all {missed:.0f} labels lie outside the reduced vocabulary; raise vocabulary_size"
            raise UserError(f"nothing to learn in the first {step} optimizer steps: {reason}")

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def recipe(self) -> dict[str, Any]:
        """What must be the same when a run goes on from a checkpoint."""
        return {"config": asdict(self.config), "family": self.drafter.family, "drafter": self.drafter.describe(),
                "target": self.target.identity.to_dict()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what tells runs apart."""
        checkpoint["draftsmith"] = {"recipe": self.recipe(), "learned": self._learned}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another run."""
        stored, own = checkpoint["draftsmith"]["recipe"], self.recipe()
        changed = [name for name in _flat(own) if _flat(own)[name] != _flat(stored).get(name)]
        if changed:
            told = ", ".join(f"{name} is {_flat(own)[name]!r}, was {_flat(stored).get(name)!r}" for name in changed)
            raise UserError(f"the run in this folder was started with other settings ({told}); choose another --out "
                            "folder, or go back to those settings")
        self._learned = checkpoint["draftsmith"]["learned"]


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def fit(module: DraftModule, datamodule: L.LightningDataModule, out: Path, *, progress: bool = True) -> FitResult:
    """Train a drafter, resuming from `out/last.ckpt` when it is there, and leave the best weights in `module.drafter`.

    Args:
        module: a family's module; `module.config` says how to train.
        datamodule: its endless training loader starts at micro-batch `trainer.global_step * accumulate_grad_batches`
            and makes micro-batch n from (seed, n, rank, world size) alone; `validation_features()` gives held-out rows.
        out: gets `last.ckpt`, `best.safetensors` and the TensorBoard logs.
        progress: show one line with rate and time left.

    Raises:
        UserError: if nothing is supervised, nothing is held out, the loss is not finite, the folder holds a run with
            other settings or a damaged checkpoint, or it cannot be written.
    """
    out = Path(out)
    make_folder(out)
    measure = partial(_measure, nodes=module.config.validation_nodes)
    acceptance = DecodedAcceptance(partial(_held_out, module, datamodule), measure, every=module.config.validate_every,
                                   out=out)
    last = out / LAST
    with _quiet():
        trainer = _trainer(module.config, out, acceptance, progress)
        trainer.fit(module, datamodule=datamodule, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    # Lightning leaves the module on the CPU; what the drafter borrows is where the target is.
    module.drafter.load_state_dict(load_weights(out / BEST))
    module.drafter.to(module.target.device).eval()
    best = acceptance.best
    return FitResult(checkpoint=out / BEST, accepted_length=best["accepted_length"],
                     by_position=tuple(best["by_position"]), step=best["step"], steps=trainer.global_step)


def _measure(drafter: Drafter, target: Target, rows: list[Features], nodes: int) -> Any:
    return decoded_acceptance(drafter, target, rows, nodes)


def _held_out(module: DraftModule, datamodule: Any) -> list[Features]:
    rows = [module.encoded(row.to(module.target.device)) for row in datamodule.validation_features()]
    if not rows:
        raise nothing_held_out()
    return rows


def _trainer(config: TrainConfig, out: Path, acceptance: DecodedAcceptance, progress: bool) -> L.Trainer:
    line = [ProgressLine(acceptance)] if progress else []
    return L.Trainer(
        max_steps=config.max_steps, max_epochs=-1, accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.clip or None, precision=_precision(config), accelerator=config.accelerator,
        devices=config.devices, strategy=config.strategy, logger=_logger(out), plugins=[AtomicCheckpointIO()],
        # The order matters: a checkpoint holds what the measurement before it found.
        callbacks=[acceptance, LastCheckpoint(every=config.checkpoint_every, out=out), *line],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=out,
    )


def _logger(out: Path) -> TensorBoardLogger:
    return TensorBoardLogger(save_dir=out, name="tensorboard", version="")


def _precision(config: TrainConfig) -> Any:
    if config.precision != "auto":
        return config.precision
    on_cuda = config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_cuda else "32-true"


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's banners, tips and advice about choices that are made on purpose stay unsaid."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric",
                                                    "lightning.pytorch.utilities.rank_zero",
                                                    "lightning.fabric.utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
