"""Attention of long training rows: causal inside each segment, without a mask of all positions; and attention by its
scores where no fused kernel computes it: capped before the softmax, as in Gemma 2, or joined by that of a sink, as in
gpt-oss.

A mask of L x L positions has a GiB at 32,768 tokens. A segment of a packed row is a text of its own: its attention is
plain causal attention, which fused kernels compute without a mask and without the other segments. Layers of another
form go through their queries in blocks, each with the keys that it can see.

Shapes: B rows, L positions, H query heads, G key-value heads, R query heads of a key-value head, N queries or tokens of
a segment, W keys of a block of queries, E width of a key, X width of a value."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ...errors import UserError
from ...features import Features

QUERIES = 256  # Most queries whose scores are in memory at once


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionForm:
    """Differences of one layer's attention from plain causal attention."""

    scaling: float | None = None  # Factor of the scores; None takes one over the root of the width of a key
    window: int | None = None  # Newest tokens that a token sees, itself included; None for all
    chunk: int | None = None  # Tokens of a chunk, inside which tokens see each other alone; None for one of all
    softcap: float | None = None  # Bound of the scores; None for none
    sinks_H: Tensor | None = None  # Score of one more key of each head, which every query sees, of value zero; or None

    def near(self, places_N: Tensor, others_W: Tensor) -> Tensor:
        """True where the window and the chunk of a query at a place [..., N] hold the place of a key, [..., N, W]."""
        queries, keys = places_N[..., :, None], others_W[..., None, :]
        near = queries - keys < (torch.iinfo(queries.dtype).max if self.window is None else self.window)
        return near if self.chunk is None else near & (queries // self.chunk == keys // self.chunk)


PLAIN = AttentionForm()


def attend_by_scores(query_BHNE: Tensor, key_BGWE: Tensor, value_BGWX: Tensor, mask: Tensor | None,
                     form: AttentionForm) -> Tensor:
    """Attention output [B, H, N, X] with capped scores (arXiv:2408.00118, section 2) and sinks (arXiv:2508.10925), by
    scores written out for `QUERIES` queries at a time. H is a multiple of G. The mask [..., N, W] is True, or above
    minus infinity, where a query sees a key, and holds the form's window and chunk too; None is causal attention of the
    last N of W."""
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


Span = tuple[int, slice]  # A row, and the places of one of its segments
DENSE_LENGTH = 2048  # Longest rows, in tokens, whose attention reads a mask of all positions: 4 MiB a row


@dataclass(frozen=True)
class Segments:
    """The segments of training rows: each token sees those of its own segment up to itself; padding sees nothing."""

    lengths: tuple[tuple[int, ...], ...]  # Tokens of each run of equal segment numbers by row, padding too; on the host
    padding: tuple[tuple[bool, ...], ...]  # Which of these runs are padding
    window: int | None = None  # Newest tokens that a token sees, itself included; None for all of its segment

    @classmethod
    def of(cls, features: Features) -> "Segments":
        """The segments of a batch, whose tokens must be adjacent (ValueError); the host waits once for its device."""
        lengths, padding = [], []
        for segments_L in features.segments_BL.cpu():
            numbers, counts = segments_L.unique_consecutive(return_counts=True)
            texts = numbers[numbers >= 0]
            if len(texts) != len(texts.unique()):
                raise ValueError("the tokens of a segment are not adjacent in their row; pack each as one piece")
            lengths.append(tuple(counts.tolist()))
            padding.append(tuple((numbers < 0).tolist()))
        return cls(tuple(lengths), tuple(padding))

    @property
    def spans(self) -> tuple[Span, ...]:
        """The segments, padding left out."""
        found = []
        for row, (sizes, blanks) in enumerate(zip(self.lengths, self.padding, strict=True)):
            ends = tuple(accumulate(sizes))
            found += [(row, slice(end - size, end)) for size, end, blank in zip(sizes, ends, blanks, strict=True)
                      if not blank]
        return tuple(found)

    def attend(self, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNX: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [B, H, N, X] of all tokens of the rows."""
        return attend_inside(query_BHNE, key_BGNE, value_BGNX, self, form)


Sight = Tensor | Segments  # A mask [B, N, W], or the segments of training rows, which see themselves causally


def narrowed(visible: Sight, window: int | None) -> Sight:
    """Sight of the newest `window` keys alone, where each token sees adjacent keys; None for all of them."""
    if window is None:
        return visible
    if isinstance(visible, Segments):
        return replace(visible, window=window)
    # A key is too old where the one `window` places after it is seen as well.
    return visible & ~pad(visible[..., window:], (0, min(window, visible.shape[-1])))


def visible_text(features: Features, decoder: Any = None) -> Sight:
    """Sight of the tokens of training rows: a mask [B, L, L], or beyond `DENSE_LENGTH` tokens the segments. UserError
    if `decoder`, which forms its attention itself, would need a mask longer than that."""
    length = features.tokens_BL.shape[1]
    if decoder is not None and not takes_segments(decoder):
        if length > DENSE_LENGTH:
            raise UserError(f"{type(decoder).__name__} forms its attention itself, by a mask of all positions of a row "
                            f"of {length} tokens; set row_length to at most {DENSE_LENGTH}, or choose another target")
        return features.visible()
    return features.visible() if length <= DENSE_LENGTH else Segments.of(features)


def takes_segments(decoder: Any) -> bool:
    """True for a decoder of transformers whose attention is a function that can be replaced, by `tree_attention`. Some,
    such as Nemotron-H's, do not say so: `tree_attention` refuses layers that hand on no segments."""
    return (bool(getattr(decoder, "_supports_attention_backend", False))
            or "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(decoder).__module__]))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added to the scores: 0 where it is True, minus infinity elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def mask_arguments(visible: Sight, decoder: Any, like: Tensor) -> dict[str, Any]:
    """The arguments by which a decoder of transformers hands a mask [B, N, W], or segments, to `tree_attention`; one
    that forms its attention itself adds the mask to its scores, of the device and number format of `like`."""
    if isinstance(visible, Segments):
        # transformers would make a mask of its own where it is given none, and hands on any that has four dimensions:
        # a blank one stands for the segments.
        blank = torch.zeros(len(like), 1, 1, 1, dtype=torch.bool, device=like.device)
        return {"attention_mask": blank, "segments": visible}
    mask = visible[:, None]
    return {"attention_mask": mask if takes_segments(decoder) else additive(mask, like.dtype)}


def attend_inside(query_BHLE: Tensor, key_BGLE: Tensor, value_BGLX: Tensor, segments: Segments,
                  form: AttentionForm = PLAIN, first: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Attention output [B, H, L, X] inside each segment; zero at padding. `first` is a key [B, G, 1, E] and a value [B,
    G, 1, X] before each segment that all of its tokens see; with no form but another scaling, and the segments' window.
    """
    rows, form = [], form if segments.window is None else replace(form, window=segments.window)
    for row, sizes in enumerate(segments.lengths):
        # Split, not sliced: the gradient of a slice has the size of the whole row.
        parts = zip(*(torch.split(states[row], list(sizes), dim=1) for states in (query_BHLE, key_BGLE, value_BGLX)),
                    segments.padding[row], strict=True)
        # The key in front is one of each row, and a text has no rows any more.
        attend = partial(_text, form=form, first=None if first is None else (first[0][row], first[1][row]))
        rows.append(torch.cat([query.new_zeros(*query.shape[:2], value.shape[-1]) if blank else
                               attend(query, key, value) for query, key, value, blank in parts], dim=1))
    return torch.stack(rows)


def _text(query_HNE: Tensor, key_GNE: Tensor, value_GNX: Tensor, form: AttentionForm,
          first: tuple[Tensor, Tensor] | None) -> Tensor:
    """Attention output of one text, [H, N, X]."""
    least = min(size for size in (form.window, form.chunk, query_HNE.shape[1]) if size is not None)
    scored = form.softcap is not None or form.sinks_H is not None or key_GNE.shape[-1] != value_GNX.shape[-1]
    if least < query_HNE.shape[1] or (first is None and scored):
        return _in_blocks(query_HNE, key_GNE, value_GNX, form, first)
    if first is not None:
        # A query in front of the others makes room for the key in front: causal attention aligns their starts.
        query_HNE = pad(query_HNE, (0, 0, 1, 0))
        key_GNE, value_GNX = torch.cat([first[0], key_GNE], 1), torch.cat([first[1], value_GNX], 1)
    # The heads of a group are rows that share keys through a view: on a CPU the fused kernel takes no groups, and
    # without it the scores of all heads are in memory.
    out_RGNX = scaled_dot_product_attention(*_grouped(query_HNE, key_GNE, value_GNX), is_causal=True,
                                            scale=form.scaling)
    out_HNX = out_RGNX.transpose(0, 1).flatten(0, 1)
    return out_HNX if first is None else out_HNX[:, 1:]


def _grouped(query_HNE: Tensor, key_GWE: Tensor, value_GWX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, G, N, E] with keys [R, G, W, E] and values [R, G, W, X]: views."""
    query_RGNE = torch.unflatten(query_HNE, 0, (len(key_GWE), -1)).transpose(0, 1)
    key, value = (states.expand(len(query_RGNE), -1, -1, -1) for states in (key_GWE, value_GWX))
    return query_RGNE, key, value


def _in_blocks(query_HNE: Tensor, key_GNE: Tensor, value_GNX: Tensor, form: AttentionForm,
               first: tuple[Tensor, Tensor] | None) -> Tensor:
    """The same in blocks of queries, whose masks and scores are computed again for a gradient, not kept."""
    attend: Callable[..., Tensor] = partial(_block, form=form, first=first)
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query_HNE, key_GNE, value_GNX)):
        attend = partial(checkpoint, attend, use_reentrant=False)
    found, length = [], query_HNE.shape[1]
    for start in range(0, length, QUERIES):
        stop = min(length, start + QUERIES)
        oldest = max(0 if form.window is None else start + 1 - form.window,
                     0 if form.chunk is None else start // form.chunk * form.chunk, 0)
        found.append(attend(query_HNE[:, start:stop], key_GNE[:, oldest:stop], value_GNX[:, oldest:stop], oldest))
    return torch.cat(found, dim=1)


def _block(query_HNE: Tensor, key_GWE: Tensor, value_GWX: Tensor, oldest: int, form: AttentionForm,
           first: tuple[Tensor, Tensor] | None) -> Tensor:
    """Attention output [H, N, X] of the last N of W tokens, the first of which is at the place `oldest` of its text."""
    places_W = torch.arange(oldest, oldest + key_GWE.shape[1], device=query_HNE.device)
    places_N = places_W[-query_HNE.shape[1] :]
    seen_NW = (places_N[:, None] >= places_W) & form.near(places_N, places_W)
    if first is not None:
        seen_NW = pad(seen_NW, (1, 0), value=True)
        key_GWE, value_GWX = torch.cat([first[0], key_GWE], 1), torch.cat([first[1], value_GWX], 1)
    return attend_seen(query_HNE, key_GWE, value_GWX, seen_NW, form)


def attend_seen(query_HNE: Tensor, key_GWE: Tensor, value_GWX: Tensor, seen_NW: Tensor, form: AttentionForm) -> Tensor:
    """Attention output [H, N, X] of a few queries, which see the keys where the mask is True, whatever the form says of
    windows."""
    if form.softcap is not None or form.sinks_H is not None:
        return attend_by_scores(query_HNE[None], key_GWE[None], value_GWX[None], seen_NW, form)[0]
    out_RGNX = scaled_dot_product_attention(*_grouped(query_HNE, key_GWE, value_GWX), attn_mask=seen_NW,
                                            scale=form.scaling)
    return out_RGNX.transpose(0, 1).flatten(0, 1)
