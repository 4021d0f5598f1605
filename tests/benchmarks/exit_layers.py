"""Exits of the target's first layers: the time that handing over saves, predicted speeds, and the same after training.

    python tests/benchmarks/exit_layers.py [--target NAME] [--exits 2,4,8] [--train-steps N] [--best N]

The first table times verifying passes of a drafted chain that take the first layers over, and one that runs them again;
they take turns in one process and medians are printed. The second trains nothing: each layer's cost is measured, and
each exit's output is read as the last layer's on the target's own greedy answers. With --train-steps the best exits are
trained for that many steps on half of the answers and measured on the others.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from draftsmith.modules import (
    DEFAULT_NAME,
    DecodeSettings,
    Features,
    Kangaroo,
    KangarooConfig,
    Request,
    Target,
    TargetConfig,
    Topology,
    decode,
    load_target,
)
from draftsmith.modules.drafters.parts.block_cache import BlockRows
from draftsmith.modules.interfaces.proposer import Frontier
from draftsmith.modules.tuning.held_out_ranks import UNROLLED, rank_table
from draftsmith.trainers import fit
from draftsmith.trainers.drafters.kangaroo import KangarooModule, KangarooTrainConfig
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.against_transformers import chat_prompts

CHAIN = 6
"""Drafted tokens of the timed passes: the paper's gamma."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Seconds of the parts of a pass of 1, 2, 3 ... nodes."""

    layers: tuple[tuple[float, ...], ...]
    """Of each layer, by nodes."""
    rest: tuple[float, ...]
    """Of everything else, the output layer included, by nodes."""
    adapter: float = 0.0
    """Of the adapter on one node."""

    @property
    def plain(self) -> float:
        """Seconds of a pass of one token."""
        return self.rest[0] + sum(layer[0] for layer in self.layers)

    def step(self, exit_layer: int, length: int) -> float:
        """Seconds of drafting a chain of `length` tokens and verifying it.

        The first layers run on the root and on each drafted token, one at a time, the later ones once on all.
        """
        first = sum(layer[0] for layer in self.layers[:exit_layer])
        later = sum(layer[length] for layer in self.layers[exit_layer:])
        return length * (first + self.rest[0] + self.adapter) + first + later + self.rest[length]


@dataclass(frozen=True, kw_only=True)
class ExitChoice:
    """An exit with the length of its chains that maximises predicted tokens per second."""

    exit_layer: int
    """Number of the target's layers that draft."""
    length: int
    """Tokens of a chain."""
    expected_accepted_length: float
    """Tokens per pass that are expected of it."""
    predicted_speedup: float
    """Predicted tokens per second over plain decoding; below 1 drafting does not pay."""


def rank_exits(costs: LayerCosts, lengths: Mapping[int, Sequence[float]]) -> list[ExitChoice]:
    """The exits, fastest first; among equals the one with fewer layers."""
    choices = []
    for exit_layer, expected in sorted(lengths.items()):
        chains = [ExitChoice(exit_layer=exit_layer, length=length, expected_accepted_length=tokens,
                             predicted_speedup=tokens * costs.plain / costs.step(exit_layer, length))
                  for length, tokens in enumerate(expected[: len(costs.rest) - 1], start=1)]
        choices.append(max(chains, key=lambda chain: chain.predicted_speedup))
    return sorted(choices, key=lambda choice: -choice.predicted_speedup)


def chain_lengths(drafter: Kangaroo, features: Sequence[Features]) -> tuple[float, ...]:
    """Expected tokens per greedy pass of chains of 1, 2, 3 ... tokens, the target's own included, on held-out answers.
    """
    right_PK = rank_table(drafter, features) == 0
    return tuple((1 + right_PK.long().cumprod(1).sum(0).cumsum(0).double() / max(1, len(right_PK))).tolist())


