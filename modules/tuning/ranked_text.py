"""Ranks of an answer's own tokens among a drafter's proposals, and the passes of decoding that follow from them.

A greedy pass accepts the longest path of the tree that the text takes, and the nodes off that path change nothing. So
only guesses after true tokens count: a head's guess depends on no other guess, and an autoregressive drafter has read
exactly the true tokens where its guess is accepted. The next pass starts after the accepted tokens and the one that the
target adds. For every family the counts equal those of decoding, which tests/modules/tuning/test_ranked_text.py holds
on to.

Shapes: B rows, L positions, N indices with a label, K draft steps, P places where a draft starts, S of them where a
pass starts, R proposals, Q draft vocabulary, D hidden size, C values of a place and step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..features import Features
from ..interfaces.drafter import Drafter, Drafts
from ..token_tree import Topology

MAX_RANK = 10  # Number of proposals of one node that a tree may use
UNROLLED = 8  # Depth of the tree for a drafter that has no deepest step
_CHUNK = 512  # Number of positions for which logits are computed at once


@dataclass(frozen=True, kw_only=True)
class RankedText:
    """Answers by the places at which a draft may start, in the order of the text, on the CPU.

    A place is counted when its first step has a label; its step k is the drafter's at the k-th token after it. The next
    place of an answer is the following entry.
    """

    ranks_PK: Tensor
    """Rank of the text's own token among each step's proposals, int64; their largest number where it is none of them,
    or after the end of the answer."""
    labelled_PK: Tensor  # False after the end of the answer
    rows_P: Tensor  # Row of each place, counted over all features, int64
    roots_P: Tensor  # Position in that row of the last token before the draft, int64
    left_P: Tensor
    """Tokens of the answer after it, int64; 0 where it is none of the answer's, so that no pass starts there."""

    def depths(self, topology: Topology) -> Tensor:
        """Length of the path of a tree that the text takes at each place, [P], int64. A node deeper than K steps is
        never taken."""
        steps = self.ranks_PK.shape[1]
        depths_P = torch.zeros_like(self.left_P)
        taken = [torch.ones_like(depths_P, dtype=torch.bool)]
        for parent, rank, depth in list(zip(topology.parents, topology.ranks, topology.depths, strict=True))[1:]:
            taken.append(taken[parent] & (self.ranks_PK[:, depth - 1] == rank) if depth <= steps else ~taken[0])
            # A node comes after its parent, and of two children of one node the text takes one.
            depths_P = torch.where(taken[-1], depth, depths_P)
        return depths_P

    def walk(self, topology: Topology) -> tuple[Tensor, list[int]]:
        """(places at which the passes of greedy decoding with a static tree start [S], the tokens that each emits, the
        target's own included), answer by answer."""
        steps_P, starts, place = torch.minimum(self.depths(topology) + 1, self.left_P).tolist(), list[int](), 0
        # One by one: where a pass starts follows from what the one before has emitted.
        while place < len(steps_P):
            starts += [place] if steps_P[place] else []
            place += max(1, steps_P[place])
        return torch.tensor(starts, dtype=torch.long), [steps_P[start] for start in starts]


