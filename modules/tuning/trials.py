"""Ways of drafting that are tried on held-out answers: their tokens of a pass by decoding, their speed-up by measured
seconds.

A stored answer is decoded with passes that are read from it (`replayed_answers`), with a static tree alone by the ranks
of its tokens (`ranked_text`). So the lengths are those of real decoding, greedy or drawn, without the target. Half of
the answers choose, and the other half reports, since the best of many looks better on the answers that chose it.

Shapes: A answers, R draws."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from ..baselines.registry import COPIED, JOINED, PolicyName, joined_drafter, joined_policy, parse_joined
from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings, Generation
from ..features import Features
from ..interfaces.drafter import Drafter
from ..policies.registry import MOST, SPARSE, STATIC, parse_policy, policy_named
from ..policies.trees import StaticTree
from ..target.model import Target
from ..token_tree import TokenTree, Topology
from ..verification.acceptance_rules import Accepted
from .replayed_answers import Replay
from .step_timing import CostTable
from .tree_search import ranked_text

SIZES = (2, 4, 8, 16, 32)  # Nodes of the static trees that are tried
MOST_ANSWERS, ROWS, MOST_SECONDS = 32, 8, 5.0
"""Most answers that a way of drafting decodes, how many at once, and most seconds unless the first ROWS take more."""
SIZING_TEMPERATURE = 1.0  # Of the drawn answers that choose drafts for sampled rows; at lower ones more is accepted
MOST_BEYOND = 2  # Multiple of the most nodes that were timed up to which the last slope of their seconds is trusted
SURE_LENGTH = 1.2  # Tokens of a pass from which a draft stays in use where other programs disturbed the timing
DRAWS = 1000  # Draws of the bootstrap
Drawn = NDArray[np.intp]


def interval(count: int, figure: Callable[[Drawn], NDArray[np.float64]], share: float,
             seed: int = 0) -> tuple[float, float] | None:
    """The interval that holds the middle `share` of a figure by a bootstrap: how much it would vary with other answers
    of the same kind (the percentile method; Efron and Tibshirani 1993, chapter 13). None with fewer than two answers.
    `figure` maps the indices of the answers in each draw, [R, A], to the figure of each draw, [R]."""
    if count < 2:
        return None
    low, high = np.percentile(figure(draws(count, seed)), [50 * (1 - share), 50 * (1 + share)])
    return float(low), float(high)


@cache
def draws(count: int, seed: int) -> Drawn:
    """`DRAWS` draws of `count` indices from 0 to count - 1, with replacement, [R, A]."""
    return np.random.default_rng([seed % 2**63, count]).integers(count, size=(DRAWS, count))


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Figures of decoding some answers."""

    accepted_length: float  # Tokens of a pass after that over the prompt, the bonus included
    nodes: float  # Mean nodes of a pass with one row, the root included
    interval: tuple[float, float] | None = None  # Of that length, 90 %, by a bootstrap over two answers or more

    def __post_init__(self) -> None:
        if not 1 <= self.accepted_length <= MOST or not 1 <= self.nodes <= 2 * MOST:
            raise ValueError(f"accepted_length and nodes of a trial must lie between 1 and {MOST}, got "
                             f"{self.accepted_length:g} and {self.nodes:g}")

    @classmethod
    def of(cls, emitted: Sequence[Sequence[int]], nodes: float) -> "Counted":
        """The figures of the passes of some answers, each with the tokens that it emitted."""
        sums_A2 = np.array([(sum(one), len(one)) for one in emitted if one]).reshape(-1, 2)
        if not len(sums_A2):
            return cls(accepted_length=1.0, nodes=nodes)

        def length(drawn_RA: Drawn) -> NDArray[np.float64]:
            sums_R2 = sums_A2[drawn_RA].sum(1)
            return np.asarray(sums_R2[:, 0] / sums_R2[:, 1])

        return cls(accepted_length=float(length(np.arange(len(sums_A2))[None])[0]), nodes=nodes,
                   interval=interval(len(sums_A2), length, 0.9))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way of drafting."""

    policy: str  # With the nodes of the draft's tree and the tokens copied: static-8, static-8+lookup-7, sparse-16
    chosen: Counted  # On the answers by which it is compared with others
    reported: Counted | None = None  # On answers that chose nothing; None where there were too few
    virtual: int = 0  # Virtual nodes after each node of a timed tree, where the policy's number counts them too

    def __post_init__(self) -> None:
        if parse_policy(self.name.own)[1] is None or (self.copied == 0) != (self.name.partner is None):
            raise ValueError(f"the policy of a trial must name its nodes, got {self.policy!r}")

    @property
    def name(self) -> PolicyName:
        """The parts of the name."""
        return parse_joined(self.policy)

    @property
    def kind(self) -> str:
        """The name without numbers."""
        return JOINED if self.copied else parse_policy(self.name.own)[0]

    @property
    def nodes(self) -> int:
        """Nodes of the draft's own tree, the root included."""
        return int(parse_policy(self.name.own)[1] or 1)

    @property
    def copied(self) -> int:
        """Most tokens copied next to it."""
        return self.name.size or 0

    def speedup(self, cost: CostTable, batch: int = 1, found: Counted | None = None) -> float:
        """Speed-up over plain decoding of so many rows, by the answers that choose or by others."""
        found, parts = found or self.chosen, 1 + self.virtual
        # Of several rows one copies in most passes, so that each pass has all nodes.
        nodes = found.nodes if batch == 1 else float(self.nodes + self.copied)
        return cost.predict(found.accepted_length, nodes / parts, batch, drafted=self.nodes / parts,
                            copies=self.copied > 0)

    def judged(self, cost: CostTable, batch: int = 1) -> bool:
        """True where the seconds of its passes with so many rows are known, and not those of far smaller ones alone."""
        return (self.nodes + self.copied) / (1 + self.virtual) <= MOST_BEYOND * cost.curve(batch).sizes[-1]

    def pays(self, cost: CostTable, batch: int = 1) -> bool:
        """True if it is faster than plain decoding of the answers that choose. A busy machine switches off no draft
        that gains: it slows a pass of many tokens down far more than one of a single token."""
        return self.speedup(cost, batch) > 1 or (cost.contended and self.chosen.accepted_length >= SURE_LENGTH)


