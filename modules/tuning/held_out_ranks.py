"""A drafter's proposals on held-out text: the ranks of the true tokens, and their chances under a sampling target.

Shapes: B rows, L positions, N indices with a label, K draft steps, P places where a draft starts, R proposals, Q draft
vocabulary, V target vocabulary, D hidden size, C values of a place and step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    texts: tuple[Tensor, ...]
    """Tokens of each row, without its padding."""

    def part(self, rows: Sequence[int], most: int | None = None) -> "ProposedText":
        """The places of some rows alone, which keep their numbers; of each, up to the `most`-th token of its answer."""
        left_P, after_P = self.left_P.clone(), self.left_P > 0
        if most is not None:
            for row in set(self.rows_P[after_P].tolist()):
                mine_P = after_P & (self.rows_P == row)
                # The answer's first token comes from the pass over the prompt.
                last = int(self.roots_P[mine_P][0]) + most - 1
                left_P[mine_P] = torch.minimum(left_P[mine_P], (last - self.roots_P[mine_P]).clamp(min=0))
        chosen_P = torch.isin(self.rows_P, torch.tensor(rows, dtype=torch.long))
        kept = {name: getattr(self, name)[chosen_P] for name in ("proposals_PKR", "truths_PK", "rows_P", "roots_P")}
        return replace(self, **kept, left_P=left_P[chosen_P])

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
    tables, texts = [], list[Tensor]()
    for batch in features:
        table_PKC = _looked(drafter, batch, look, missing).cpu()
        # Rows are counted over all batches.
        table_PKC[:, 0, -3] += len(texts)
        tables.append(table_PKC)
        lengths = (batch.segments_BL >= 0).sum(1).tolist()
        texts += [tokens_L[:length].cpu() for tokens_L, length in zip(batch.tokens_BL, lengths, strict=True)]
    table_PKC = torch.cat(tables) if tables else missing.expand(0, 1, -1)
    rows_P, roots_P, left_P = table_PKC[:, 0, -3:].unbind(-1)
    return ProposedText(proposals_PKR=table_PKC[..., :max_rank], truths_PK=table_PKC[..., max_rank], rows_P=rows_P,
                        roots_P=roots_P, left_P=left_P, texts=tuple(texts))


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
    rows_P: Tensor
    """Row of each place, counted over all features, int64."""


@torch.no_grad()
def drawn_text(text: ProposedText, target: Target, features: Sequence[Features], temperature: float = 1.0) -> DrawnText:
    """The chances of proposals along answers that the target drew without filters.

    Args:
        text: of `proposed_text` with these features.
        target: the target that drew the answers and made the states in the features.
        features: encoded rows; packed or not.
        temperature: at which the answers were drawn, above 0.

    Raises:
        ValueError: if the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    chances_PKR = torch.zeros(text.proposals_PKR.shape)
    number = 0
    for batch in features:
        left_BL = _left(batch).cpu()
        for left_L, final_LD in zip(left_BL, batch.final(), strict=True):
            places_N = (text.rows_P == number).nonzero()[:, 0]
            if len(places_N):
                chances_PKR[places_N] = _chances_of_row(text, places_N, target, final_LD, left_L, temperature)
            number += 1
    return DrawnText(chances_PKR=chances_PKR, drawn_PKR=text.proposals_PKR == text.truths_PK[..., None],
                     left_P=text.left_P, rows_P=text.rows_P)


def sure_text(text: ProposedText) -> DrawnText:
    """The chances of proposals along greedy answers: 1 for the text's own tokens, 0 for all others, and where a guess
    adds no token to its pass, as in `drawn_text`."""
    hits_PKR = text.proposals_PKR == text.truths_PK[..., None]
    last_PK = text.left_P[:, None] <= 1 + torch.arange(hits_PKR.shape[1])
    return DrawnText(chances_PKR=(hits_PKR & ~last_PK[..., None]).float(), drawn_PKR=hits_PKR, left_P=text.left_P,
                     rows_P=text.rows_P)


def _chances_of_row(text: ProposedText, places_N: Tensor, target: Target, final_LD: Tensor, left_L: Tensor,
                    temperature: float) -> Tensor:
    """The chances of all proposals at the places of one row, [N, K, R].

    The target predicts a token from the state right before it, that of the root at the first step; its logits there are
    computed once for all steps.
    """
    proposals_NKR, truths_NK = text.proposals_PKR[places_N], text.truths_PK[places_N]
    before_NK = text.roots_P[places_N, None] + torch.arange(truths_NK.shape[1])
    ends = torch.tensor(target.eos_ids, dtype=torch.long)
    last_NK = left_L[(before_NK + 1).clamp(max=len(left_L) - 1)] == 0
    added_NKR = (proposals_NKR >= 0) & ~torch.isin(proposals_NKR, ends)
    added_NKR &= ((truths_NK >= 0) & ~(last_NK & ~torch.isin(truths_NK, ends)))[..., None]
    chances_NKR = torch.zeros(proposals_NKR.shape)
    first, stop = int(before_NK[:, 0].min()), int(before_NK[truths_NK >= 0].max()) + 1
    # In chunks: logits of a whole row of a large vocabulary would take gigabytes.
    for low in range(first, stop, _CHUNK):
        here_NK = (truths_NK >= 0) & (before_NK >= low) & (before_NK < low + _CHUNK)
        logits_CV = target.logits(final_LD[low : min(stop, low + _CHUNK)].to(target.dtype)).float() / temperature
        sums_C, places_M = logits_CV.logsumexp(-1), (before_NK[here_NK] - low).to(logits_CV.device)
        wanted_MR = proposals_NKR[here_NK].clamp(min=0).to(logits_CV.device)
        chances_NKR[here_NK] = (logits_CV[places_M[:, None], wanted_MR] - sums_C[places_M, None]).exp().cpu()
    return torch.where(added_NKR, chances_NKR, 0.0)


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