def untrained_lengths(target: Target, features: Sequence[Features],
                      exits: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """`chain_lengths` of each exit without training: the output of the first layers read as that of the last."""
    drafters = {exit_layer: Kangaroo.create(KangarooConfig(exit_layer=exit_layer), target).eval()
                for exit_layer in exits}
    taps = tuple(exit_layer - 1 for exit_layer in sorted(drafters))
    encoded = [target.encode(batch, taps) for batch in features]
    return {exit_layer: chain_lengths(drafter, encoded) for exit_layer, drafter in drafters.items()}


@torch.no_grad()
def measure_layers(target: Target, *, context: int = 128, repeats: int = 7, longest: int = UNROLLED) -> LayerCosts:
    """Medians over passes of all sizes in turns, after `context` tokens of any content."""
    sizes = range(1, longest + 2)
    rows = target.start(1, context + longest + 1)
    rows.cache.assume(context)
    found: dict[int, list[list[float]]] = {size: [] for size in sizes}
    with _timed(target.layers, target.device) as seconds:
        for turn in range(repeats + 1):
            for size in sizes:
                seconds.clear()
                tree = Topology.chain(size - 1).plant(torch.full((1, size), 7, device=target.device))
                started = _now(target.device)
                rows.run(tree)
                whole = _now(target.device) - started
                if turn:
                    found[size].append([*seconds, whole - sum(seconds)])
    by_part = [[median(part) for part in zip(*found[size], strict=True)] for size in sizes]
    parts = tuple(zip(*by_part, strict=True))
    return LayerCosts(layers=parts[:-1], rest=parts[-1], adapter=_adapter_seconds(target, context, repeats))


def _adapter_seconds(target: Target, context: int, repeats: int) -> float:
    """Median seconds of an adapter on one node."""
    drafter = Kangaroo.create(KangarooConfig(exit_layer=1), target).eval()
    drafter.pack_linears()
    zero_B1 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    root = Frontier(nodes_BF=zero_B1, parents_BF=zero_B1 - 1, tokens_BF=zero_B1)
    rows = BlockRows(1, 1, context + 2, target.device)
    rows.cache.assume(context)
    exits_BFD = torch.zeros(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
    times = []
    for _ in range(repeats + 1):
        rows.drop_tree()
        started = _now(target.device)
        with drafter.packing.installed():
            drafter.adapt(exits_BFD, rows.add_nodes(root))
        times.append(_now(target.device) - started)
    return median(times[1:])


@contextmanager
def _timed(layers: nn.ModuleList, device: torch.device) -> Iterator[list[float]]:
    """Add the seconds of each layer that runs inside the block to the list, in the order in which they run."""
    seconds: list[float] = []
    started = [0.0]

    def before(*_: Any) -> None:
        started[0] = _now(device)

    def after(*_: Any) -> None:
        seconds.append(_now(device) - started[0])

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Answers(L.LightningDataModule):
    """Rows in a fixed order again and again, others held out."""

    def __init__(self, rows: list[Features], held_out: list[Features], steps: int) -> None:
        super().__init__()
        self.rows, self.held_out, self.steps = rows, held_out, steps

    def train_dataloader(self) -> Any:
        """One row for each step."""
        return DataLoader([self.rows[step % len(self.rows)] for step in range(self.steps)], batch_size=None)

    def validation_features(self) -> list[Features]:
        """The held-out rows."""
        return self.held_out


def greedy_answers(target: Target, count: int, longest: int) -> list[Features]:
    """Handwritten prompts with the target's greedy answers."""
    requests = [Request(prompt, index, longest) for index, prompt in enumerate(chat_prompts(target, count, 200))]
    found = decode(target, requests, DecodeSettings(batch_size=8)).generations
    return [Features.from_rows([([*one.request.tokens, *one.tokens],
                                 [False] * len(one.request.tokens) + [True] * len(one.tokens))]) for one in found]


@torch.no_grad()
def handed_over(target: Target, exit_layer: int, context: int, repeats: int) -> list[float]:
    """Median seconds of drafting all nodes of a chain by the first layers, and of three passes that verify it.

    The first takes all nodes over, as after a chain that stops before an unsure token; the second all but the last one,
    as after the paper's chain; the third none.
    """
    rows = target.start(1, context + CHAIN + 1)
    rows.cache.assume(context)
    early, times = rows.early(exit_layer), []
    tree = Topology.chain(CHAIN).plant(torch.full((1, CHAIN + 1), 7, device=target.device))
    for _ in range(repeats + 1):
        seconds = []
        for drafted in (CHAIN + 1, CHAIN, 0):
            started = time.perf_counter()
            for node in range(drafted):
                here = torch.full((1, 1), node, device=target.device)
                early.run(here, here - 1, tree.tokens_BN[:, node : node + 1])
            passing = time.perf_counter()
            rows.run(tree)
            seconds += [passing - started, time.perf_counter() - passing]
        times.append((seconds[0], seconds[1], seconds[3], seconds[5]))
    return [median(part) for part in zip(*times[1:], strict=True)]


def trained_lengths(target: Target, exit_layer: int, rows: list[Features], held_out: list[Features],
                    steps: int) -> tuple[float, ...]:
    """Expected tokens per pass of chains after a short training."""
    config = KangarooTrainConfig(
        drafter=KangarooConfig(exit_layer=exit_layer, vocabulary_size=None), max_steps=steps, validate_every=steps,
        checkpoint_every=steps, warmup_steps=min(10, steps), precision="32-true", accelerator="cpu")
    module = KangarooModule(target, config)
    with tempfile.TemporaryDirectory() as folder:
        fit(module, Answers(rows, held_out[:2], steps), Path(folder), progress=False)
    drafter = module.drafter.eval()
    with torch.no_grad():
        return chain_lengths(drafter, [target.encode(batch, drafter.taps) for batch in held_out])


def show(choices: list[ExitChoice]) -> None:
    """Print exits, fastest first."""
    print("| exit layer | chain | expected accepted length | predicted speed-up |\n|---|---|---|---|")
    for choice in choices:
        print(f"| {choice.exit_layer} | {choice.length} | {choice.expected_accepted_length:.2f} | "
              f"{choice.predicted_speedup:.2f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--exits", default="1,2,4,8,12,16,20,24,28", help="numbers of first layers")
    parser.add_argument("--context", type=int, default=128, help="tokens before a timed pass")
    parser.add_argument("--repeats", type=int, default=7, help="timed passes of each kind")
    parser.add_argument("--answers", type=int, default=16, help="prompts that the target answers")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--train-steps", type=int, default=0, help="optimizer steps of a short training; 0 for none")
    parser.add_argument("--best", type=int, default=2, help="exits that are trained")
    options = parser.parse_args()
    numbers = options.exits.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        parser.error(f"--exits must be whole numbers of at least 1 with commas between them, got {options.exits!r}")
    if min(options.repeats, options.answers - 1, options.tokens) < 1:
        parser.error("--repeats and --tokens must be at least 1, --answers at least 2, half of which are held out, got "
                     f"{options.repeats}, {options.tokens} and {options.answers}")
    target = load_target(TargetConfig(name=options.target, device="cpu", dtype="float32"))
    exits = [int(number) for number in numbers if int(number) < target.num_layers]
    if not exits:
        parser.error(f"no exit of {options.exits} lies below the {target.num_layers} layers of {options.target}")
    print(f"{options.target}, context {options.context}, {torch.get_num_threads()} threads, chain of {CHAIN}\n")
    print("| exit layer | drafting ms | pass, all handed over ms | all but one ms | none ms | saved |")
    print("|---|---|---|---|---|---|")
    for exit_layer in exits:
        seconds = handed_over(target, exit_layer, options.context, options.repeats)
        cells = " | ".join(f"{1e3 * one:.1f}" for one in seconds)
        print(f"| {exit_layer} | {cells} | {1 - seconds[1] / seconds[3]:.0%} |")
    costs = measure_layers(target, context=options.context, repeats=options.repeats)
    answers = greedy_answers(target, options.answers, options.tokens)
    rows, held_out = answers[0::2], answers[1::2]
    with torch.no_grad():
        ranked = rank_exits(costs, untrained_lengths(target, held_out, exits))
    print("\nWithout training:\n")
    show(ranked)
    if options.train_steps:
        chosen = [choice.exit_layer for choice in ranked[: options.best]]
        found = {exit_layer: trained_lengths(target, exit_layer, rows, held_out, options.train_steps)
                 for exit_layer in chosen}
        print(f"\nAfter {options.train_steps} steps:\n")
        show(rank_exits(costs, found))


if __name__ == "__main__":
    main()
