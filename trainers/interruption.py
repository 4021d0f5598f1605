"""Signals that ask a training to end, heeded after an optimizer step, whose checkpoint is saved first."""

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
import torch

from .base import DraftModule
from .callbacks import EveryStep

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, an end that is asked for, a closed terminal, and the signal by which Slurm announces the end of a job."""


class StopAtSignal(EveryStep):
    """Callback that lets the first signal wait for the end of the running step; a second one acts at once.

    It stands before the callback that saves the checkpoint. Ignored signals stay ignored. Lightning would end a
    training amid a step, without a checkpoint and without a word to its caller. The handlers that it gives the signals
    back to are those of the time when it was made, before Lightning's: these wait for processes that may have ended.
    """

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
