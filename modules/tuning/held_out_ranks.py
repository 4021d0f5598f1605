"""A drafter's proposals on held-out text: the ranks of the true tokens, and their chances under a sampling target.

Shapes: B rows, L positions, N indices with a label, K draft steps, P places where a draft starts, R proposals, Q draft
vocabulary, V target vocabulary, D hidden size, C values of a place and step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..features import Features
from ..interfaces.drafter import Drafter, Drafts
from ..target.model import Target

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


def rank_table(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> Tensor:
    """Rank of the true token among each step's proposals, [P, K], int64; `max_rank` means "not among the first".

    A place is counted when its first step has a label; where a later step has none, the rank is `max_rank`: such a
    guess is after the end of the answer. For an autoregressive drafter, step k of a place is its step at the k-th index
    after it: as long as the guesses before were right, it has read exactly this when it drafts.
    """
    return ranked_text(drafter, features, max_rank).ranks_PK


@torch.no_grad()
def ranked_text(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> RankedText:
    """The ranks of `rank_table`, and where passes may start.

    Args:
        drafter: bound to the target, on the features' device.
        features: encoded rows; packed or not.
        max_rank: stands for "not among the first".
    """
    def look(batch: Features, labelled: LabelledStep) -> Tensor:
        labels_N = batch.labels(labelled.offset)[0][labelled.valid_BL]
        found = [_ranks(proposed_NR, labels_N[chunk], max_rank)
                 for chunk, proposed_NR in _proposals(drafter, labelled, max_rank)]
        return torch.stack([torch.cat(found) if found else labels_N, _left_after_roots(batch, labelled)], dim=-1)

    table_PK2 = _table(drafter, features, look, torch.tensor([max_rank, 0]))
    return RankedText(ranks_PK=table_PK2[..., 0], left_P=table_PK2[:, 0, 1])


@dataclass(frozen=True, kw_only=True)
class DrawnText:
    """Proposals of a drafter along text that the target drew, at the places of `rank_table`, in the order of the text.

    The next place of an answer is the following entry.
    """

    chances_PKR: Tensor
    """Probability that the target draws each proposal, most probable first, given the text before it, float32. 0 where
    it would add no token to the pass: for an end token, which ends the answer, for the last token that an answer may
    have, and after the end."""
    drawn_PKR: Tensor
    """True for the proposal that is the text's own token, bool."""
    left_P: Tensor
    """Tokens of the answer after the last token before the draft, int64; 0 where that token is none of the answer's,
    so that no pass starts there."""


@dataclass(frozen=True, kw_only=True)
class ProposedText:
    """Proposals of a drafter along held-out answers, at the places of `rank_table`."""

    proposals_PKR: Tensor
    """Proposed tokens of each step, most probable first, int64; -1 where a step has no label."""
    rows_P: Tensor
    """Row of each place, counted over all features, int64."""
    roots_P: Tensor
    """Position in that row of the last token before the draft, int64."""
    left_P: Tensor
    """Tokens of the answer after it, int64; 0 where it is none of the answer's, so that no pass starts there."""


