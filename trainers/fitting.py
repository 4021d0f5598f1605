"""A training run, from its folder's last checkpoint to its best weights, and its callbacks: the accepted length on
held-out text, checkpoints, a progress line; and signals that ask it to end, heeded after an optimizer step, whose
checkpoint is saved first."""

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ..modules import Features, MeasuredStep, UserError
from ..modules.files.atomic_files import make_folder
from ..modules.processes import Processes, destroy_group_at_exit
from ..modules.progress import ProgressLine
from ..modules.tuning.tree_search import held_out_acceptance
from .base import DraftModule
from .checkpoints import AtomicCheckpointIO, load_weights, save_weights
from .loggers import logged, require_logger
from .train_config import TrainConfig
from .zero_drafter import strategy_for

LAST, BEST = "last.ckpt", "best.safetensors"
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


def fit(module: DraftModule, datamodule: L.LightningDataModule, out: Path, *, progress: bool = True,
        facts: Mapping[str, Any] | None = None) -> FitResult:
    """Train a drafter, resuming from `out/last.ckpt` if it exists, and load the best weights into `module.drafter`.

    A signal (SIGINT, SIGTERM, SIGHUP, SIGUSR1) takes effect after the running step, whose checkpoint is saved; a second
    one at once.

    Args:
        module: a family's module; `module.config` holds the training settings.
        datamodule: its endless training loader starts at micro-batch `trainer.global_step * accumulate_grad_batches`,
            and micro-batch n depends on (seed, n, rank, world size) alone; `validation_features()` returns held-out
            rows, and `waited`, where there is one, is the number of seconds that training has waited for batches.
        out: folder for `last.ckpt`, `best.safetensors` and the logger's files.
        progress: show a line with rate and time left.
        facts: settings and hashes for the logger.

    Raises:
        UserError: if nothing is supervised, nothing is held out, the loss is not finite, the folder holds a run with
            other settings or a damaged checkpoint, or it cannot be written; or if the logger fails."""
    out = Path(out)
    make_folder(out)
    destroy_group_at_exit()
    config, acceptance = module.config, DecodedAcceptance(module, out)
    last, signals = out / LAST, StopAtSignal(module)
    # The order matters: a checkpoint contains the measurement before it, and is written before an early end.
    callbacks = [acceptance, signals, LastCheckpoint(module, out)]
    # Weights alone: a checkpoint is data, and reading it runs no code.
    with quiet(), logged(config.logger, out, facts or {}, lambda: AtomicCheckpointIO().load_checkpoint(last)[
            "global_step"] if last.exists() else -1) as logger, module.target.reproducible():
        trainer = _trainer(config, max_steps=config.max_steps or -1, max_epochs=-1, logger=logger or False,
                           accumulate_grad_batches=config.accumulate, gradient_clip_val=config.clip or None,
                           plugins=[AtomicCheckpointIO()], limit_val_batches=0, num_sanity_val_steps=0,
                           callbacks=[*callbacks, Progress(module)] if progress else [*callbacks],
                           use_distributed_sampler=False, default_root_dir=out)
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
    """Refuse an accelerator, a number of devices, a strategy or a logger that is not here, before any work. Raises
    UserError."""
    _trainer(config, logger=False)
    require_logger(config.logger)


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


def _trainer(config: TrainConfig, **given: Any) -> L.Trainer:
    """Lightning's trainer on the devices of the settings. Raises UserError if they cannot train here."""
    try:
        with quiet():
            return L.Trainer(accelerator=config.accelerator, devices=config.devices, num_nodes=config.num_nodes,
                             strategy=strategy_for(config), precision=precision_of(config), enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False, **given)
    except (MisconfigurationException, ValueError, RuntimeError, ImportError) as error:
        # Lightning's messages have several lines and list every accelerator there is.
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"train.accelerator {config.accelerator!r}, train.devices {config.devices} and train.strategy "
                        f"{config.strategy!r} cannot train here ({reason}); set train.accelerator: auto, train.devices:"
                        " 1 and train.strategy: auto") from error


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
def quiet() -> Iterator[None]:
    """Context without Lightning's banners, tips and warnings about deliberate choices."""
    levels = {(one := logging.getLogger(f"lightning.{part}")): one.level for part in ("pytorch", "fabric")}
    for one in levels:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        for one, level in levels.items():
            one.setLevel(level)


