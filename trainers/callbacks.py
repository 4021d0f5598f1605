"""What happens beside the optimizer: held-out decoding, checkpoints, one line of progress."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from tqdm import tqdm

from ..modules.errors import UserError
from ..modules.features import Features
from ..modules.interfaces.drafter import Drafter
from ..modules.target.model import Target
from .base import DraftModule
from .checkpoints import save_weights

FEWEST_TOKENS = 1000
"""A measured accepted length from fewer tokens than this chooses checkpoints by noise."""
LAST, BEST = "last.ckpt", "best.safetensors"


class Measured(Protocol):
    """What decoding held-out text told, as `draftsmith.modules.tuning.tree_search.decoded_acceptance` gives it."""

    accepted_length: float
    by_position: tuple[float, ...]
    tokens: int


Measure = Callable[[Drafter, Target, list[Features]], Measured]
"""Decode held-out rows with a drafter; the accepted length is a measurement, no estimate."""


class _EveryStep(L.Callback):
    """Something done after some optimizer steps, once each, however many micro-batches make a step.

    It is no training: the module's clock stands still meanwhile.
    """

    def __init__(self, module: DraftModule) -> None:
        self.module = module
        self.seen = -1

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Steps before the one resumed from are done."""
        self.seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act once a step is complete."""
        if trainer.global_step > self.seen:
            self.seen = trainer.global_step
            with self.module.clock.paused():
                self.after_step(trainer, self.seen)

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Act after optimizer step `step`, counted from 1."""
        raise NotImplementedError


class DecodedAcceptance(_EveryStep):
    """Decodes held-out text during training and keeps the drafter with the greatest accepted length.

    It does so after every `validate_every`-th step and after the last one. Equal lengths go to the earlier step. The
    first process decodes; all learn the result.

    Args:
        module: whose drafter is measured.
        held_out: gives the held-out rows, with target states; called at the first measurement.
        measure: decodes them.
        out: folder that gets the best weights.
    """

    def __init__(
        self, module: DraftModule, held_out: Callable[[], list[Features]], measure: Measure, *, out: Path
    ) -> None:
        super().__init__(module)
        self.held_out, self.measure, self.every, self.out = held_out, measure, module.config.validate_every, out
        self.rows: list[Features] | None = None
        self.best: dict[str, Any] = {}
        self.latest: float | None = None
        self.untrained: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far."""
        return {"best": self.best, "latest": self.latest, "untrained": self.untrained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's measurements."""
        self.best, self.latest, self.untrained = (state_dict[name] for name in ("best", "latest", "untrained"))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Measure the drafter as it begins: what training gains is told against it."""
        super().on_train_start(trainer, module)
        if self.untrained is None:
            with self.module.clock.paused():
                self.untrained = self._measure(trainer)["accepted_length"]

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Measure when it is time, and keep the weights when they are the best."""
        if step % self.every and not self.module.finished:
            return
        found = self._measure(trainer)
        self.latest = found["accepted_length"]
        if trainer.logger is not None:
            trainer.logger.log_metrics({"accepted_length": self.latest}, step=step)
        if not self.best or self.latest > self.best["accepted_length"]:
            self.best = {**found, "step": step}
            if trainer.is_global_zero:
                save_weights(self.out / BEST, self.module.trained())

    def _measure(self, trainer: L.Trainer) -> dict[str, Any]:
        """What the first process measured, in all of them."""
        found: dict[str, Any] = trainer.strategy.broadcast(self._measured() if trainer.is_global_zero else {})
        return found

    def _measured(self) -> dict[str, Any]:
        if self.rows is None:
            self.rows = self.held_out()
        drafter = self.module.drafter
        drafter.eval()
        with torch.no_grad():
            found = self.measure(drafter, *self.module.judges(self.rows))
        drafter.train()
        if found.tokens < FEWEST_TOKENS and self.untrained is None:
            warnings.warn(f"validation decodes only {found.tokens} tokens; distil more held-out text to reach "
                          f"{FEWEST_TOKENS}, or the choice of the checkpoint is mostly noise", stacklevel=2)
        return {"accepted_length": float(found.accepted_length), "tokens": int(found.tokens),
                "by_position": [float(share) for share in found.by_position]}


class LastCheckpoint(_EveryStep):
    """Writes the checkpoint that an interrupted run resumes from. It comes after the callbacks whose state it saves."""

    def __init__(self, module: DraftModule, *, out: Path) -> None:
        super().__init__(module)
        self.every, self.out = module.config.checkpoint_every, out

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Write when it is time, and after the last step."""
        if step % self.every == 0 or self.module.finished:
            trainer.save_checkpoint(self.out / LAST)


class ProgressLine(_EveryStep):
    """One line: steps done, rate, time left, the loss, the newest accepted length.

    A run that ends by time counts its steps towards no end, and tells its minutes.
    """

    def __init__(self, module: DraftModule, acceptance: DecodedAcceptance) -> None:
        super().__init__(module)
        self.acceptance = acceptance
        self.line: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Open the line where the run resumes."""
        super().on_train_start(trainer, module)
        if trainer.is_global_zero:
            total = trainer.max_steps if self.module.config.max_minutes is None else None
            self.line = tqdm(total=total, initial=self.seen, desc="train", unit="step", dynamic_ncols=True)

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Advance the line."""
        if self.line is None:
            return
        figures = {"loss": self.module.figures.get("loss"), "accepted": self.acceptance.latest}
        if self.module.config.max_minutes is not None:
            figures["minutes"] = self.module.seconds / 60
        self.line.set_postfix({name: f"{value:.2f}" for name, value in figures.items() if value is not None},
                              refresh=False)
        self.line.update()

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Close the line, also after an error."""
        if self.line is not None:
            self.line.close()
            self.line = None


def nothing_held_out() -> UserError:
    """The error of a run that could not choose its checkpoint."""
    return UserError("there is no held-out text to measure the accepted length on; distil with validation_prompts of at"
                     " least 1")
