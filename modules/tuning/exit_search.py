"""Exit layer of a drafter that runs the target's first layers, by predicted speed: each layer's cost is measured on
this machine, the acceptance on held-out answers.

Shapes: B rows, L positions, P places where a draft starts, K draft steps.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from ..drafters.kangaroo import Kangaroo, KangarooConfig
from ..drafters.parts.block_cache import BlockRows
from ..features import Features
from ..interfaces.proposer import Frontier
from ..target.model import Target
from ..token_tree import Topology
from .held_out_ranks import UNROLLED, rank_table


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
    """The exits, fastest first; among equals the one with fewer layers.

    Args:
        costs: of this machine.
        lengths: for each exit the expected tokens per pass of chains of 1, 2, 3 ... tokens, as `chain_lengths` gives
            them.
    """
    choices = []
    for exit_layer, expected in sorted(lengths.items()):
        chains = [ExitChoice(exit_layer=exit_layer, length=length, expected_accepted_length=tokens,
                             predicted_speedup=tokens * costs.plain / costs.step(exit_layer, length))
                  for length, tokens in enumerate(expected[: len(costs.rest) - 1], start=1)]
        choices.append(max(chains, key=lambda chain: chain.predicted_speedup))
    return sorted(choices, key=lambda choice: -choice.predicted_speedup)


def chain_lengths(drafter: Kangaroo, features: Sequence[Features]) -> tuple[float, ...]:
    """Expected tokens per greedy pass of chains of 1, 2, 3 ... tokens, the target's own included, on held-out answers.

    Args:
        drafter: bound to the target.
        features: the target's own greedy answers, encoded with the drafter's taps.
    """
    right_PK = rank_table(drafter, features) == 0
    return tuple((1 + right_PK.long().cumprod(1).sum(0).cumsum(0).double() / max(1, len(right_PK))).tolist())


def untrained_lengths(
    target: Target, features: Sequence[Features], exits: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """`chain_lengths` of each exit without training: the output of the first layers read as that of the last.

    Args:
        features: the target's own greedy answers.
        exits: numbers of first layers.

    Raises:
        UserError: if an exit is not below the number of layers.
    """
    drafters = {exit_layer: Kangaroo.create(KangarooConfig(exit_layer=exit_layer), target).eval()
                for exit_layer in exits}
    taps = tuple(exit_layer - 1 for exit_layer in sorted(drafters))
    encoded = [target.encode(batch, taps) for batch in features]
    return {exit_layer: chain_lengths(drafter, encoded) for exit_layer, drafter in drafters.items()}


@torch.no_grad()
def measure_layers(target: Target, *, context: int = 128, repeats: int = 7, longest: int = UNROLLED) -> LayerCosts:
    """Medians over passes of all sizes in turns, after `context` tokens of any content.

    Args:
        target: the target.
        context: tokens that it has read.
        repeats: passes of each size, after one round of warm-up.
        longest: longest chain whose pass is timed.
    """
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
        with drafter.packed_linears():
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
