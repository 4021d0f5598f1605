"""Train on the cycle for a few steps; started by hand or by torch.distributed.run.

Arguments: folder, accumulate, and minutes for a run that ends by time: then the second process's clock is far ahead.
With a fourth argument SIGTERM reaches the second process alone, amid its third micro-batch.
"""

import atexit
import os
import signal
import sys
from pathlib import Path

import torch
from draftsmith.modules import Medusa
from draftsmith.trainers import DraftModule, draft_module, train_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import Features
from draftsmith.modules.families.medusa.drafter import MedusaConfig
from draftsmith.trainers import fit
from support.cases import CycleData, cycle_target
from torch import Tensor


class Signalled(DraftModule):
    """A module whose second process is asked to end."""

    drafter_class = Medusa

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def tell_joined() -> None:
    print(f"joined at the end: {torch.distributed.is_initialized()}.")


def main() -> None:
    # What is registered first comes last.
    atexit.register(tell_joined)
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    minutes = float(sys.argv[3]) if len(sys.argv) > 3 else None
    config = train_config(Medusa)(max_steps=6 if minutes is None else 100_000, max_minutes=minutes, lr=1e-2,
                                  warmup_steps=2, validate_every=3, validation_nodes=4, checkpoint_every=3, clip=0.05,
                                  accumulate=int(sys.argv[2]), devices=world, strategy="ddp" if world > 1 else "auto",
                                  accelerator="cpu", precision="32-true", objective="lk_hybrid",
                                  drafter=MedusaConfig(num_heads=2, output="copy"))
    module = (Signalled if len(sys.argv) > 4 else draft_module(Medusa))(cycle_target(), config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    module.clock.before = 1e6 * int(os.environ.get("RANK", "0"))
    result = fit(module, CycleData(), Path(sys.argv[1]), progress=False)
    print(f"rank {os.environ.get('RANK', '0')}: step {result.step}, "
          f"accepted length {result.accepted_length:.6f}, {result.steps} steps in all")


if __name__ == "__main__":
    main()
