"""A training run, from its folder's last checkpoint to its best weights."""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger

from ..modules.errors import UserError
from ..modules.features import Features
from ..modules.files.atomic_files import make_folder
from ..modules.processes import Processes, destroy_group_at_exit
from ..modules.tuning.tree_search import MeasuredStep, held_out_acceptance
from .base import DraftModule
from .callbacks import BEST, LAST, DecodedAcceptance, LastCheckpoint, Progress, StopAtSignal
from .steps.checkpoints import AtomicCheckpointIO, load_weights
from .train_config import TrainConfig
from .zero_drafter import strategy_for

BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # x86 instructions by which bfloat16 matrices beat float32 ones


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of a finished run."""

    checkpoint: Path  # The drafter's own weights (safetensors) at the step with the greatest accepted length
    accepted_length: float  # Tokens per target pass, bonus included, decoded on held-out text at that step
    by_position: tuple[float, ...]  # Share of passes that accepted at least the 1st, 2nd, ... drafted token, then
    curve: tuple[MeasuredStep, ...]  # Every measurement from the untrained drafter's on, with the text trained on since
    parameters: int  # Number of trained weights
    step: int  # The optimizer step with the greatest accepted length
    steps: int  # Optimizer steps of the whole run
    precision: str  # Precision of the training: `TrainConfig.precision`, or the choice of `auto`
    seconds: float  # Seconds of training, interrupted parts included, validation and checkpoints excluded
    data_wait: float  # Share of these seconds in which the first process waited for batches
    peak_memory_bytes: int
    """Peak memory of the first process, target included: allocated on its CUDA device during the run, elsewhere
    resident since the start of the process."""


def fit(module: DraftModule, datamodule: L.LightningDataModule, out: Path, *, progress: bool = True) -> FitResult:
    """Train a drafter, resuming from `out/last.ckpt` if it exists, and load the best weights into `module.drafter`.

    A signal (SIGINT, SIGTERM, SIGHUP, SIGUSR1) takes effect after the running step, whose checkpoint is saved; a second
    one at once.

    Args:
        module: a family's module; `module.config` holds the training settings.
        datamodule: its endless training loader starts at micro-batch `trainer.global_step * accumulate_grad_batches`,
            and micro-batch n depends on (seed, n, rank, world size) alone; `validation_features()` returns held-out
            rows, and `waited`, where there is one, is the number of seconds that training has waited for batches.
        out: folder for `last.ckpt`, `best.safetensors` and the TensorBoard logs.
        progress: show a line with rate and time left.

    Raises:
        UserError: if nothing is supervised, nothing is held out, the loss is not finite, the folder holds a run with
            other settings or a damaged checkpoint, or it cannot be written.
    """
    out = Path(out)
    make_folder(out)
    destroy_group_at_exit()
    config = module.config
    acceptance = DecodedAcceptance(
        module, partial(_held_out, module, datamodule),
        lambda drafter, rows: held_out_acceptance(drafter, rows, config.validation_nodes, Processes.grouped()), out=out)
    last, signals = out / LAST, StopAtSignal(module)
    # The order matters: a checkpoint contains the measurement before it, and is written before an early end.
    callbacks = [acceptance, signals, LastCheckpoint(module, out=out)]
    with explained_devices(config):
        trainer = L.Trainer(
            max_steps=config.max_steps or -1, max_epochs=-1, accumulate_grad_batches=config.accumulate,
            gradient_clip_val=config.clip or None, precision=precision_of(config), accelerator=config.accelerator,
            devices=config.devices, num_nodes=config.num_nodes, strategy=strategy_for(config),
            logger=TensorBoardLogger(save_dir=out, name="tensorboard", version=""), plugins=[AtomicCheckpointIO()],
            callbacks=[*callbacks, Progress(module)] if progress else [*callbacks],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=out)
    # Weights alone: a checkpoint is data, and reading it runs no code.
    with _quiet(), module.target.reproducible():
        trainer.fit(module, datamodule=datamodule, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    # Only after Lightning has given back its own handlers.
    if signals.asked:
        # As the signal would have ended the process without a training; the first process speaks for all.
        if module.global_rank != 0:
            raise SystemExit(0)
        signal.raise_signal(signal.Signals(signals.asked))
        # Its handler has returned.
        raise KeyboardInterrupt
    best = acceptance.best
    # Lightning leaves the module on the CPU; the borrowed weights are on the target's device.
    module.restore(load_weights(out / BEST, best.get("sha256", "")))
    module.drafter.to(module.target.device).eval()
    trained = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    return FitResult(checkpoint=out / BEST, accepted_length=best["accepted_length"],
                     by_position=tuple(best["by_position"]), curve=tuple(module.curve.steps),
                     parameters=sum(trained), step=best["step"], steps=trainer.global_step, seconds=module.seconds,
                     precision=precision_of(module.config), data_wait=module.data_wait,
                     peak_memory_bytes=module.peak_memory_bytes)


def require_devices(config: TrainConfig) -> None:
    """Refuse an accelerator, a number of devices or a strategy that is not here, before any work. Raises UserError."""
    with explained_devices(config):
        L.Trainer(accelerator=config.accelerator, devices=config.devices, num_nodes=config.num_nodes,
                  strategy=strategy_for(config), logger=False, precision=precision_of(config),
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


def require_processes(config: TrainConfig) -> None:
    """Refuse other processes than those that were started. Raises UserError."""
    launched, wanted = Processes.launched().world, config.world
    if launched > 1 and wanted != launched:
        raise UserError(f"torchrun has started {launched} processes, but train.devices {config.devices} times "
                        f"train.num_nodes {config.num_nodes} is {wanted}; set train.devices to --nproc-per-node and "
                        "train.num_nodes to --nnodes")
    if config.num_nodes > 1 and launched == 1:
        raise UserError(f"train.num_nodes is {config.num_nodes}, but this process was started alone; start draftsmith "
                        "train on each machine with torchrun --nnodes, or set train.num_nodes: 1")


@contextmanager
def explained_devices(config: TrainConfig) -> Iterator[None]:
    """Turn Lightning's refusal of devices into one sentence."""
    try:
        with _quiet():
            yield
    except (MisconfigurationException, ValueError, RuntimeError, ImportError) as error:
        # Lightning's messages have several lines and list every accelerator there is.
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"train.accelerator {config.accelerator!r}, train.devices {config.devices} and train.strategy "
                        f"{config.strategy!r} cannot train here ({reason}); set train.accelerator: auto, train.devices:"
                        " 1 and train.strategy: auto") from error


