"""Shapes of draft language models, ranked by their speed-up on this machine.

    python tests/benchmarks/draft_sizing.py [--acceptance P] [--repeats N]

Each shape gets random weights and is timed with the embedded target, over a chain of three tokens. The acceptance is
assumed to be the same for all, so the table ranks shapes of equal weights by their speed alone.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import torch
from draftsmith.modules import (
    DraftLM,
    DraftLMConfig,
    Target,
    TargetConfig,
    Topology,
    UserError,
    load_target,
    measure_cost,
)

OUTPUTS = 4096
"""Entries of the reduced vocabulary."""
CANDIDATES = ((1, 576), (2, 384), (2, 576), (3, 576), (4, 384), (6, 384), (6, 576))
"""Layers and width of each shape."""
DRAFTED = 3
"""Tokens of the timed chain."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a decoder with gated MLPs; a pass reads an embedding row for each token and all other weights."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Hidden size."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Key-value heads."""
    intermediate: int
    """Intermediate size of the MLP."""
    outputs: int
    """Rows of the output layer: the vocabulary, or a reduced one."""

    @property
    def weights(self) -> int:
        """Parameters that one pass reads: layers, norms and output layer."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.outputs * self.hidden


@dataclass(frozen=True, kw_only=True)
class Sized:
    """Predicted speed-up of a shape at its best draft length."""

    shape: Shape
    """The shape."""
    cost: float
    """Time of its step over that of a pass of the target."""
    length: int
    """Number of drafted tokens per pass at which it is fastest."""
    speedup: float
    """Tokens per second over the target alone; below 1 drafting is slower."""


def block_efficiency(acceptance: float, length: int) -> float:
    """Tokens per target pass of a chain whose tokens are each accepted with this probability (arXiv:2211.17192, eq. 1).

    Raises:
        UserError: if `acceptance` is not a probability or `length` is negative.
    """
    if not 0 <= acceptance <= 1 or length < 0:
        raise UserError(f"acceptance must lie between 0 and 1 and length from 0 up, got {acceptance} and {length}")
    return float(sum(acceptance**depth for depth in range(length + 1)))


def best_length(acceptance: float, cost: float, *, longest: int = 16) -> tuple[int, float]:
    """(tokens to draft, memory-bound speed-up) where it is greatest; (0, 1.0) where drafting is slower."""
    found = ((length, block_efficiency(acceptance, length) / (cost * length + 1))
             for length in range(longest + 1))
    return max(found, key=lambda one: (one[1], -one[0]))


def rank_shapes(
    shapes: Iterable[Shape],
    target: Shape,
    acceptance: Callable[[Shape], float],
    *,
    budget: int | None = None,
    seconds: Callable[[Shape], float] | None = None,
    target_seconds: float | None = None,
) -> list[Sized]:
    """Candidates within a budget, the fastest first.

    Args:
        shapes: the candidates.
        target: the target's shape.
        acceptance: the probability that a token drafted by a model of a shape is accepted: measured, or one for all.
        budget: largest number of weights that a pass of the draft may read; None for no bound.
        seconds: measured time of a draft step of a shape; None estimates the cost by the ratio of the weights read.
        target_seconds: measured time of a pass of the target; given with `seconds`.

    Raises:
        UserError: if no shape is within the budget.
        ValueError: if one of the times is given without the other.
    """
    if (seconds is None) != (target_seconds is None):
        raise ValueError("measured times of the drafts and of the target are used together; give both or neither")
    candidates = list(shapes)
    fitting = [shape for shape in candidates if budget is None or shape.weights <= budget]
    if not fitting:
        least = min((shape.weights for shape in candidates), default=0)
        raise UserError(f"no shape reads at most {budget} weights; the smallest of {len(candidates)} reads {least}: "
                        "raise the budget, or reduce vocabulary or width")
    return sorted((_sized(shape, target, acceptance, seconds, target_seconds) for shape in fitting),
                  key=lambda one: -one.speedup)


def _sized(shape: Shape, target: Shape, acceptance: Callable[[Shape], float],
           seconds: Callable[[Shape], float] | None, target_seconds: float | None) -> Sized:
    if seconds is None or target_seconds is None:
        cost = shape.weights / target.weights
    else:
        cost = seconds(shape) / target_seconds
    length, speedup = best_length(acceptance(shape), cost)
    return Sized(shape=shape, cost=cost, length=length, speedup=speedup)


def shape_of(layers: int, hidden: int) -> Shape:
    """A shape with heads of 64 components, a third as many key-value heads and Llama's ratio of the MLP."""
    heads = hidden // 64
    return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=max(1, heads // 3), intermediate=hidden * 8 // 3,
                 outputs=OUTPUTS)


def times(target: Target, shape: Shape, repeats: int) -> tuple[float, float]:
    """(seconds of a draft step, seconds of a pass of the target)."""
    config = DraftLMConfig(num_layers=shape.layers, hidden_size=shape.hidden, vocabulary_size=OUTPUTS)
    drafter = DraftLM.create(config, target, torch.arange(OUTPUTS)).eval()
    cost = measure_cost(target, drafter, Topology.chain(DRAFTED), repeats=repeats)
    return cost.draft_seconds(DRAFTED + 1) / DRAFTED, cost.pass_seconds(1)


def main() -> None:
    """Print the table, the fastest shape first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--acceptance", type=float, default=0.5, help="assumed probability that a token is accepted")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind")
    options = parser.parse_args()
    target = load_target(TargetConfig())
    config = target.config
    whole = Shape(layers=target.num_layers, hidden=target.hidden_size, heads=config.num_attention_heads,
                  kv_heads=config.num_key_value_heads, intermediate=config.intermediate_size,
                  outputs=target.vocab_size)
    measured = {shape: times(target, shape, options.repeats)
                for shape in (shape_of(*candidate) for candidate in CANDIDATES)}
    passed = median(seconds for _, seconds in measured.values())
    by_time = rank_shapes(measured, whole, lambda _: options.acceptance, seconds=lambda shape: measured[shape][0],
                          target_seconds=passed)
    by_bytes = {one.shape: one for one in rank_shapes(measured, whole, lambda _: options.acceptance)}
    print(f"target pass {passed * 1e3:.1f} ms, {torch.get_num_threads()} threads, acceptance "
          f"{options.acceptance} assumed\n")
    print("| layers x width | weights read, M | draft step, ms | cost by bytes | cost by time | draft length | MBSU |")
    print("|---|---|---|---|---|---|---|")
    for one in by_time:
        shape = one.shape
        print(f"| {shape.layers} x {shape.hidden} | {shape.weights / 1e6:.1f} | {measured[shape][0] * 1e3:.2f} | "
              f"{by_bytes[shape].cost:.3f} | {one.cost:.3f} | {one.length} | {one.speedup:.2f} |")


if __name__ == "__main__":
    main()