@torch.no_grad()
def ranked_text(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> RankedText:
    """Ranks of held-out text among a drafter's proposals.

    Args:
        drafter: bound to the target, on the features' device.
        features: encoded rows; packed or not.
        max_rank: proposals of a step that are looked at.
    """
    # Rank, label or none, row, root and tokens that are left; what has no label is no hit.
    missing = torch.tensor([max_rank, 0, 0, 0, 0])
    tables, count = [], 0
    for batch in features:
        table_PKC = _looked(drafter, batch, max_rank, missing).cpu()
        # Rows are counted over all batches.
        table_PKC[:, 0, 2] += count
        tables.append(table_PKC)
        count += len(batch.tokens_BL)
    table_PKC = torch.cat(tables) if tables else missing.expand(0, 1, -1)
    rows_P, roots_P, left_P = table_PKC[:, 0, 2:].unbind(-1)
    return RankedText(ranks_PK=table_PKC[..., 0], labelled_PK=table_PKC[..., 1].bool(), rows_P=rows_P, roots_P=roots_P,
                      left_P=left_P)


def _looked(drafter: Drafter, batch: Features, max_rank: int, missing: Tensor) -> Tensor:
    """Values of K draft steps at each place of a batch, [P, K, C]; `missing` where a later one has no label.

    The steps are those that were trained as such, or an autoregressive drafter's one at `UNROLLED` successive indices:
    as long as the guesses before were right, it has read exactly this when it drafts.
    """
    drafts = drafter(batch)
    if (step := drafter.unrolls) is None:
        here_BL = batch.labels(drafts.offsets[0])[1]
        return torch.stack([_seen(drafter, drafts, batch, each, max_rank, missing)[here_BL]
                            for each in range(len(drafts.offsets))], dim=1)
    valid_BL, segments_BL = batch.labels(drafts.offsets[step])[1], batch.segments_BL
    seen_BLC = _seen(drafter, drafts, batch, step, max_rank, missing)
    length, order_L = segments_BL.shape[1], torch.arange(segments_BL.shape[1], device=segments_BL.device)
    columns = []
    for later in range(UNROLLED):
        there_L = (order_L + later).clamp(max=length - 1)
        same_BL = (segments_BL[:, there_L] == segments_BL) & (order_L + later < length)
        column_BLC = seen_BLC[:, there_L]
        # The index after a conversation belongs to another one.
        column_BLC[~same_BL] = missing.to(column_BLC)
        columns.append(column_BLC[valid_BL])
    return torch.stack(columns, dim=1)


def _seen(drafter: Drafter, drafts: Drafts, batch: Features, step: int, max_rank: int, missing: Tensor) -> Tensor:
    """Values of one step at all indices, [B, L, C]."""
    offset, ids_Q = drafts.offsets[step], drafter.token_ids_Q
    labels_BL, valid_BL = batch.labels(offset)
    rows_N, indices_N = valid_BL.nonzero(as_tuple=True)
    roots_N, found = indices_N + offset - 1, []
    for hidden_MD, truths_M in zip(*(torch.split(values, _CHUNK) for values in (
            drafts.hidden_BLKD[:, :, step][valid_BL], labels_BL[valid_BL])), strict=True) if len(rows_N) else ():
        logits_MQ = drafter.project(hidden_MD, step)
        best = logits_MQ.topk(min(max_rank, logits_MQ.shape[-1]), dim=-1)
        ids_MR = best.indices if ids_Q is None else ids_Q[best.indices]
        # Tokens that are no candidates of a slot are no guesses.
        hits_MR = (ids_MR == truths_M[:, None]) & (best.values > -torch.inf)
        found.append(torch.where(hits_MR.any(-1), hits_MR.long().argmax(-1), max_rank))
    left_N = torch.where(batch.supervised_BL[rows_N, roots_N], _left(batch)[rows_N, roots_N], 0)
    ranks_N = torch.cat(found) if found else rows_N
    seen_BLC = missing.to(valid_BL.device).expand(*valid_BL.shape, -1).clone()
    seen_BLC[valid_BL] = torch.stack([ranks_N, torch.ones_like(ranks_N), rows_N, roots_N, left_N], dim=1)
    return seen_BLC


def _left(batch: Features) -> Tensor:
    """Tokens of the same answer after each token, [B, L], int64."""
    following_BL = batch.labels(1)[1]
    length = following_BL.shape[1]
    order_L = torch.arange(length, device=following_BL.device)
    # The next token that none of its answer follows; the last of a row is one.
    ends_BL = torch.where(following_BL, length - 1, order_L).flip(1).cummin(1).values.flip(1)
    return ends_BL - order_L
