"""Accepted length of a static tree along text of the target, greedy or drawn at temperature 1, with its uncertainty.

A static tree is verified by equality (`verification/acceptance_rules.py`): a node is accepted where it holds what the
target drew. So text that was drawn without drafts is what decoding with any tree would have drawn, and where its passes
start follows from the text: the next one after the accepted path and the token that the target adds. A pass is more
often in a passage of which little is accepted, so a mean over all positions would promise too much.

What a pass accepts is counted by the target's probabilities, not by the one token that was drawn: a node whose parents
the text took adds its own probability, in expectation the number of accepted nodes. Answers that chose a tree or a
checkpoint accept more than others: predictions are counted on answers that chose nothing (`PredictedLengths`).

Shapes: P places where a draft starts, K draft steps, R proposals of a step, A answers, N sizes of the tree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..token_tree import Topology
from .held_out_ranks import DrawnText, ProposedText
from .rank_walk import pass_starts

SIZING_TEMPERATURE = 1.0
"""Temperature of the held-out answers by which trees for sampled rows are sized; at lower ones more is accepted."""
FEWEST_ANSWERS = 2
"""Fewest answers whose spread says anything."""


@dataclass(frozen=True, kw_only=True)
class PredictedLengths:
    """Tokens of a pass by the size of the tree, counted on held-out answers that chose nothing."""

    lengths: tuple[float, ...]
    """Tokens per pass for a tree of 1, 2, 3 ... nodes, the bonus included."""
    errors: tuple[float, ...]
    """Relative standard error of each, by leaving out one answer at a time."""
    degrees: tuple[float, ...]
    """Degrees of freedom of each error: fewer where few answers make up most of it."""
    answers: int
    """Number of answers."""
    prompt_tokens: float
    """Mean tokens of their prompts."""
    answer_tokens: float
    """Mean tokens of the answers."""

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.errors) or self.answers < FEWEST_ANSWERS or min(self.lengths, default=1.0) < 1:
            raise ValueError(f"predicted lengths need an error each, {FEWEST_ANSWERS} answers and at least 1 token a "
                             f"pass, got {len(self.lengths)} and {len(self.errors)} numbers of {self.answers} answers")


def expected_lengths(text: DrawnText, topology: Topology) -> tuple[float, ...]:
    """Expected tokens of a pass, the bonus included, for each prefix of a static tree; 1 for all without text.

    Args:
        text: of `drawn_text` or `sure_text`.
        topology: the tree; a node deeper than K steps, or of a rank beyond R, is never accepted.
    """
    emitted_AN, passes_AN = counted(text, topology)
    return tuple((emitted_AN.sum(0) / passes_AN.sum(0)).nan_to_num(1.0).tolist())


def counted(text: DrawnText, topology: Topology) -> tuple[Tensor, Tensor]:
    """(expected tokens, passes) of each row with each prefix of a static tree, [A, N], float64."""
    _, steps, ranks = text.chances_PKR.shape
    # The root is always on the text's path.
    taken_P = torch.ones_like(text.left_P, dtype=torch.bool)
    reached, gains_P = [taken_P], torch.zeros_like(text.chances_PKR[:, 0, 0])
    depths_P = torch.zeros_like(text.left_P)
    rows = int(text.rows_P.max()) + 1 if len(text.rows_P) else 0
    sums_AN2 = torch.zeros(rows, topology.size, 2, dtype=torch.float64)
    for node, (parent, rank, depth) in enumerate(zip(topology.parents, topology.ranks, topology.depths, strict=True)):
        if node and (depth > steps or rank >= ranks):
            reached.append(torch.zeros_like(taken_P))
        elif node:
            gains_P = gains_P + reached[parent] * text.chances_PKR[:, depth - 1, rank]
            reached.append(reached[parent] & text.drawn_PKR[:, depth - 1, rank])
            depths_P = torch.where(reached[-1], depth, depths_P)
        # With a larger tree passes accept more, and start elsewhere.
        starts_S = pass_starts(text.left_P, depths_P)
        emitted_S2 = torch.stack([1.0 + gains_P[starts_S].double(), torch.ones(len(starts_S), dtype=torch.float64)], 1)
        sums_AN2[:, node].index_add_(0, text.rows_P[starts_S], emitted_S2)
    return sums_AN2[..., 0], sums_AN2[..., 1]


def relative_errors(sums_AN: Tensor, counts_AN: Tensor) -> tuple[Tensor, Tensor]:
    """(relative standard errors of sums over counts, their degrees of freedom), both [N], of two answers or more.

    Each answer is left out once (jackknife; Efron and Tibshirani 1993, equation 11.5): one may hold most of the passes.
    With the found kurtosis k the degrees are 2 A / (k - 1) (Satterthwaite 1946): A if normal.
    """
    answers = len(sums_AN)
    ratios_AN = ((sums_AN.sum(0) - sums_AN) / (counts_AN.sum(0) - counts_AN)).log()
    squares_AN = (ratios_AN - ratios_AN.mean(0)) ** 2
    sums_N = squares_AN.sum(0)
    kurtosis_N = (answers * (squares_AN**2).sum(0) / sums_N**2).nan_to_num(1.0)
    return (sums_N * (answers - 1) / answers).sqrt(), (
        2 * answers / (kurtosis_N - 1).clamp(min=0)).clamp(1, answers - 1)


def predicted_lengths(text: ProposedText, chances: DrawnText, topology: Topology,
                      sizes: int) -> PredictedLengths | None:
    """Accepted lengths of a tree on answers that chose nothing; None of fewer than `FEWEST_ANSWERS`.

    Args:
        text: proposals along the answers.
        chances: of `sure_text` or `drawn_text` with them.
        topology: a tree that was searched on other answers.
        sizes: sizes to predict, from 1 on; the whole tree stands for those beyond it.
    """
    emitted_AN, passes_AN = counted(chances, topology)
    # An answer of one token has no pass after its prompt's, and rows of other parts have none at all.
    kept_A = passes_AN[:, 0] > 0
    emitted_AN, passes_AN = emitted_AN[kept_A], passes_AN[kept_A]
    if len(emitted_AN) < FEWEST_ANSWERS:
        return None
    more = max(0, sizes - topology.size)
    lengths, errors, degrees = (tuple([*one_N.tolist(), *one_N[-1:].tolist() * more][:sizes]) for one_N in (
        emitted_AN.sum(0) / passes_AN.sum(0), *relative_errors(emitted_AN, passes_AN)))
    # Every first token of an answer comes from the pass over its prompt.
    after_P = text.left_P > 0
    firsts = [int((after_P & (text.rows_P == row)).int().argmax()) for row in set(text.rows_P[after_P].tolist())]
    return PredictedLengths(
        lengths=lengths, errors=errors, degrees=degrees, answers=len(emitted_AN),
        prompt_tokens=float(text.roots_P[firsts].double().mean()),
        answer_tokens=1 + float(text.left_P[firsts].double().mean()))