def _held_out(module: DraftModule, datamodule: Any) -> list[Features]:
    """This process's share of the held-out rows, with target states, in pairs for `held_out_acceptance`."""
    rows = datamodule.validation_features()[: module.validation_rows]
    if not rows:
        raise UserError("there is no held-out text to measure the accepted length on; distil with validation_prompts "
                        "of at least 1")
    processes = Processes.grouped()
    # In pairs of neighbours: the tree is searched on one of them and measured on the other.
    own = processes.share(rows, together=2)
    # Processes that share a target read equally often: those with fewer rows read the first one in vain.
    missing = processes.largest_share(len(rows), together=2) - len(own)
    read = [module.encoded(row.to(module.target.device)) for row in [*own, *[rows[0]] * missing]]
    return read[: len(own)]


def precision_of(config: TrainConfig) -> Literal["32-true", "bf16-mixed"]:
    """Precision of the drafter's arithmetic here: the config's, or the one that `auto` stands for."""
    if config.precision != "auto":
        return config.precision
    if config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed"
    # On machines without bfloat16 instructions mixed precision would be slower.
    multiplies = any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)
    return "bf16-mixed" if multiplies and config.accelerator in ("auto", "cpu") else "32-true"


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without Lightning's banners, tips and warnings about deliberate choices."""
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
