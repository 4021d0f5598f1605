"""Walk of a static tree along greedy text: which passes decoding makes, by the ranks of the text's own tokens.

A greedy pass accepts the longest path of the tree that the text takes, and the nodes off that path change nothing. So
only guesses after true tokens count, and these are what `ranked_text` ranks: a head's guess depends on no other guess,
and an autoregressive drafter has read exactly the true tokens where its guess is accepted. The next pass starts after
the accepted tokens and the one that the target adds. For every family the counts equal those of a replay, which
tests/modules/tuning/test_rank_walk.py holds on to.

Shapes: P places where a draft starts, K draft steps.
"""

import torch
from torch import Tensor

from ..token_tree import Topology
from .held_out_ranks import RankedText


def walk(text: RankedText, topology: Topology) -> list[int]:
    """Tokens that each pass of greedy decoding emits, the target's own included, answer by answer.

    Args:
        text: greedy answers.
        topology: the tree; a node deeper than K steps is never accepted.
    """
    emitted_P = torch.minimum(accepted_depths(text.ranks_PK, topology) + 1, text.left_P).tolist()
    found, place = [], 0
    while place < len(emitted_P):
        if emitted_P[place]:
            found.append(emitted_P[place])
        place += max(1, emitted_P[place])
    return found


def accepted_depths(ranks_PK: Tensor, topology: Topology) -> Tensor:
    """Depth of the deepest node whose path the text takes at each place, [P], int64."""
    steps = ranks_PK.shape[1]
    depths_P = torch.zeros_like(ranks_PK[:, 0])
    taken = [torch.ones_like(depths_P, dtype=torch.bool)]
    for parent, rank, depth in list(zip(topology.parents, topology.ranks, topology.depths, strict=True))[1:]:
        reached_P = taken[parent] & (ranks_PK[:, depth - 1] == rank) if depth <= steps else torch.zeros_like(taken[0])
        taken.append(reached_P)
        depths_P = torch.where(reached_P, depths_P.clamp(min=depth), depths_P)
    return depths_P
