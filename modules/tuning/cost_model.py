"""Cost model of decoding steps on this machine, and the fastest tree size.

Seconds of some passes and drafts are measured, and a model of few non-negative terms is fitted to them. It predicts the
seconds of any tree size, batch and context, the tokens per second, and the size with the most tokens per second.

Shapes: S samples, T terms of a model.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

MOST_KNOTS = 8
"""Largest number of knots of the piecewise linear functions."""
MOST_NODES, MOST_CONTEXT = 2**16, 2**24
"""Largest tree and context that a cost model may speak of, in tokens."""
NORMAL_MEDIAN = 0.6745
"""Median absolute value of a normal error, in standard deviations."""
MOST_EXCESS = 0.15
"""Share above which the excess of timed steps speaks of other programs: a quiet machine repeats a step within it."""
SURE_LENGTH = 1.2
"""Tokens of a pass from which a draft stays in use where other programs disturbed the timing."""
MOST_SECONDS = 86_400.0
"""Largest weight of a term, in seconds: beyond it a prediction could overflow."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measured seconds of one kind of step."""

    size: int
    """Nodes of each row's tree, the root included."""
    batch: int
    """Rows."""
    context: int
    """Tokens that each row has read."""
    pass_seconds: float
    """Seconds of a verifying pass, acceptance and commit included."""
    draft_seconds: float
    """Seconds the drafter needs to grow the trees and observe the pass; 0 for trees of 1 node."""


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Seconds of one decoding step at one batch and context, by nodes of its tree."""

    sizes: tuple[int, ...]
    """Numbers of nodes, ascending from 1."""
    pass_seconds: tuple[float, ...]
    """Seconds of a verifying pass of so many nodes, commit included; first those of plain decoding, a token a pass."""
    draft_seconds: tuple[float, ...]
    """Seconds the drafter needs to grow a tree of so many nodes and observe the pass; 0 for 1 node."""
    context: int
    """Tokens already in the cache."""
    contended: bool = False
    """True where other programs slowed the steps down while they were timed."""

    def step_seconds(self, size: int) -> float:
        """Seconds of a drafted step with a tree of `size` nodes, interpolated between the known sizes."""
        return interpolate(self.sizes, self.pass_seconds, size) + interpolate(self.sizes, self.draft_seconds, size)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Fitted seconds of a step by nodes N of its tree, rows B and tokens of context C.

    A pass: a constant, a piecewise linear function of the N B tokens in it (memory bound at first, then compute bound:
    a roofline without assuming where it bends), B C for reading the keys and values, N B C for attention to them. A
    draft: a constant, a piecewise linear function of N (levels come with nodes), B - 1, (B - 1) N, B C and N B C. No
    weight is negative, so that nothing gets faster by being larger.
    """

    knots: tuple[int, ...]
    """Numbers of tokens, ascending from 1, at which the slope may change; beyond the last one it stays."""
    pass_weights: tuple[float, ...]
    """Seconds of each term of a pass."""
    draft_weights: tuple[float, ...]
    """Seconds of each term of a draft."""
    largest: int
    """Nodes of the largest tree that was drafted."""
    context: int
    """Default tokens of context."""
    pass_error: float
    """Median relative error of the fitted seconds of a pass over the samples."""
    draft_error: float
    """Median relative error of the fitted seconds of a draft."""
    excess: float = 0.0
    """Share by which half of the timed steps took longer than the shortest of their kind; the median over the kinds."""

    def __post_init__(self) -> None:
        if self.knots[:1] != (1,) or list(self.knots) != sorted(set(self.knots)):
            raise ValueError(f"the knots of a cost model must ascend from 1, got {list(self.knots)}")
        for name, value, most in (("largest", self.largest, MOST_NODES), ("context", self.context, MOST_CONTEXT)):
            if not 1 <= value <= most:
                raise ValueError(f"{name} of a cost model must lie between 1 and {most}, got {value}")
        terms = {"pass_weights": _pass_terms(self.knots, 1, 1, 1), "draft_weights": _draft_terms(self.knots, 1, 1, 1)}
        for name, wanted in terms.items():
            weights = getattr(self, name)
            # A draft that never grew a tree has none.
            if len(weights) != len(wanted) and (weights or name == "pass_weights"):
                raise ValueError(f"{name} of a cost model must be {len(wanted)} numbers, got {len(weights)}")
            if wrong := [weight for weight in weights if not 0 <= weight <= MOST_SECONDS]:
                raise ValueError(f"{name} of a cost model must lie between 0 and {MOST_SECONDS:g} s, got {wrong[0]:g}")
        if not self.pass_seconds(1) > 0:
            raise ValueError("a pass of one token must take some time by a cost model")

    @classmethod
    def fit(cls, samples: Sequence[Sample], context: int, excess: float = 0.0) -> "CostModel":
        """Fit both functions by least squares of the relative error. Raises ValueError if no sample has 1 node."""
        if not any(sample.size == 1 for sample in samples):
            raise ValueError("a model of the cost needs passes of 1 node to compare with, got none")
        # Measured token counts, thinned out to factors of two; the last slope has samples at both ends.
        tokens = sorted({sample.size * sample.batch for sample in samples})
        knots: tuple[int, ...] = (tokens[0],)
        for count in tokens[:-1]:
            knots += (count,) if count >= 2 * knots[-1] and len(knots) < MOST_KNOTS else ()
        pass_weights, pass_error = _fitted([_pass_terms(knots, s.size, s.batch, s.context) for s in samples],
                                           [s.pass_seconds for s in samples])
        drafted = [sample for sample in samples if sample.size > 1]
        draft_weights, draft_error = _fitted([_draft_terms(knots, s.size, s.batch, s.context) for s in drafted],
                                             [s.draft_seconds for s in drafted])
        return cls(knots=knots, pass_weights=pass_weights, draft_weights=draft_weights,
                   largest=max(sample.size for sample in samples), context=context, pass_error=pass_error,
                   draft_error=draft_error, excess=excess)

    @property
    def contended(self) -> bool:
        """True where other programs slowed the steps down while they were timed."""
        return self.excess > MOST_EXCESS

    def pass_seconds(self, size: int, batch: int = 1, context: int | None = None) -> float:
        """Seconds of a verifying pass."""
        return _dot(self.pass_weights, _pass_terms(self.knots, size, batch, self._context(context)))

    def draft_seconds(self, size: int, batch: int = 1, context: int | None = None) -> float:
        """Seconds of growing trees of `size` nodes and observing their pass; 0 for 1 node, which is not drafted."""
        if size == 1 or not self.draft_weights:
            return 0.0
        return _dot(self.draft_weights, _draft_terms(self.knots, size, batch, self._context(context)))

    def step_seconds(self, size: int, batch: int = 1, context: int | None = None) -> float:
        """Seconds of a step: draft and pass."""
        return self.pass_seconds(size, batch, context) + self.draft_seconds(size, batch, context)

    def predict(self, accepted_length: float, size: int, batch: int = 1, context: int | None = None) -> float:
        """Speed-up over plain decoding of the same batch, if a pass emits `accepted_length` tokens for each row."""
        return accepted_length * self.pass_seconds(1, batch, context) / self.step_seconds(size, batch, context)

    def relative_error(self, size: int, batch: int = 1) -> float:
        """Relative standard error of a predicted speed-up by the seconds: of the fits of all parts, and measured."""
        drafting = self.draft_seconds(size, batch) / self.step_seconds(size, batch)
        fits = self.pass_error, (1 - drafting) * self.pass_error, drafting * self.draft_error
        return math.hypot(math.hypot(*fits) / NORMAL_MEDIAN, self.excess)

    def answer_speedup(self, accepted_length: float, step_seconds: float, prompt: float, answer: float,
                       batch: int = 1) -> float:
        """Speed-up over plain decoding of whole answers, of so many tokens after prompts of so many; their first token
        comes from the pass over the prompt, the others from steps of `step_seconds`, drafting included."""
        first = self.pass_seconds(max(1, round(prompt)), batch, 0)
        later = max(answer - 1, 0.0)
        return (first + later * self.pass_seconds(1, batch)) / (first + later / accepted_length * step_seconds)

    def curve(self, batch: int = 1, context: int | None = None) -> CostCurve:
        """Seconds of every size up to the largest tree that was drafted."""
        sizes = tuple(range(1, self.largest + 1))
        return CostCurve(
            sizes=sizes,
            pass_seconds=tuple(self.pass_seconds(size, batch, context) for size in sizes),
            draft_seconds=tuple(self.draft_seconds(size, batch, context) for size in sizes),
            context=self._context(context), contended=self.contended,
        )

    def _context(self, context: int | None) -> int:
        return self.context if context is None else context


