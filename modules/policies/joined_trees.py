"""Two trees below the same roots as one: every path of both, no path twice, and sampled nodes that stay sampled.

Shapes: B rows, N nodes of a tree, M nodes of the tree that joins it, S = N + M nodes of both, I distributions that the
joining tree was drawn from, Q entries of the draft vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..token_tree import Drawn, Lookahead, TokenTree


def joined(tree: TokenTree, joining: TokenTree) -> TokenTree:
    """All paths of both trees, the second one's new nodes after the first one's; duplicates become padding.

    Args:
        tree: point masses.
        joining: its nodes may be sampled.

    Raises:
        ValueError: if either has virtual nodes, which belong to one drafter's layout of the pass, or the first one
            has sampled nodes.
    """
    if tree.virtual is not None or joining.virtual is not None:
        raise ValueError("trees with virtual nodes cannot be joined")
    if tree.drawn is not None:
        raise ValueError("sampled nodes may stand in the joining tree only: what comes first is a point mass")
    equal_BMN = joining.equal_paths(tree)
    known_BM = equal_BMN.any(-1)
    own_M = torch.arange(joining.size, device=known_BM.device) + tree.size
    places_BM = torch.where(known_BM, equal_BMN.long().argmax(-1), own_M)
    parents_BM = places_BM.gather(1, joining.parents_BN.clamp(min=0))
    parts_BS = None
    if tree.parts_BN is not None and joining.parts_BN is not None:
        parts_BS = torch.cat([tree.parts_BN, joining.parts_BN], dim=1)
    counted = tree.most_children is not None and joining.most_children is not None
    # Ancestors: the tree's own, and the joining one's at the places of their paths.
    size = tree.size + joining.size
    there_BMS = places_BM[..., None] == torch.arange(size, device=places_BM.device)
    new_BMS = (joining.ancestors_BNN.float() @ there_BMS.float()) > 0
    # A path that is already known has its nodes elsewhere; its padding here sees itself, as every node does.
    new_BMS[:, torch.arange(joining.size, device=own_M.device), own_M] = True
    return TokenTree(
        tokens_BN=torch.cat([tree.tokens_BN, joining.tokens_BN], dim=1),
        parents_BN=torch.cat([tree.parents_BN, parents_BM], dim=1),
        depths_BN=torch.cat([tree.depths_BN, joining.depths_BN], dim=1),
        ancestors_BNN=torch.cat([pad(tree.ancestors_BNN, (0, joining.size)), new_BMS], dim=1),
        real_BN=torch.cat([tree.real_BN, joining.real_BN & ~known_BM], dim=1),
        max_depth=max(tree.max_depth, joining.max_depth),
        drawn=None if joining.drawn is None else _drawn(tree, joining.drawn, equal_BMN),
        most_children=(tree.most_children or 0) + (joining.most_children or 0) if counted else None,
        lookahead=_lookahead(tree, joining, equal_BMN),
        parts_BN=parts_BS,
    )


def _lookahead(tree: TokenTree, joining: TokenTree, equal_BMN: Tensor) -> Lookahead | None:
    """The virtual nodes that either tree wants after its nodes: a tree that says nothing wants none next to one that
    does. None where both leave their number to the drafter."""
    wishes = [wish for wish in (tree.lookahead, joining.lookahead) if wish is not None]
    if not wishes:
        return None
    first_BN = torch.zeros_like(tree.tokens_BN) if tree.lookahead is None else tree.lookahead.counts_BN
    second_BM = torch.zeros_like(joining.tokens_BN) if joining.lookahead is None else joining.lookahead.counts_BN
    shared_BN = second_BM.gather(1, equal_BMN.long().argmax(1)) * equal_BMN.any(1)
    return Lookahead(
        counts_BN=torch.cat([torch.maximum(first_BN, shared_BN), second_BM * ~equal_BMN.any(-1)], dim=1),
        most=sum(wish.most for wish in wishes), nodes=sum(wish.nodes for wish in wishes))


def _drawn(tree: TokenTree, drawn: Drawn, equal_BMN: Tensor) -> Drawn:
    """Draws of the joined tree.

    A node that both trees have is a point mass, which comes before the sampled children of its parent. What is left of
    those was drawn from q without the point masses: leaving tokens out of draws without replacement leaves draws from
    the rest, in the same order. So the nodes of the first tree get a q of their own, in which their children have no
    chance; the sampled children of the second tree's new nodes keep theirs.
    """
    merged_BN = equal_BMN.long().argmax(1)
    inner_BN = drawn.inner_BN.gather(1, merged_BN)
    without = _without_children(tree, drawn.at(merged_BN))
    first_BN = torch.arange(tree.size, device=inner_BN.device).expand_as(inner_BN) + drawn.log_q_BIQ.shape[1]
    candidates_BIQ = drawn.candidates_BIQ
    if candidates_BIQ is not None:
        candidates_BIQ = torch.cat([candidates_BIQ, _rows(candidates_BIQ, inner_BN)], dim=1)
    return replace(
        drawn,
        log_q_BIQ=torch.cat([drawn.log_q_BIQ, without], dim=1),
        inner_BN=torch.cat([first_BN, drawn.inner_BN], dim=1),
        sampled_BN=pad(drawn.sampled_BN, (tree.size, 0)),
        candidates_BIQ=candidates_BIQ,
    )


def _without_children(tree: TokenTree, drawn: Drawn) -> Tensor:
    """log q at each node of a tree with its children taken out, [B, N, Q]; nothing is renormalised."""
    log_q_BNQ = _rows(drawn.log_q_BIQ, drawn.inner_BN)
    device = log_q_BNQ.device
    rows_B, entries_Q = (torch.arange(size, device=device) for size in (len(log_q_BNQ), log_q_BNQ.shape[-1]))
    ids_Q = entries_Q if drawn.token_ids_Q is None else drawn.token_ids_Q
    for child in range(1, tree.size):
        parent_B = tree.parents_BN[:, child].clamp(min=0)
        ids_BQ = ids_Q[None]
        if drawn.candidates_BIQ is not None:
            ids_BQ = drawn.candidates_BIQ[rows_B, drawn.inner_BN[rows_B, parent_B]]
        taken_BQ = (ids_BQ == tree.tokens_BN[:, child, None]) & tree.real_BN[:, child, None]
        log_q_BNQ[rows_B, parent_B] = log_q_BNQ[rows_B, parent_B].masked_fill(taken_BQ, -torch.inf)
    return log_q_BNQ


def _rows(values_BIQ: Tensor, inner_BN: Tensor) -> Tensor:
    """The rows of values that the nodes name, [B, N, Q]."""
    return values_BIQ.gather(1, inner_BN[..., None].expand(-1, -1, values_BIQ.shape[-1]))
