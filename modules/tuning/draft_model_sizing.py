"""Choice of a draft model's shape by FastDraft's memory-bound speed-up, from bytes or from measured passes.

A pass of a small batch reads every weight once, so its time is proportional to its bytes; but layers run one after the
other and each has a fixed cost, however narrow it is. At equal bytes few wide layers are therefore faster than many
narrow ones (arXiv:2411.11055, section 3.1).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import UserError


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


def memory_bound_speedup(efficiency: float, draft_share: float) -> float:
    """tau / (c gamma + 1): the speed-up if reading weights were all that takes time (arXiv:2411.11055, section 4).

    Args:
        efficiency: tau, tokens per pass of the target.
        draft_share: c gamma, the cost of all draft steps of a pass over the cost of the pass, in bytes or seconds.
    """
    return efficiency / (draft_share + 1)


def best_length(acceptance: float, cost: float, *, longest: int = 16) -> tuple[int, float]:
    """(tokens to draft, memory-bound speed-up) where it is greatest; (0, 1.0) where drafting is slower."""
    found = ((length, memory_bound_speedup(block_efficiency(acceptance, length), cost * length))
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