@dataclass(frozen=True, kw_only=True)
class TreeChoice:
    """The size that maximises predicted tokens per second."""

    size: int
    """Nodes of the tree, the root included; 1 when drafting does not pay."""
    expected_accepted_length: float
    """Tokens per pass that are expected of it."""
    predicted_speedup: float
    """Predicted tokens per second over plain decoding."""


def choose_size(expected_lengths: Sequence[float], cost: CostCurve) -> TreeChoice:
    """Pick the prefix of a best-first tree, or the length of a chain, with the most predicted tokens per second.

    Args:
        expected_lengths: expected accepted length of each size from 1 on, the bonus included.
        cost: seconds at the batch and context in question. Contended ones do not switch off a draft that gains tokens,
            as they slow a pass of many tokens down far more than one of a single token.
    """
    best = TreeChoice(size=1, expected_accepted_length=1.0, predicted_speedup=1.0)
    for size, length in enumerate(expected_lengths, start=1):
        # Beyond the largest size that was timed the curve knows nothing.
        if 1 < size <= cost.sizes[-1]:
            speedup = length * cost.pass_seconds[0] / cost.step_seconds(size)
            kept = cost.contended and best.size == 1 and length >= SURE_LENGTH
            if speedup > best.predicted_speedup or kept:
                best = TreeChoice(size=size, expected_accepted_length=length, predicted_speedup=speedup)
    return best