@torch.no_grad()
def proposed_text(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> ProposedText:
    """Proposals of a drafter along held-out answers, on the CPU.

    Args:
        drafter: bound to the target, on the features' device.
        features: encoded rows, not packed.
        max_rank: proposals of a step.
    """
    def look(batch: Features, labelled: LabelledStep) -> Tensor:
        rows_N, indices_N = labelled.valid_BL.nonzero(as_tuple=True)
        roots_N = indices_N + labelled.offset - 1
        left_N = torch.where(batch.supervised_BL[rows_N, roots_N], _left(batch)[rows_N, roots_N], 0)
        found = [proposed_NR for _, proposed_NR in _proposals(drafter, labelled, max_rank)]
        proposed_NR = torch.cat(found) if found else rows_N.new_zeros(0, max_rank)
        proposed_NR = functional.pad(proposed_NR, (0, max_rank - proposed_NR.shape[-1]), value=-1)
        return torch.cat([proposed_NR, torch.stack([rows_N, roots_N, left_N], dim=1)], dim=1)

    missing = torch.tensor([-1] * max_rank + [0] * 3)
    tables, before = [missing.expand(0, 1, -1)], 0
    for batch in features:
        table_PKC = _table(drafter, [batch], look, missing)
        table_PKC[:, 0, -3] += before
        before += len(batch.tokens_BL)
        tables.append(table_PKC)
    table_PKC = torch.cat(tables[1:] or tables)
    rows_P, roots_P, left_P = table_PKC[:, 0, -3:].unbind(-1)
    return ProposedText(proposals_PKR=table_PKC[..., :max_rank], rows_P=rows_P, roots_P=roots_P, left_P=left_P)


@torch.no_grad()
def drawn_text(drafter: Drafter, target: Target, features: Sequence[Features], temperature: float = 1.0,
               max_rank: int = MAX_RANK) -> DrawnText:
    """Proposals along answers that the target drew without filters.

    Args:
        drafter: bound to the target, on the features' device.
        target: the target that drew the answers and made the states in the features.
        features: encoded rows; packed or not.
        temperature: at which the answers were drawn, above 0.

    Raises:
        ValueError: if the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")

    def look(batch: Features, labelled: LabelledStep) -> Tensor:
        rows_N, indices_N = labelled.valid_BL.nonzero(as_tuple=True)
        labels_N, left_BL = batch.labels(labelled.offset)[0][labelled.valid_BL], _left(batch)
        ends = torch.tensor(target.eos_ids, dtype=torch.long, device=labels_N.device)
        full_N = (left_BL[rows_N, indices_N + labelled.offset] == 0) & ~torch.isin(labels_N, ends)
        # The target predicts a token from the state right before it, that of the root at the first step.
        roots_N = indices_N + labelled.offset - 1
        final_ND = batch.final()[rows_N, roots_N]
        first_N1 = _left_after_roots(batch, labelled)[:, None]
        found = [final_ND.new_zeros(0, 2 * max_rank + 1, dtype=torch.float32)]
        for chunk, proposed_NR in _proposals(drafter, labelled, max_rank):
            chances_NR = _chances(target, final_ND[chunk], proposed_NR, temperature)
            chances_NR[full_N[chunk][:, None] | torch.isin(proposed_NR, ends)] = 0.0
            drawn_NR = (proposed_NR == labels_N[chunk, None]).float()
            missing = (0, max_rank - proposed_NR.shape[-1])
            found.append(torch.cat([functional.pad(chances_NR, missing), functional.pad(drawn_NR, missing),
                                    first_N1[chunk].float()], dim=1))
        return torch.cat(found)

    table_PKC = _table(drafter, features, look, torch.zeros(2 * max_rank + 1))
    return DrawnText(chances_PKR=table_PKC[..., :max_rank], drawn_PKR=table_PKC[..., max_rank:-1].bool(),
                     left_P=table_PKC[:, 0, -1].long())


def _left_after_roots(batch: Features, labelled: LabelledStep) -> Tensor:
    """Tokens of the answer after the last token before each of N drafts; 0 where that is none of the answer's, [N]."""
    rows_N, indices_N = labelled.valid_BL.nonzero(as_tuple=True)
    roots_N = indices_N + labelled.offset - 1
    left_N = _left(batch)[rows_N, roots_N]
    return torch.where(batch.supervised_BL[rows_N, roots_N], left_N, 0)


def _left(batch: Features) -> Tensor:
    """Tokens of the same answer after each token, [B, L], int64."""
    following_BL = batch.labels(1)[1]
    left_BL = torch.zeros_like(batch.tokens_BL)
    for index in range(left_BL.shape[1] - 2, -1, -1):
        left_BL[:, index] = torch.where(following_BL[:, index], left_BL[:, index + 1] + 1, 0)
    return left_BL


def _table(drafter: Drafter, features: Sequence[Features], look: Callable[[Features, LabelledStep], Tensor],
           missing: Tensor) -> Tensor:
    """Values of `look` for each step at each place, [P, K, ...]; `missing` where a later step has no label."""
    tables = [(_of_steps if drafter.unrolls is None else _of_unrolled)(drafter, batch, look, missing).cpu()
              for batch in features]
    return torch.cat(tables) if tables else missing.expand(0, 1, *missing.shape)


def _of_steps(drafter: Drafter, batch: Features, look: Callable[[Features, LabelledStep], Tensor],
              missing: Tensor) -> Tensor:
    """Values of K draft steps, each trained as such."""
    drafts = drafter(batch)
    here_BL = batch.labels(drafts.offsets[0])[1]
    columns = [_seen(drafts, batch, step, look, missing)[here_BL] for step in range(len(drafts.offsets))]
    return torch.stack(columns, dim=1)


def _of_unrolled(drafter: Drafter, batch: Features, look: Callable[[Features, LabelledStep], Tensor],
                 missing: Tensor) -> Tensor:
    """Values of an autoregressive drafter's step at `UNROLLED` successive indices."""
    drafts, step = drafter(batch), drafter.unrolls or 0
    valid_BL, segments_BL = batch.labels(drafts.offsets[step])[1], batch.segments_BL
    seen_BL = _seen(drafts, batch, step, look, missing)
    length, order_L = segments_BL.shape[1], torch.arange(segments_BL.shape[1], device=segments_BL.device)
    columns = []
    for later in range(UNROLLED):
        there_L = (order_L + later).clamp(max=length - 1)
        same_BL = (segments_BL[:, there_L] == segments_BL) & (order_L + later < length)
        column_BL = seen_BL[:, there_L]
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


def _proposals(drafter: Drafter, labelled: LabelledStep, max_rank: int) -> Iterator[tuple[slice, Tensor]]:
    """Target ids of the most probable proposals, best first, [N, R], in chunks of places."""
    ids_Q = drafter.token_ids_Q
    for start in range(0, len(labelled.hidden_ND), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        logits_NQ = drafter.project(labelled.hidden_ND[chunk], labelled.step)
        indices_NR = logits_NQ.topk(min(max_rank, logits_NQ.shape[-1]), dim=-1).indices
        yield chunk, indices_NR if ids_Q is None else ids_Q[indices_NR]


def _ranks(proposed_NR: Tensor, labels_N: Tensor, max_rank: int) -> Tensor:
    """Rank of the label among the proposals, [N]; `max_rank` where it is not among them."""
    hits_NR = proposed_NR == labels_N[:, None]
    return torch.where(hits_NR.any(-1), hits_NR.long().argmax(-1), max_rank)


def _chances(target: Target, final_ND: Tensor, proposed_NR: Tensor, temperature: float) -> Tensor:
    """Probabilities of the proposals given the target's final states, [N, R], float32."""
    logits_NV = target.logits(final_ND.to(target.dtype)).to(torch.float32) / temperature
    return (logits_NV.gather(-1, proposed_NR) - logits_NV.logsumexp(-1, keepdim=True)).exp()
