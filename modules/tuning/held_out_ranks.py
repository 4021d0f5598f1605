"""What a drafter proposes on held-out text: the ranks of the true tokens, and the chances under a sampling target.

Shapes: B rows, L positions, N indices with a label, K draft steps, P places where a draft starts, R proposals, Q draft
vocabulary, V target vocabulary, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..features import Features
from ..interfaces.drafter import Drafter, Drafts
from ..target.model import Target

MAX_RANK = 10
"""Proposals of one node that a tree may use."""
UNROLLED = 8
"""Depths of a tree that is fitted to a drafter which can draft as deep as anyone likes."""
_CHUNK = 512
"""Positions whose logits are formed at once."""


class Asked(NamedTuple):
    """One draft step at all N indices of a batch where it has a label."""

    hidden_ND: Tensor
    step: int
    offset: int
    valid_BL: Tensor


@torch.no_grad()
def rank_table(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> Tensor:
    """Rank of the true token among each step's proposals, [P, K], int64; `max_rank` stands for "not among the first".

    A place is counted when its first step has a label; where a later step has none, the rank is `max_rank`: such a
    guess falls behind the end of the answer. A drafter that asks itself again answers step k of a place at the k-th
    index behind it: while the guesses before were right, that is what it has read when it drafts.
    """
    def ranks(batch: Features, asked: Asked) -> Tensor:
        labels_N = batch.labels(asked.offset)[0][asked.valid_BL]
        found = [_ranks(proposed_NR, labels_N[chunk], max_rank)
                 for chunk, proposed_NR in _proposals(drafter, asked, max_rank)]
        return torch.cat(found) if found else labels_N

    return _table(drafter, features, ranks, torch.tensor(max_rank))


@torch.no_grad()
def chance_table(drafter: Drafter, target: Target, features: Sequence[Features], temperature: float = 1.0,
                 max_rank: int = MAX_RANK) -> Tensor:
    """Probability of each step's proposals, likeliest first, under a target that samples: [P, K, R], float32.

    It is taken along the held-out text, at the places of `rank_table`; 0 behind the end of an answer. The product of
    several steps at one place is an estimate: the target may have said other tokens in between.

    Args:
        target: whose states the features hold.
        temperature: above 0.

    Raises:
        ValueError: if it is not.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")

    def chances(batch: Features, asked: Asked) -> Tensor:
        rows_N, indices_N = asked.valid_BL.nonzero(as_tuple=True)
        # The state that the target decides a token by stands right before it.
        final_ND = batch.final()[rows_N, indices_N + asked.offset - 1]
        found = [_chances(target, final_ND[chunk], proposed_NR, temperature, max_rank)
                 for chunk, proposed_NR in _proposals(drafter, asked, max_rank)]
        return torch.cat(found) if found else final_ND.new_zeros(0, max_rank, dtype=torch.float32)

    return _table(drafter, features, chances, torch.zeros(max_rank))


def _table(drafter: Drafter, features: Sequence[Features], look: Callable[[Features, Asked], Tensor],
           missing: Tensor) -> Tensor:
    """What `look` finds of each step at each place, [P, K, ...]; `missing` where a later step has no label."""
    tables = [(_of_steps if drafter.unrolls is None else _of_unrolled)(drafter, batch, look, missing).cpu()
              for batch in features]
    return torch.cat(tables) if tables else missing.expand(0, 1, *missing.shape)


def _of_steps(drafter: Drafter, batch: Features, look: Callable[[Features, Asked], Tensor], missing: Tensor) -> Tensor:
    """K draft steps that were trained as such."""
    drafts = drafter(batch)
    here_BL = batch.labels(drafts.offsets[0])[1]
    columns = [_seen(drafts, batch, step, look, missing)[here_BL] for step in range(len(drafts.offsets))]
    return torch.stack(columns, dim=1)


def _of_unrolled(drafter: Drafter, batch: Features, look: Callable[[Features, Asked], Tensor],
                 missing: Tensor) -> Tensor:
    """One step at `UNROLLED` successive indices."""
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


def _seen(drafts: Drafts, batch: Features, step: int, look: Callable[[Features, Asked], Tensor],
          missing: Tensor) -> Tensor:
    """What `look` finds of a step at all indices, [B, L, ...]."""
    offset, valid_BL = drafts.offsets[step], batch.labels(drafts.offsets[step])[1]
    seen_BL = missing.to(valid_BL.device).expand(*valid_BL.shape, *missing.shape).clone()
    seen_BL[valid_BL] = look(batch, Asked(drafts.hidden_BLKD[:, :, step][valid_BL], step, offset, valid_BL))
    return seen_BL


def _proposals(drafter: Drafter, asked: Asked, max_rank: int) -> Iterator[tuple[slice, Tensor]]:
    """The target ids of the likeliest proposals, best first, [N, R], some places at a time."""
    ids_Q = drafter.token_ids_Q
    for start in range(0, len(asked.hidden_ND), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        logits_NQ = drafter.project(asked.hidden_ND[chunk], asked.step)
        indices_NR = logits_NQ.topk(min(max_rank, logits_NQ.shape[-1]), dim=-1).indices
        yield chunk, indices_NR if ids_Q is None else ids_Q[indices_NR]


def _ranks(proposed_NR: Tensor, labels_N: Tensor, max_rank: int) -> Tensor:
    """Where among the proposals the label stands, [N]; `max_rank` where it does not."""
    hits_NR = proposed_NR == labels_N[:, None]
    return torch.where(hits_NR.any(-1), hits_NR.long().argmax(-1), max_rank)


def _chances(target: Target, final_ND: Tensor, proposed_NR: Tensor, temperature: float, max_rank: int) -> Tensor:
    """Probabilities of the proposals behind the target's final states, [N, R]; 0 where there are fewer than R."""
    logits_NV = target.logits(final_ND.to(target.dtype)).to(torch.float32) / temperature
    chances_NR = (logits_NV.gather(-1, proposed_NR) - logits_NV.logsumexp(-1, keepdim=True)).exp()
    return functional.pad(chances_NR, (0, max_rank - proposed_NR.shape[-1]))
