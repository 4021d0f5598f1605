"""Peak memory of drafted and of plain decoding of the same prompts, and the largest allocation of a pass.

    python tests/benchmarks/memory.py [--target NAME] [--context TOKENS] [--new-tokens N] [--batch-size N]

Every tensor storage that is made while decoding is counted as long as it lives, on any device and independently of what
else the process holds; the target's weights are added. Exits with 1 when drafting takes over 10 % more than plain
decoding and the drafter's own weights and state together.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from draftsmith.modules import (
    DEFAULT_NAME,
    Chain,
    DecodeSettings,
    Loop,
    Medusa,
    MedusaConfig,
    Policy,
    Proposer,
    Request,
    StaticTree,
    Target,
    TargetConfig,
    baseline,
    load_target,
)
from draftsmith.modules.baselines.token_recycling import recycling_tree
from draftsmith.recipes.planning.counted_storages import CountedStorages

BOUND = 1.10
"""Largest allowed ratio of drafted decoding to plain decoding and the drafter together."""


@dataclass(frozen=True)
class Usage:
    """Bytes that one method of decoding took."""

    peak: int
    """Peak of the bytes alive at once, with the cache, without the target's weights."""
    largest: int
    """Largest allocation of a pass after the prompt's."""
    weights: int
    """The drafter's own weights, made before the tally started."""
    state: int
    """The drafter's state as it starts; part of the peak."""


def measured(target: Target, context: int, new_tokens: int, batch: int, drafter: Proposer | None,
             policy: Policy | None) -> Usage:
    """Decode once under a tally."""
    requests = [Request(tuple((10 + row + place) % target.vocab_size for place in range(context)), row, new_tokens)
                for row in range(batch)]
    with CountedStorages() as started:
        held = drafter.start(batch, context + new_tokens) if drafter is not None else None
        state = started.live
    del held
    with CountedStorages() as tally:
        loop = Loop(target, requests, DecodeSettings(batch_size=batch, ignore_eos=True), drafter=drafter, policy=policy)
        passes = loop.run()
        for _ in range(batch):
            next(passes)
        read = tally.peak
        tally.restart()
        for _ in passes:
            pass
        largest = tally.largest
    own = weights(drafter) if isinstance(drafter, torch.nn.Module) else 0
    return Usage(peak=max(read, tally.peak), largest=largest, weights=own, state=state)


def weights(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


Way = Callable[[Target], tuple[Proposer | None, Policy | None]]
WAYS: dict[str, Way] = {
    "plain": lambda target: (None, None),
    "Medusa, chain of 3": lambda target: (Medusa.create(MedusaConfig(num_heads=4), target).eval(), Chain(3)),
    "Medusa, tree of 64": lambda target: (Medusa.create(MedusaConfig(num_heads=7), target).eval(),
                                          StaticTree(recycling_tree(64))),
    "prompt_lookup": lambda target: baseline("prompt_lookup", target),
    "recycling": lambda target: baseline("recycling", target),
    "first_layers": lambda target: baseline("first_layers", target),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=12, help="length of each answer")
    parser.add_argument("--batch-size", type=int, default=1, help="rows")
    options = parser.parse_args()
    target = load_target(TargetConfig(name=options.target, device="cpu"))
    base = weights(target.model)
    print(f"{options.target}, {str(target.dtype).removeprefix('torch.')}: weights {base / 2**20:.1f} MiB; context "
          f"{options.context}, {options.new_tokens} new tokens, {options.batch_size} rows")
    print("| method | peak without weights MiB | drafter's weights MiB | its state MiB | largest of a pass MiB | "
          "all over plain and drafter |")
    print("|---|---|---|---|---|---|")
    worst, plain = 0.0, 0
    for name, way in WAYS.items():
        usage = measured(target, options.context, options.new_tokens, options.batch_size, *way(target))
        plain = plain or usage.peak
        ratio = (base + usage.weights + usage.peak) / (base + usage.weights + usage.state + plain)
        worst = max(worst, ratio)
        cells = " | ".join(f"{size / 2**20:.2f}" for size in (usage.peak, usage.weights, usage.state, usage.largest))
        print(f"| {name} | {cells} | {ratio:.3f} |")
    print(f"largest ratio {worst:.3f}, bound {BOUND}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
