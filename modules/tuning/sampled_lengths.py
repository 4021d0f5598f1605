"""Accepted length of a static tree along text that the target drew at temperature 1.

A static tree is verified by equality (`verification/acceptance_rules.py`): a node is accepted where it holds what the
target drew. So text that was drawn without drafts is what decoding with any tree would have drawn, and where its passes
start follows from the text: the next one after the accepted path and the token that the target adds. A pass is more
often in a passage of which little is accepted, so a mean over all positions would promise too much.

What a pass accepts is counted by the target's probabilities, not by the one token that was drawn: a node whose parents
the text took adds its own probability. In expectation that is the number of accepted nodes, with less noise.

Shapes: P places where a draft starts, K draft steps, R proposals of a step.
"""

import torch

from ..token_tree import Topology
from .held_out_ranks import DrawnText
from .rank_walk import pass_starts

SIZING_TEMPERATURE = 1.0
"""Temperature of the held-out answers by which trees for sampled rows are sized. Rows at lower temperatures use the
same sizes, since more is accepted there; above it nothing is known."""


def expected_lengths(text: DrawnText, topology: Topology) -> tuple[float, ...]:
    """Expected tokens of a pass, the bonus included, for each prefix of a static tree; 1 for all without text.

    Args:
        text: of `drawn_text`.
        topology: the tree; a node deeper than K steps, or of a rank beyond R, is never accepted.
    """
    _, steps, ranks = text.chances_PKR.shape
    # The root is always on the text's path.
    taken_P = torch.ones_like(text.left_P, dtype=torch.bool)
    reached, gains_P = [taken_P], torch.zeros_like(text.chances_PKR[:, 0, 0])
    depths_P, expected = torch.zeros_like(text.left_P), [1.0]
    for parent, rank, depth in list(zip(topology.parents, topology.ranks, topology.depths, strict=True))[1:]:
        if depth > steps or rank >= ranks:
            reached.append(torch.zeros_like(taken_P))
        else:
            gains_P = gains_P + reached[parent] * text.chances_PKR[:, depth - 1, rank]
            reached.append(reached[parent] & text.drawn_PKR[:, depth - 1, rank])
            depths_P = torch.where(reached[-1], depth, depths_P)
        # With a larger tree passes accept more, and start elsewhere.
        starts_S = pass_starts(text.left_P, depths_P)
        expected.append(1.0 + (float(gains_P[starts_S].double().mean()) if len(starts_S) else 0.0))
    return tuple(expected)