# Callbacks ------------------------------------------------------------------------------------------------------------


FEWEST_TOKENS = 1000  # Fewest decoded tokens for a meaningful choice of the checkpoint; with fewer it is mostly noise


class EveryStep(L.Callback):
    """Base of callbacks that act once after an optimizer step of however many micro-batches, with the clock paused;
    `out` is the folder of those that write."""

    after_step: Callable[[L.Trainer, int], None]  # Act after an optimizer step, by its number counted from 1

    def __init__(self, module: DraftModule, out: Path = Path()) -> None:
        self.module, self.out, self.seen = module, out, -1

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Skip the steps before the one that the run resumes from."""
        self.seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act when an optimizer step is complete."""
        # Lightning calls this after each micro-batch: a step is complete when their number grows.
        if trainer.global_step > self.seen:
            self.seen = trainer.global_step
            with self.module.clock.paused():
                self.after_step(trainer, self.seen)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Give back what the training has held, before the error is shown; `teardown` may come twice."""
        # Lightning itself calls no `teardown` after an error.
        self.teardown(trainer, module, "fit")


class DecodedAcceptance(EveryStep):
    """Validation by what decoding held-out text accepts; saves the drafter with the greatest accepted length in `out`.

    It runs after every `validate_every`-th step and after the last one: an interval in seconds would give a resumed run
    other bytes. Of equal lengths the earlier step wins. The first process measures; all receive the result."""

    def __init__(self, module: DraftModule, out: Path) -> None:
        super().__init__(module, out)
        self.rows: list[Features] | None = None  # With target states, from the first measurement on
        self.best: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The best measurement so far; the module's curve has all of them."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's best measurement."""
        self.best = state_dict["best"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Measure the drafter before training, with which the trained one is compared."""
        super().on_train_start(trainer, module)
        # A resumed run has measured it before.
        if not self.module.curve.steps:
            with self.module.clock.paused():
                found = self._measured(trainer, 0)
                if self.module.start is not None:
                    # A draft that training cannot better stays as it was.
                    self._keep(trainer, 0, found)

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Measure at every `validate_every`-th step and save the weights if they are the best."""
        if step % self.module.config.validate_every and not self.module.finished:
            return
        found = self._measured(trainer, step)
        # Greater, not equal: of equal lengths the earlier step wins, resumed or not.
        if not self.best or found["accepted_length"] > self.best["accepted_length"]:
            self._keep(trainer, step, found)

    def _keep(self, trainer: L.Trainer, step: int, found: dict[str, Any]) -> None:
        # All processes gather the weights, the first one writes them, and all know the hash that they will read by.
        weights = self.module.trained()
        saved = save_weights(self.out / BEST, weights) if trainer.is_global_zero else ""
        self.best = {**found, "step": step, "sha256": trainer.strategy.broadcast(saved)}

    def _measured(self, trainer: L.Trainer, step: int) -> dict[str, Any]:
        # Only now: with a target shared among processes, states are computed by all of them together.
        if self.rows is None:
            self.rows = self._held_out(trainer.datamodule)  # type: ignore[attr-defined]
        with self.module.decoding() as drafter, torch.no_grad():
            found = held_out_acceptance(drafter, self.module.verifier(self.rows)[1],
                                        self.module.config.validation_nodes, Processes.grouped())
        if found.tokens < FEWEST_TOKENS and not self.module.curve.steps and trainer.is_global_zero:
            warnings.warn(f"validation decodes only {found.tokens} tokens; distil more held-out text to reach "
                          f"{FEWEST_TOKENS}, or the choice of the checkpoint is mostly noise", stacklevel=2)
        length, shares = float(found.accepted_length), [float(share) for share in found.by_position]
        self.module.curve.measured(step, length)
        if trainer.logger is not None:
            trainer.logger.log_metrics({"accepted_length": length, **{
                f"accepted/position{place}": share for place, share in enumerate(shares, 1)}}, step=step)
        return {"accepted_length": length, "tokens": int(found.tokens), "by_position": shares}

    def _held_out(self, datamodule: Any) -> list[Features]:
        """This process's share of the held-out rows, with target states, in pairs for `held_out_acceptance`."""
        rows = datamodule.validation_features()[: self.module.validation_rows]
        if not rows:
            raise UserError("there is no held-out text to measure the accepted length on; distil with "
                            "validation_prompts of at least 1")
        processes = Processes.grouped()
        # In pairs of neighbours: the tree is searched on one of them and measured on the other.
        own = processes.share(rows, together=2)
        # Processes that share a target read equally often: those with fewer rows read the first one in vain.
        missing = processes.largest_share(len(rows), together=2) - len(own)
        read = [self.module.encoded(row.to(self.module.target.device)) for row in [*own, *[rows[0]] * missing]]
        return read[: len(own)]


class LastCheckpoint(EveryStep):
    """The checkpoint from which an interrupted run resumes; it runs after the callbacks whose state it saves."""

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Write after every `checkpoint_every`-th step, after the last step, and before an early end."""
        due = step % self.module.config.checkpoint_every == 0
        if due or self.module.finished or self.module.stopped:
            trainer.save_checkpoint(self.out / LAST)


class Progress(EveryStep):
    """A line with the steps done, the rate, the time left, the loss, the newest accepted length, the wait for data."""

    line: ProgressLine | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Open the line at the step from which the run resumes."""
        super().on_train_start(trainer, module)
        if trainer.is_global_zero:
            self.line = ProgressLine("train", self.module.config.max_steps, "step", done=self.seen,
                                     seconds_left=lambda: self.module.seconds_left)

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Advance the line."""
        if self.line is None:
            return
        figures = {"loss": self.module.figures.get("loss"), "accepted": self.module.curve.steps[-1].accepted_length,
                   "data wait %": 100 * self.module.data_wait or None}
        self.line.figures = ", ".join(f"{name} {value:.2f}" for name, value in figures.items() if value is not None)
        self.line.advance()

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Close the line, so that an error starts on one of its own."""
        if self.line is not None:
            self.line.close()
            self.line = None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, an end that is asked for, a closed terminal, and the signal by which Slurm announces the end of a job."""


class StopAtSignal(EveryStep):
    """Callback that lets the first signal wait for the end of the running step; a second one acts at once.

    It stands before the callback that saves the checkpoint. Ignored signals stay ignored. Lightning would end a
    training amid a step, without a checkpoint and without a word to its caller. The handlers that it gives the signals
    back to are those of the time when it was made, before Lightning's: these wait for processes that may have ended."""

    def __init__(self, module: DraftModule) -> None:
        super().__init__(module)
        self.asked = 0
        self._former: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Take over the signals, those that Lightning handles too."""
        super().on_train_start(trainer, module)
        # Python sets handlers in the main thread alone.
        if threading.current_thread() is not threading.main_thread():
            return
        for number, former in self._former.items():
            if former not in (signal.SIG_IGN, None):
                signal.signal(number, self._note)

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Mark the module as stopped when any process was asked to: all of them end at the same step."""
        # A launcher may send the signal to one process only; one that stops alone leaves the others waiting.
        if trainer.world_size > 1:
            asked = torch.tensor(self.asked, device=trainer.strategy.root_device)
            self.asked = int(trainer.strategy.reduce(asked, reduce_op="max"))
        self.module.stopped = self.asked > 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # The second signal is that of someone who does not want to wait; a third one of another kind is a second too.
        if self.asked:
            signal.signal(number, self._former[signal.Signals(number)])
            signal.raise_signal(signal.Signals(number))
        self.asked = number

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Give the signals back, also after an error."""
        if threading.current_thread() is threading.main_thread():
            for number, former in self._former.items():
                if former is not None:
                    signal.signal(number, former)