def trials(drafter: Drafter, target: Target, texts: Sequence[tuple[Sequence[Features], Topology]], cost: CostTable,
           sizes: Sequence[int], most: int) -> tuple[Trial, ...]:
    """Ways of drafting, tried on the `texts` that choose and on those that report, if there are any, each with a static
    tree. `sizes` are nodes of the trees to try, ascending; of an answer `most` tokens are decoded."""
    rows = [([cut(one, most) for one in features[:MOST_ANSWERS]], tree) for features, tree in texts if features]
    if not rows:
        return ()
    # A slow or busy machine tries all ways on fewer answers.
    started = time.monotonic()
    tried(drafter, target, rows[0][1], rows[0][0][:ROWS], [f"{STATIC}-{max(sizes, default=1)}+lookup-{COPIED}"])
    count = ROWS * max(1, int(MOST_SECONDS / max(1e-9, time.monotonic() - started)))
    rows = [(features[:count], tree) for features, tree in rows]
    virtual, found = drafter.virtual_nodes, [walked_sizes(drafter, features, tree, sizes) for features, tree in rows]
    alone = [Trial(policy=name, chosen=one) for name, one in found[0].items()]
    fastest = max(alone, key=lambda one: one.speedup(cost)).nodes if alone else 1
    # Copies make passes larger: next to them the fastest tree alone, the next smaller one and the root are tried.
    small = dict.fromkeys([*([1] if len(sizes) != 1 else []), *[size for size in sizes if size <= fastest][-2:]])
    names = [f"{STATIC}-{size}+lookup-{COPIED}" for size in small]
    # With virtual nodes: each size twice the one before, from a guess and those of the root on.
    chances_KR = drafter.rank_chances
    size = len(chances_KR or ()) + 2
    while chances_KR is not None and size <= max(sizes, default=1) * (1 + virtual):
        names.append(f"{SPARSE}-{size}")
        size *= 2
    for known, (features, tree) in zip(found, rows, strict=True):
        known |= tried(drafter, target, tree, features, names)
    reported = found[1] if len(found) > 1 else {}
    return tuple(Trial(policy=name, chosen=one, reported=reported.get(name),
                       virtual=virtual if name.startswith(SPARSE) else 0) for name, one in found[0].items())


def cut(batch: Features, most: int) -> Features:
    """Text whose answers end after so many tokens."""
    counts_BL = batch.supervised_BL.long().cumsum(1)
    before_BL = torch.where(batch.supervised_BL, 0, counts_BL).cummax(1).values
    return replace(batch, supervised_BL=batch.supervised_BL & (counts_BL - before_BL <= most), labels_at_most=None)


def walked_sizes(drafter: Drafter, features: Sequence[Features], topology: Topology,
                 sizes: Sequence[int]) -> dict[str, Counted]:
    """Figures of decoding answers with prefixes of a static tree, by the ranks of their tokens (`ranked_text`)."""
    text, found = ranked_text(drafter, features), dict[str, Counted]()
    for size in sizes:
        of_row = defaultdict[int, list[int]](list)
        starts_S, emitted = text.walk(topology.prefix(min(size, topology.size)))
        for row, count in zip(text.rows_P[starts_S].tolist(), emitted, strict=True):
            of_row[row].append(count)
        found[f"{STATIC}-{size}"] = Counted.of(list(of_row.values()), float(size))
    return found


def tried(drafter: Drafter, target: Target, topology: Topology, features: Sequence[Features],
          names: Sequence[str]) -> dict[str, Counted]:
    """Decode stored answers with policies by name, whose trees are prefixes of a static one."""
    source, found = Replay(target, features, drafter=drafter), dict[str, Counted]()
    for name in names:
        parts, passes = parse_joined(name), list[tuple[int, int]]()

        def count(tree: TokenTree, _accepted: Accepted, generations: Sequence[Generation],
                  passes: list[tuple[int, int]] = passes) -> None:
            passes.append((int(tree.real_BN.sum()), len(generations)))

        kind, number = parse_policy(parts.own)
        own = (policy_named(parts.own, topology, drafter) if kind == SPARSE else
               StaticTree(topology.prefix(min(int(number or 1), topology.size))))
        generations = decode(
            source, source.requests, DecodeSettings(batch_size=ROWS), drafter=joined_drafter(parts, drafter, target),
            policy=joined_policy(parts, own, target), observer=count if parts.partner else None).generations
        nodes = sum(size for size, _ in passes) / sum(rows for _, rows in passes) if passes else float(number or 1)
        found[name] = Counted.of([one.emitted for one in generations], nodes)
    return found


