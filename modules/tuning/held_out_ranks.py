"""A drafter's proposals on held-out text, and the ranks of the true tokens among them.

Shapes: B rows, L positions, N indices with a label, K draft steps, P places where a draft starts, R proposals, Q draft
vocabulary, V target vocabulary, D hidden size, C values of a place and step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..features import Features
from ..interfaces.drafter import Drafter, Drafts

MAX_RANK = 10
"""Number of proposals of one node that a tree may use."""
UNROLLED = 8
"""Depth of the tree for a drafter that has no deepest step."""
_CHUNK = 512
"""Number of positions for which logits are computed at once."""


class LabelledStep(NamedTuple):
    """Hidden states of one draft step at the N indices of a batch that have a label."""

    hidden_ND: Tensor
    step: int
    offset: int
    valid_BL: Tensor


@dataclass(frozen=True, kw_only=True)
class RankedText:
    """Ranks of the true tokens along text, by the places at which a draft may start, in the order of the text.

    The next place of an answer is the following entry.
    """

    ranks_PK: Tensor
    """Ranks of `rank_table`, int64."""
    left_P: Tensor
    """Tokens of the answer after the last token before the draft, int64; 0 where that token is none of the answer's,
    so that no pass starts there."""


@dataclass(frozen=True, kw_only=True)
class ProposedText:
    """Proposals of a drafter along held-out answers, at the places of `rank_table`, on the CPU."""

    proposals_PKR: Tensor
    """Proposed tokens of each step, most probable first, int64; -1 where a step has no label, or fewer proposals."""
    truths_PK: Tensor
    """The text's own token at each step, int64; -2 where a step has no label."""
    rows_P: Tensor
    """Row of each place, counted over all features, int64."""
    roots_P: Tensor
    """Position in that row of the last token before the draft, int64."""
    left_P: Tensor
    """Tokens of the answer after it, int64; 0 where it is none of the answer's, so that no pass starts there."""

    @property
    def ranked(self) -> RankedText:
        """The ranks of the true tokens among the proposals."""
        hits_PKR = self.proposals_PKR == self.truths_PK[..., None]
        ranks_PK = torch.where(hits_PKR.any(-1), hits_PKR.long().argmax(-1), hits_PKR.shape[-1])
        return RankedText(ranks_PK=ranks_PK, left_P=self.left_P)


def rank_table(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> Tensor:
    """Rank of the true token among each step's proposals, [P, K], int64; `max_rank` means "not among the first".

    A place is counted when its first step has a label; where a later step has none, the rank is `max_rank`: such a
    guess is after the end of the answer. For an autoregressive drafter, step k of a place is its step at the k-th index
    after it: as long as the guesses before were right, it has read exactly this when it drafts.
    """
    return proposed_text(drafter, features, max_rank).ranked.ranks_PK


@torch.no_grad()
def proposed_text(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> ProposedText:
    """Proposals of a drafter along held-out text.

    Args:
        drafter: bound to the target, on the features' device.
        features: encoded rows; packed or not.
        max_rank: proposals of a step.
    """
    def look(batch: Features, labelled: LabelledStep) -> Tensor:
        rows_N, indices_N = labelled.valid_BL.nonzero(as_tuple=True)
        roots_N = indices_N + labelled.offset - 1
        left_N = torch.where(batch.supervised_BL[rows_N, roots_N], _left(batch)[rows_N, roots_N], 0)
        truths_N = batch.labels(labelled.offset)[0][labelled.valid_BL]
        found, ids_Q = [], drafter.token_ids_Q
        for hidden_ND in torch.split(labelled.hidden_ND, _CHUNK) if len(rows_N) else ():
            logits_NQ = drafter.project(hidden_ND, labelled.step)
            best = logits_NQ.topk(min(max_rank, logits_NQ.shape[-1]), dim=-1)
            ids_NR = best.indices if ids_Q is None else ids_Q[best.indices]
            # Tokens that are no candidates of a slot are no guesses.
            found.append(ids_NR.masked_fill(best.values == -torch.inf, -1))
        proposed_NR = torch.cat(found) if found else rows_N.new_zeros(0, max_rank)
        proposed_NR = functional.pad(proposed_NR, (0, max_rank - proposed_NR.shape[-1]), value=-1)
        return torch.cat([proposed_NR, torch.stack([truths_N, rows_N, roots_N, left_N], dim=1)], dim=1)

    # Of different values for proposals and truths, so that what is missing never counts as a hit.
    missing = torch.tensor([*[-1] * max_rank, -2, 0, 0, 0])
    tables, count = [], 0
    for batch in features:
        table_PKC = _looked(drafter, batch, look, missing).cpu()
        # Rows are counted over all batches.
        table_PKC[:, 0, -3] += count
        tables.append(table_PKC)
        count += len(batch.tokens_BL)
    table_PKC = torch.cat(tables) if tables else missing.expand(0, 1, -1)
    rows_P, roots_P, left_P = table_PKC[:, 0, -3:].unbind(-1)
    return ProposedText(proposals_PKR=table_PKC[..., :max_rank], truths_PK=table_PKC[..., max_rank], rows_P=rows_P,
                        roots_P=roots_P, left_P=left_P)


def _left(batch: Features) -> Tensor:
    """Tokens of the same answer after each token, [B, L], int64."""
    following_BL = batch.labels(1)[1]
    length = following_BL.shape[1]
    order_L = torch.arange(length, device=following_BL.device)
    # The next token that none of its answer follows; the last of a row is one.
    ends_BL = torch.where(following_BL, length - 1, order_L).flip(1).cummin(1).values.flip(1)
    return ends_BL - order_L


def _looked(drafter: Drafter, batch: Features, look: Callable[[Features, LabelledStep], Tensor],
            missing: Tensor) -> Tensor:
    """Values of `look` for K draft steps at each place of a batch, [P, K, C]; `missing` where a later one has no label.

    The steps are those that were trained as such, or an autoregressive drafter's one at `UNROLLED` successive indices.
    """
    drafts = drafter(batch)
    if (step := drafter.unrolls) is None:
        here_BL = batch.labels(drafts.offsets[0])[1]
        return torch.stack([_seen(drafts, batch, each, look, missing)[here_BL] for each in range(len(drafts.offsets))],
                           dim=1)
    valid_BL, segments_BL = batch.labels(drafts.offsets[step])[1], batch.segments_BL
    seen_BL = _seen(drafts, batch, step, look, missing)
    length, order_L = segments_BL.shape[1], torch.arange(segments_BL.shape[1], device=segments_BL.device)
    columns = []
    for later in range(UNROLLED):
        there_L = (order_L + later).clamp(max=length - 1)
        same_BL = (segments_BL[:, there_L] == segments_BL) & (order_L + later < length)
        column_BL = seen_BL[:, there_L]
        # The index after a conversation belongs to another one.
        column_BL[~same_BL] = missing.to(column_BL)
        columns.append(column_BL[valid_BL])
    return torch.stack(columns, dim=1)


def _seen(drafts: Drafts, batch: Features, step: int, look: Callable[[Features, LabelledStep], Tensor],
          missing: Tensor) -> Tensor:
    """Values of `look` for a step at all indices, [B, L, ...]."""
    offset, valid_BL = drafts.offsets[step], batch.labels(drafts.offsets[step])[1]
    seen_BL = missing.to(valid_BL.device).expand(*valid_BL.shape, *missing.shape).clone()
    seen_BL[valid_BL] = look(batch, LabelledStep(drafts.hidden_BLKD[:, :, step][valid_BL], step, offset, valid_BL))
    return seen_BL
