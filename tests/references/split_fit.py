"""Train drafters on the cycle for six steps, one after another; started by hand or by torch.distributed.run.

Each is a case of tests/support/families, and trains in the folder of that name. --end ends each amid that step, as a
signal does.
"""

import argparse
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
from support.cycle import CycleData, cycle_target
from support.families import CASES
from torch import Tensor

SETTINGS: dict[str, Any] = {"max_steps": 6, "lr": 1e-2, "warmup_steps": 2, "validate_every": 3, "validation_nodes": 4,
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


class Held(L.Callback):
    """The numbers that this process holds of the weights and of the optimizer's states at the end of a training."""

    def __init__(self) -> None:
        self.numbers = 0

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        kept = [*module.parameters(), *(value for optimizer in trainer.optimizers for state in optimizer.state.values()
                                        for value in state.values() if value.ndim)]
        self.numbers = sum(local(tensor).numel() for tensor in kept)


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def train(name: str, out: Path, strategy: str, accumulate: int, last: int | None, **more: Any) -> None:
    """One training, to its end or to a step."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # Clipping hides a gradient of another size, and so does AdamW but for its moments.
    clip = 0.0 if name in UNCLIPPED else 0.05
    settings = {**SETTINGS, "clip": clip, "strategy": strategy, "accumulate": accumulate, "devices": world, **more}
    module = CASES[name].module(cycle_target(), **settings)
    held = Held()
    module.configure_callbacks = lambda: [held]
    if last is not None:
        ending(module, last)
    try:
        result = fit(module, CycleData(held_out=3), out / name, progress=False)
    except (Ended, SystemExit):
        return
    print(f"{name}: rank {module.global_rank}: step {result.step}, accepted length {result.accepted_length:.6f}, "
          f"{result.steps} steps, {result.parameters} weights, {held.numbers} numbers held")


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("out", type=Path)
    given.add_argument("strategy")
    given.add_argument("accumulate", type=int)
    given.add_argument("names", nargs="+")
    given.add_argument("--end", type=int)
    given.add_argument("--optimizer", default="adamw")
    chosen = given.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, end)
    for name in chosen.names:
        train(name, chosen.out, chosen.strategy, chosen.accumulate, chosen.end, optimizer=chosen.optimizer)


if __name__ == "__main__":
    main()
