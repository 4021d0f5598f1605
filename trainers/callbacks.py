"""Callbacks of training: the accepted length on held-out text, checkpoints, a progress line; and signals that ask a
training to end, heeded after an optimizer step, whose checkpoint is saved first.
"""

import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch

from ..modules.features import Features
from ..modules.interfaces.drafter import Drafter
from ..modules.progress import ProgressLine
from ..modules.tuning.tree_search import Acceptance
from .base import DraftModule
from .steps.checkpoints import save_weights

FEWEST_TOKENS = 1000  # Fewest decoded tokens for a meaningful choice of the checkpoint; with fewer it is mostly noise
LAST, BEST = "last.ckpt", "best.safetensors"


Measure = Callable[[Drafter, Sequence[Features]], Acceptance]  # Counts what decoding held-out rows accepts: measured


class EveryStep(L.Callback):
    """Base of callbacks that act once after an optimizer step of however many micro-batches, with the clock paused."""

    after_step: Callable[[L.Trainer, int], None]  # Act after an optimizer step, by its number counted from 1

    def __init__(self, module: DraftModule) -> None:
        self.module = module
        self.seen = -1

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
    other bytes. Of equal lengths the earlier step wins. The first process measures; all receive the result. `held_out`
    returns the rows with target states; it is called at the first measurement."""

    def __init__(
        self, module: DraftModule, held_out: Callable[[], list[Features]], measure: Measure, *, out: Path
    ) -> None:
        super().__init__(module)
        self.held_out, self.measure, self.every, self.out = held_out, measure, module.config.validate_every, out
        self.rows: list[Features] | None = None
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
                found = self._measured(trainer)
                self.module.curve.measured(0, found["accepted_length"])
                if self.module.start is not None:
                    # A draft that training cannot better stays as it was.
                    self._keep(trainer, 0, found)

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Measure at every `validate_every`-th step and save the weights if they are the best."""
        if step % self.every and not self.module.finished:
            return
        found = self._measured(trainer)
        self.module.curve.measured(step, found["accepted_length"])
        if trainer.logger is not None:
            trainer.logger.log_metrics({"accepted_length": found["accepted_length"]}, step=step)
        # Greater, not equal: of equal lengths the earlier step wins, resumed or not.
        if not self.best or found["accepted_length"] > self.best["accepted_length"]:
            self._keep(trainer, step, found)

    def _keep(self, trainer: L.Trainer, step: int, found: dict[str, Any]) -> None:
        # All processes gather the weights, the first one writes them, and all know the hash that they will read by.
        weights = self.module.trained()
        saved = save_weights(self.out / BEST, weights) if trainer.is_global_zero else ""
        self.best = {**found, "step": step, "sha256": trainer.strategy.broadcast(saved)}

    def _measured(self, trainer: L.Trainer) -> dict[str, Any]:
        # Only now: with a target shared among processes, states are computed by all of them together.
        if self.rows is None:
            self.rows = self.held_out()
        with self.module.decoding() as drafter, torch.no_grad():
            found = self.measure(drafter, self.module.verifier(self.rows)[1])
        if found.tokens < FEWEST_TOKENS and not self.module.curve.steps and trainer.is_global_zero:
            warnings.warn(f"validation decodes only {found.tokens} tokens; distil more held-out text to reach "
                          f"{FEWEST_TOKENS}, or the choice of the checkpoint is mostly noise", stacklevel=2)
        return {"accepted_length": float(found.accepted_length), "tokens": int(found.tokens),
                "by_position": [float(share) for share in found.by_position]}


class LastCheckpoint(EveryStep):
    """The checkpoint from which an interrupted run resumes; it runs after the callbacks whose state it saves."""

    def __init__(self, module: DraftModule, *, out: Path) -> None:
        super().__init__(module)
        self.every, self.out = module.config.checkpoint_every, out

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Write after every `checkpoint_every`-th step, after the last step, and before an early end."""
        if step % self.every == 0 or self.module.finished or self.module.stopped:
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
