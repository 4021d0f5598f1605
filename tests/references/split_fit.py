"""Train drafters on the cycle for a few steps, one after another; started by hand or by torch.distributed.run.

Each is a case of tests/families, and trains in a folder of that name, by several strategies (joined by commas)
one after another in a folder for each. --end ends each amid that step, as a signal does; --overflow makes its gradient
infinite.
"""

import argparse
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import Features
from draftsmith.trainers import DraftModule, fit
from support.cases import CycleData, cycle_target
from support.families import CASES
from torch import Tensor

SETTINGS: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 2, "validate_every": 3, "validation_nodes": 4,
                            "checkpoint_every": 3, "weight_decay": 0.1, "accelerator": "cpu",
                            "precision": "32-true"}

UNCLIPPED = ("medusa-copy", "kangaroo-reduced", "draft-lm-depths")


class Ended(BaseException):
    """The end of a training by a signal."""


def end(*_: Any) -> None:
    raise Ended


def ending(module: DraftModule, step: int) -> None:
    """Let SIGTERM reach the first process once, amid an optimizer step."""
    plain = module.training_step

    def training_step(batch: Features, batch_idx: int) -> Tensor:
        if batch_idx == (step - 1) * module.config.accumulate and module.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(batch, batch_idx)

    module.training_step = training_step


def overflowing(module: DraftModule, step: int) -> None:
    """Let the gradient of an optimizer step be infinite in the first process, and its loss finite."""
    plain = module.training_step

    def training_step(batch: Features, batch_idx: int) -> Tensor:
        wrong = batch_idx == (step - 1) * module.config.accumulate and module.global_rank == 0
        return plain(batch, batch_idx) * (math.inf if wrong else 1.0)

    module.training_step = training_step


class Held(L.Callback):
    """The numbers that this process holds: of gradients before an optimizer step, at most; of trained weights
    and of the optimizer's states at the end of a training."""

    def __init__(self) -> None:
        self.gradients = self.numbers = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        kept = [weight.grad for weight in module.parameters() if weight.grad is not None]
        self.gradients = max(self.gradients, sum(local(gradient).numel() for gradient in kept))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        kept: list[Any] = [weight for weight in module.parameters() if weight.requires_grad]
        for optimizer in trainer.optimizers:
            for weight, state in optimizer.state.items():
                # ZeRO steps vectors of its own.
                kept += [value for value in (weight, *state.values()) if value.ndim and not is_kept(value, kept)]
        self.numbers = sum(local(tensor).numel() for tensor in kept)


def is_kept(tensor: Tensor, kept: list[Any]) -> bool:
    return any(tensor is one for one in kept)


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds, of ZeRO-3."""
    part: Tensor = getattr(tensor, "ds_tensor", tensor)
    return part


def train(name: str, out: Path, strategy: str, chosen: argparse.Namespace) -> None:
    """One training, to its end or to a step."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # Clipping hides a gradient of another size, and so does AdamW but for its moments.
    clip = 0.0 if name in UNCLIPPED else 0.05
    settings = {**SETTINGS, "clip": clip, "strategy": strategy, "accumulate": chosen.accumulate, "devices": world,
                "optimizer": chosen.optimizer, "precision": chosen.precision, "max_steps": chosen.steps}
    module = CASES[name].module(cycle_target(), **settings)
    held = Held()
    module.configure_callbacks = lambda: [held]
    if chosen.end is not None:
        ending(module, chosen.end)
    if chosen.overflow is not None:
        overflowing(module, chosen.overflow)
    try:
        result = fit(module, CycleData(held_out=3), out / name, progress=False)
    except (Ended, SystemExit):
        return
    print(f"{name}: rank {module.global_rank}: step {result.step}, accepted length {result.accepted_length:.6f}, "
          f"{result.steps} steps, {result.parameters} weights, {held.numbers} numbers held, "
          f"{held.gradients} of gradients")


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("out", type=Path)
    given.add_argument("strategies")
    given.add_argument("accumulate", type=int)
    given.add_argument("names", nargs="+")
    given.add_argument("--end", type=int)
    given.add_argument("--overflow", type=int)
    given.add_argument("--steps", type=int, default=6)
    given.add_argument("--optimizer", default="adamw")
    given.add_argument("--precision", default="32-true")
    chosen = given.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, end)
    strategies = chosen.strategies.split(",")
    for strategy in strategies:
        out = chosen.out / strategy if len(strategies) > 1 else chosen.out
        for name in chosen.names:
            train(name, out, strategy, chosen)


if __name__ == "__main__":
    main()