def _fitted(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """(weights of the terms, median relative error) by least squares of that error; no terms without samples."""
    if not seconds:
        return (), 0.0
    terms_ST = torch.tensor(terms, dtype=torch.float64)
    seconds_S = torch.tensor(seconds, dtype=torch.float64)
    # Relative errors: a pass of one token is as important as one of many.
    weights_T = least_squares(terms_ST / seconds_S[:, None], torch.ones_like(seconds_S))
    off_S = (terms_ST @ weights_T / seconds_S - 1).abs()
    return tuple(weights_T.tolist()), median(off_S.tolist())


def least_squares(terms_ST: Tensor, wanted_S: Tensor) -> Tensor:
    """Non-negative least-squares weights, [T], float64 (Lawson & Hanson 1974, chapter 23)."""
    # Terms differ by many orders of magnitude; scaled to length 1, one tolerance is enough.
    scale_T = terms_ST.norm(dim=0).clamp(min=1e-300)
    terms_ST = terms_ST / scale_T
    weights_T = torch.zeros_like(scale_T)
    used_T = torch.zeros_like(scale_T, dtype=torch.bool)
    for _ in range(3 * len(scale_T)):
        gain_T = (terms_ST.T @ (wanted_S - terms_ST @ weights_T)).masked_fill(used_T, -torch.inf)
        if float(gain_T.max()) <= 1e-10 * float(wanted_S.norm()):
            break
        used_T[gain_T.argmax()] = True
        # Of the best weights of the terms used, those that would become negative leave one after the other.
        while True:
            free_T = torch.zeros_like(weights_T)
            free_T[used_T] = torch.linalg.lstsq(terms_ST[:, used_T], wanted_S[:, None], driver="gelsd").solution[:, 0]
            negative_T = used_T & (free_T <= 0)
            if not bool(negative_T.any()):
                weights_T = free_T
                break
            step = (weights_T[negative_T] / (weights_T[negative_T] - free_T[negative_T])).nan_to_num(0.0).min()
            weights_T = weights_T + step * (free_T - weights_T)
            used_T &= weights_T > 1e-14
            weights_T = torch.where(used_T, weights_T, 0.0)
    found_T: Tensor = weights_T / scale_T
    return found_T


def _rising(knots: Sequence[int], count: int) -> list[float]:
    """Part of `count` in each interval between knots; the last interval has no end."""
    inner = [float(min(max(count - low, 0), high - low)) for low, high in pairwise(knots)]
    return [*inner, float(max(count - knots[-1], 0))]


def _pass_terms(knots: Sequence[int], size: int, batch: int, context: int) -> list[float]:
    tokens = size * batch
    return [1.0, *_rising(knots, tokens), float(batch * context), float(tokens * context)]


def _draft_terms(knots: Sequence[int], size: int, batch: int, context: int) -> list[float]:
    # Rows beyond the first: what one row costs is in the other terms.
    others = batch - 1
    return [1.0, *_rising(knots, size), float(others), float(others * size), float(batch * context),
            float(batch * size * context)]


def _dot(weights: Sequence[float], terms: Sequence[float]) -> float:
    return sum(weight * term for weight, term in zip(weights, terms, strict=True))


def interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """The value at x of a piecewise linear function through these points, constant beyond them."""
    place = bisect_left(xs, x)
    if place == 0 or place == len(xs):
        return ys[0] if place == 0 else ys[-1]
    low, high = xs[place - 1], xs[place]
    return ys[place - 1] + (ys[place] - ys[place - 1]) * (x - low) / (high - low)
