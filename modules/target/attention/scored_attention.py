"""The form of a layer's attention, and attention by its scores where no fused kernel computes it: scores capped before
the softmax, as Gemma 2 has them, or joined by that of a sink, as gpt-oss has it.

Shapes: B rows, H query heads, G key-value heads, N queries, W keys, E width of a key, X width of a value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 256  # Most queries whose scores are in memory at once


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionForm:
    """Differences of one layer's attention from plain causal attention."""

    scaling: float | None = None  # Factor of the scores; None takes one over the root of the width of a key
    window: int | None = None  # Newest tokens that a token sees, itself included; None for all
    chunk: int | None = None  # Tokens of a chunk, inside which tokens see each other alone; None for one of all
    softcap: float | None = None  # Bound of the scores; None for none
    sinks_H: Tensor | None = None  # Score of one more key of each head, which every query sees, of value zero; or None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Bounds of the keys that a token sees: (window, chunk)."""
        return self.window, self.chunk

    def near(self, places_N: Tensor, others_W: Tensor) -> Tensor:
        """True where the window and the chunk of a query at a place [..., N] hold the place of a key, [..., N, W]."""
        queries, keys = places_N[..., :, None], others_W[..., None, :]
        near = queries - keys < (torch.iinfo(queries.dtype).max if self.window is None else self.window)
        return near if self.chunk is None else near & (queries // self.chunk == keys // self.chunk)


PLAIN = AttentionForm()


def attend_by_scores(
    query_BHNE: Tensor, key_BGWE: Tensor, value_BGWX: Tensor, mask: Tensor | None, form: AttentionForm
) -> Tensor:
    """Attention output [B, H, N, X] with capped scores (arXiv:2408.00118, section 2) and sinks (arXiv:2508.10925), by
    scores written out for `QUERIES` queries at a time. H is a multiple of G.

    The mask [..., N, W] is True, or above minus infinity, where a query sees a key, and holds the form's window and
    chunk too; None is causal attention of the last N of W."""
    rows, heads, queries, width = query_BHNE.shape
    groups, keys = key_BGWE.shape[1:3]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query_BHNE.device).tril(keys - queries)
    if queries > QUERIES:
        blocks = zip(torch.split(query_BHNE, QUERIES, 2), torch.split(mask, QUERIES, -2), strict=True)
        return torch.cat([attend_by_scores(query, key_BGWE, value_BGWX, part, form) for query, part in blocks], 2)
    # The heads of a group are further queries of its key, which is not copied.
    folded = query_BHNE.reshape(rows, groups, -1, width) @ key_BGWE.mT
    scores = folded.view(rows, heads, queries, keys) * (width**-0.5 if form.scaling is None else form.scaling)
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    hidden = ~mask if mask.dtype is torch.bool else mask == -torch.inf
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if form.sinks_H is not None:
        sinks = form.sinks_H.to(scores.dtype)[:, None, None].expand(rows, -1, queries, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :keys].reshape(rows, groups, -1, keys)
    return (weights @ value_BGWX).reshape(rows, heads, queries, -1)
