"""A static tree whose size is chosen anew before every pass, none included, by goodput (SmartSpec, arXiv:2406.14066).

Chosen is the size that emits most tokens a second: those that the rows of the moment are expected to accept of it, by
what each has accepted lately, over the seconds of a step with so many rows, measured while decoding. Both come from
earlier passes alone and never from what is drawn in this one, so that answers stay exact.

Shapes: N nodes, S sizes, D depths, K accepted tokens (0 to D), X shifts, R rows."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..interfaces.proposer import DraftState, Proposer
from ..token_tree import TokenTree, Topology
from ..verification.sampling import Draws
from .base import Policy
from .trees import StaticTree

SIZES = (1, 2, 4, 8, 16, 32, 64)  # Nodes of the trees to choose from, and all that the draft's tree has
SHIFTS_X = np.arange(-6.0, 6.5, 0.5)
"""By how much the log-odds of acceptance may differ from those of held-out text: easy text is easy at all depths."""
WIDE, NARROW, ELSE = 1.5, 1.0, 0.1
"""Spread of that shift over texts, and of a row around its text, a priori; weight of a text unlike all others."""
KEPT_OF_TEXT, KEPT_OF_ROW = 0.99, 0.96  # Shares of what passes have shown that count on after one more
TRIAL_SHARE, APART = 0.01, 16  # Share of the seconds that trials of other sizes may cost; passes between two at least
SLOWEST, FOLLOWED = 3.0, 8  # Largest surprise of one measured pass, as a factor; passes over which seconds are averaged
GUESSED_RIGHT = 0.6  # Chance of the likeliest guess where no held-out text was counted
Floats = NDArray[np.float64]


def usual_chances(topology: Topology) -> list[float]:
    """The chance that the text takes the path to each node, where nothing was counted: of r guesses the last is right
    where those before it were not."""
    found = [1.0]
    for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
        found.append(found[parent] * GUESSED_RIGHT * (1 - GUESSED_RIGHT) ** rank)
    return found


class PaidTree(Policy):
    """Prefixes of a static tree, of which each pass takes the one that pays, or none. With none, the drafter observes
    passes later (`Batch.unread`), so that a run without drafts costs what plain decoding does; and trials of the other
    sizes, whose expected loss has a bound, find out when they pay again. It is greedy in the guesses, point masses.

    Args:
        topology: the tree, best node first.
        chances: that held-out text takes the path to each node; `usual_chances` where nothing was counted.
        seconds: of a step of so many nodes and rows, as far as they were measured before; None where nothing was."""

    def __init__(self, topology: Topology, chances: Sequence[float] = (),
                 seconds: Callable[[int, int], float] | None = None) -> None:
        self.topology, self.chances, self.table = topology, tuple(chances), seconds
        self.sizes = (*(size for size in SIZES if size < topology.size), topology.size)
        self.policies: dict[int, Policy] = {size: StaticTree(topology.prefix(size)) for size in self.sizes}
        self.depths_S = [topology.prefix(size).depth for size in self.sizes]
        chances_N = np.array(chances or usual_chances(topology))[: topology.size]
        reached_SD = np.array([[chances_N[:size][np.array(topology.depths[:size]) == depth].sum()
                                for depth in range(1, topology.depth + 1)] for size in self.sizes])
        # Chance of acceptance at each depth after that at the depth before, at each shift of its log-odds.
        before_SD = np.concatenate([np.ones((len(self.sizes), 1)), reached_SD[:, :-1]], axis=1)
        given_SD = np.clip(np.divide(reached_SD, before_SD, where=before_SD > 0, out=np.zeros_like(reached_SD)),
                           0.005, 0.995)
        there_SD = np.arange(topology.depth) < np.array(self.depths_S)[:, None]
        chances_SDX = 1 / (1 + np.exp(-(np.log(given_SD / (1 - given_SD))[..., None] + SHIFTS_X)))
        self.lengths_SX: Floats = 1 + (chances_SDX * there_SD[..., None]).cumprod(1).sum(1)
        # Log-likelihood of K accepted tokens: all depths up to there, and the one after, if there is one, is not.
        up_SKX = np.pad(np.log(chances_SDX).cumsum(1), ((0, 0), (1, 0), (0, 0)))
        end_SKX = np.pad(np.log1p(-chances_SDX) * there_SD[..., None], ((0, 0), (0, 1), (0, 0)))
        self._likelihoods_SKX: Floats = up_SKX + end_SKX
        self._text_X: Floats = np.zeros(len(SHIFTS_X))  # Log-likelihood of what all rows have accepted
        self._rows: list[Floats] = []  # The same of each row
        self._ratios: dict[tuple[int, int], tuple[float, int]] = {}
        """By size and `_crowd` of rows: mean logarithm of seconds over those of the table, and passes it is over."""
        self._waited = dict.fromkeys(self.sizes, 0)  # Passes since each size was taken
        self._purse, self._passed = 0.0, 0  # Seconds that trials may cost; passes since the last one
        self.max_size = topology.size
        self.kept([])

    def joined(self, join: Callable[[Policy], Policy]) -> "PaidTree":
        """A policy whose trees are joined with those of a partner; without drafts the partner has none either."""
        found = PaidTree(self.topology, self.chances, self.table)
        found.policies |= {size: join(policy) for size, policy in self.policies.items() if size > 1}
        found.max_size = max(policy.max_size for policy in found.policies.values())
        return found

    def check(self, drafter: Proposer) -> None:
        for size in self.sizes[1:]:
            self.policies[size].check(drafter)

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        return self.policies[self.size].grow(drafter, state, roots_B)

    # While decoding ---------------------------------------------------------------------------------------------------

    def opened(self, row: int) -> None:
        self._rows[row : row + 1] = [np.zeros(len(SHIFTS_X))]

    def kept(self, order: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in order]
        if not order:
            # Rounds that are recorded make room for the largest one first.
            self.size = self.sizes[-1]

    def plan(self, rows: int) -> None:
        lengths_S = self._lengths(rows)
        known = [size for size in self.sizes if any(size == one for one, _ in self._ratios)]
        # Without seconds from before, each size is timed before a larger one is tried.
        last = len(self.sizes) if self.table is not None else min(len(self.sizes), len(known) + 1)
        seconds_S = np.array([self.seconds(size, rows) for size in self.sizes[:last]])
        rates_S = lengths_S[:last] / seconds_S
        best = int(rates_S.argmax())
        self.size, self._passed = self.sizes[best], self._passed + 1
        if self._passed > APART:
            losses_S = np.maximum(0, seconds_S - lengths_S[:last] / rates_S[best])
            others = [place for place in range(last) if losses_S[place] <= self._purse
                      and self._waited[self.sizes[place]] >= APART]
            if others:
                trial = max(others, key=lambda place: self._waited[self.sizes[place]])
                self.size, self._passed, self._purse = self.sizes[trial], 0, self._purse - float(losses_S[trial])
        self._waited = {size: 0 if size == self.size else passed + 1 for size, passed in self._waited.items()}

    def learn(self, size: int, counts: Sequence[int], seconds: float) -> None:
        place, rows = self.sizes.index(size), len(counts)
        # Seconds: one pass that another program holds up is no news.
        key, base = (size, _crowd(rows)), 1.0 if self.table is None else self.table(size, rows)
        found, surprise = np.log(max(seconds, 1e-9) / base), np.log(SLOWEST)
        mean, passes = self._ratios.get(key, (self._ratio(size, rows) if self._ratios else found, 0))
        passes = min(passes + 1, FOLLOWED)
        self._ratios[key] = mean + float(np.clip(found - mean, -surprise, surprise)) / passes, passes
        usual = self.seconds(size, rows)
        self._purse = min(self._purse + TRIAL_SHARE * usual, usual)
        if size == 1:
            return
        # Acceptance; what a partner's copies add to it counts as well.
        self._text_X *= KEPT_OF_TEXT
        for row, (held_X, count) in enumerate(zip(self._rows, counts, strict=False)):
            seen_X = self._likelihoods_SKX[place, min(count - 1, self.depths_S[place])]
            self._text_X += seen_X
            self._rows[row] = KEPT_OF_ROW * held_X + seen_X

    def seconds(self, size: int, rows: int) -> float:
        """Expected seconds of a step of so many nodes and rows."""
        base = 1.0 if self.table is None else self.table(size, rows)
        return base * float(np.exp(self._ratio(size, rows)))

    def _ratio(self, size: int, rows: int) -> float:
        """The logarithm of measured seconds over those of the table, of the most alike size and rows."""
        crowd, place = _crowd(rows), self.sizes.index(size)
        nearest = min(self._ratios, default=None, key=lambda one: (
            abs(one[1] - crowd), abs(self.sizes.index(one[0]) - place), one[0]))
        return 0.0 if nearest is None else self._ratios[nearest][0]

    def _lengths(self, rows: int) -> Floats:
        """Tokens that a pass over the rows is expected to emit with each size, [S]."""
        text_X = np.exp(-0.5 * (SHIFTS_X / WIDE) ** 2)
        weights_X = _weights(np.log((1 - ELSE) * text_X / text_X.sum() + ELSE / len(SHIFTS_X)) + self._text_X)
        around_X = -0.5 * ((SHIFTS_X - weights_X @ SHIFTS_X) / NARROW) ** 2
        seen_RX = np.stack(self._rows[:rows]) if self._rows else np.zeros((rows, len(SHIFTS_X)))
        found_S: Floats = _weights(around_X + seen_RX).sum(0) @ self.lengths_SX.T
        return found_S


def _weights(logs: Floats) -> Floats:
    """Probabilities of unnormalised logarithms [..., X]."""
    found: Floats = np.exp(logs - logs.max(-1, keepdims=True))
    found /= found.sum(-1, keepdims=True)
    return found


def _crowd(rows: int) -> int:
    """Number of a range of rows for which measured seconds are alike."""
    return (rows - 1).bit_length()
