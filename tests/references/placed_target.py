"""Read, decode and train with a target that several processes hold; started by torch.distributed.run, or imported.

Arguments: folder of the target, its placement, its degree, `offload` or `keep`, the strategy of the drafter, folder for
the results of each process.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.modules import Eagle3
from draftsmith.trainers import DraftModule, draft_module, train_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import DecodeSettings, Features, Request, StaticTree, Target, Topology, decode
from draftsmith.modules.families.eagle3.drafter import Eagle3Config
from draftsmith.modules.target.loading.loading import TargetConfig, load_target
from draftsmith.trainers import FitResult, fit
from support.cases import CYCLE, CycleData, cycle_rows

TAPS = (0, 2, 5)
BATCHES = 4  # Micro-batches of a step, whoever reads them


@dataclass(frozen=True)
class Found:
    """States, losses and answers of a target, and the weights that this process holds of it."""

    states: dict[int, list[torch.Tensor]]  # Final state and taps of batches by number
    sums: dict[int, torch.Tensor]  # Sums of losses and counts of these batches
    answers: list[list[int]]  # Tokens of answers that were drafted and verified
    emitted: list[list[int]]  # Tokens that each of their passes emitted
    layer_bytes: int  # Bytes of the layers' weights in this process
    weights_hash: str
    architecture: str


def batch(number: int) -> Features:
    """Batch `number`: as many rows as no other one has, and another length."""
    features = cycle_rows(number, rows=1 + number)
    return Features(**{name: getattr(features, name)[:, : 24 - number]
                       for name in ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL")})


def module_for(target: Target, *, world: int, strategy: str = "auto") -> DraftModule:
    """A drafter in training, whose step reads the same rows whatever the number of processes."""
    config = train_config(Eagle3)(max_steps=4, lr=1e-2, warmup_steps=1, validate_every=2, validation_nodes=4,
                                  checkpoint_every=4, accumulate=BATCHES // world, devices=world, strategy=strategy,
                                  accelerator="cpu", precision="32-true", objective="soft",
                                  drafter=Eagle3Config(steps=2, taps=TAPS))
    module = draft_module(Eagle3)(target, config)
    module.configure_model()
    return module


def show(target: Target, numbers: list[int]) -> Found:
    """Read batches, one of this process at a time, and decode with all processes at once."""
    module = module_for(target, world=1)
    read = {number: target.placement.own_states(lambda rows: target.encode(rows, TAPS), batch(number))
            for number in numbers}
    requests = [Request(index=place, tokens=tuple(CYCLE[place : place + 5]), max_new_tokens=12) for place in range(3)]
    result = decode(target, requests, DecodeSettings(batch_size=2), drafter=module.drafter.eval(),
                    policy=StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])))
    return Found(states={number: [features.final(), *features.taps.values()] for number, features in read.items()},
                 sums={number: module.loss(features).sums_KC.detach() for number, features in read.items()},
                 answers=[one.tokens for one in result.generations],
                 emitted=[one.emitted for one in result.generations],
                 layer_bytes=sum(_held(tensor).nbytes for tensor in target.layers.parameters()),
                 weights_hash=target.identity.weights_hash, architecture=target.identity.architecture)


def train(target: Target, out: Path, *, world: int, strategy: str = "auto") -> FitResult:
    """A short training, with held-out rows that do not divide among processes."""
    return fit(module_for(target, world=world, strategy=strategy), CycleData(held_out=7), out, progress=False)


def _held(tensor: Any) -> torch.Tensor:
    """The part of a weight that this process holds, of FSDP2 or ZeRO-3."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "ds_tensor", tensor)
    return held


def main() -> None:
    torch.set_num_threads(1)
    folder, placement, degree, offload, strategy, out = sys.argv[1:]
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    target = load_target(TargetConfig(name=folder, placement=placement, degree=int(degree),
                                      offload=offload == "offload", device="cpu"))
    found = show(target, [rank])
    result = train(target, Path(out), world=world, strategy=strategy)
    torch.save({**vars(found), "step": result.step, "accepted_length": result.accepted_length,
                "by_position": result.by_position}, Path(out) / f"process{rank}.pt")


if __name__ == "__main__":
    main()
