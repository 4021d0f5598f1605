"""Walk of a static tree along greedy text: which passes decoding makes, by the ranks of the text's own tokens.

A greedy pass accepts the longest path of the tree that the text takes, and the nodes off that path change nothing. So
only guesses after true tokens count, and these are what `RankedText` holds: a head's guess depends on no other guess,
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
    depths_P = torch.tensor(topology.depths)[last_nodes(text.ranks_PK, topology)]
    emitted: list[int] = torch.minimum(depths_P + 1, text.left_P)[pass_starts(text.left_P, depths_P)].tolist()
    return emitted


def pass_starts(left_P: Tensor, depths_P: Tensor) -> Tensor:
    """The places at which passes start, [S].

    Args:
        left_P: tokens of the answer after each place; 0 where no pass starts.
        depths_P: length of the path that a pass would accept there.
    """
    steps, found, place = torch.minimum(depths_P + 1, left_P).tolist(), [], 0
    # One by one: where a pass starts follows from what the one before has emitted.
    while place < len(steps):
        if steps[place]:
            found.append(place)
        place += max(1, steps[place])
    return torch.tensor(found, dtype=torch.long, device=left_P.device)


def last_nodes(ranks_PK: Tensor, topology: Topology) -> Tensor:
    """The deepest node whose path the text takes at each place, [P], int64; the root where it takes none."""
    steps = ranks_PK.shape[1]
    nodes_P = torch.zeros_like(ranks_PK[:, 0])
    taken = [torch.ones_like(nodes_P, dtype=torch.bool)]
    for node, (parent, rank, depth) in enumerate(zip(topology.parents, topology.ranks, topology.depths, strict=True)):
        if node:
            reached_P = taken[parent] & (ranks_PK[:, depth - 1] == rank) if depth <= steps else ~taken[0]
            taken.append(reached_P)
            # A node comes after its parent, and of two children of one node the text takes one.
            nodes_P = torch.where(reached_P, node, nodes_P)
    return nodes_P
