"""One attention function for every target: the same mask for all layers and families.

transformers hands the mask over unchanged when it is four-dimensional, but each of its implementations reads it in
another way and sliding windows need a second one. This function takes one mask for all layers and applies the window
by position ids.

Shapes: B rows, H heads, N queries, W keys, E head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...errors import UserError
from .apart_attention import attend_apart
from .flex_segments import FlexSegments
from .segment_attention import DENSE_LENGTH, SegmentForm, Segments, attend_inside
from .soft_capping import soft_capped

NAME = "draftsmith"
"""Name of the attention implementation in transformers' registry."""
_RECORDED = f"{NAME}-recorded"
"""The same with a record of its calls. It has a name of its own because a context variable cannot be compiled."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of the attention function, apart from queries, keys and values."""

    sliding_window: int | None
    """The layer's window in tokens; None for full attention."""
    placed: bool
    """Whether it gave the positions of queries and keys."""


_CALLS: ContextVar[list[AttentionCall]] = ContextVar("attention calls")


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | FlexSegments | None = None,
    window_masks: dict[int, Tensor] | None = None,
    apart: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with a mask [B, 1, N, W]; `key_positions` [B, W] lets a sliding window follow positions, not slots.

    The mask is boolean or `additive`: a boolean one is made additive by every layer anew. With `segments` it is not
    read: whole rows attend inside them. `window_masks` is an empty dictionary that the layers of a pass share: the
    first one with a window puts the mask in it for the others. With `apart` the layer is compiled, and attention is the
    operation that its pass has set. The signature is the one transformers' attention modules call.

    Raises:
        UserError: for attention sinks, which this function would silently leave out, for a window under a mask
            without the positions to apply it by, and for a long row whose segments the model did not hand over.
    """
    if s_aux is not None:
        raise UserError("this target has attention sinks, which would be left out in silence; choose another target")
    if apart:
        attended: Tensor = attend_apart(query, key, value, scaling, sliding_window, softcap)
        return attended, None
    if isinstance(segments, FlexSegments):
        out = segments.attend(query, key, value, scaling=scaling, window=sliding_window, softcap=softcap)
        return out.transpose(1, 2).contiguous(), None
    if segments is not None:
        form = SegmentForm(scaling=scaling, window=sliding_window, softcap=softcap)
        return attend_inside(query, key, value, segments, form).transpose(1, 2).contiguous(), None
    mask, queries, grouped = attention_mask, query.shape[2], query.shape[1] != key.shape[1]
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise UserError(f"{type(module).__name__} does not hand on the segments of a row of {key.shape[2]} tokens; "
                        f"set row_length to at most {DENSE_LENGTH}, or choose another target")
    if sliding_window is not None and mask is not None:
        if key_positions is None or position_ids is None:
            raise UserError(f"{type(module).__name__} has a sliding window of {sliding_window} tokens and is not given "
                            "the positions to apply it by; choose another target")
        shared = {} if window_masks is None else window_masks
        if sliding_window not in shared:
            near = position_ids[:, None, :, None] - key_positions[:, None, None, :] < sliding_window
            shared[sliding_window] = mask & near if mask.dtype is torch.bool else mask.masked_fill(~near, -torch.inf)
        mask = shared[sliding_window]
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(query.dtype)
    if softcap is not None:
        out = soft_capped(query, key, value, mask, scaling, softcap)
    elif mask is not None and mask.shape[1] == 1 and grouped and (query.is_cuda or query.dtype.itemsize < 4):
        # There torch's own grouping under a mask is slow: in half precision on a CPU one query of a row takes four
        # times as long as folded, and on CUDA no fast kernel takes a mask together with groups.
        out = _folded(query, key, value, mask, scaling)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=mask is None and
                                           queries > 1, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Grouped attention with the query heads of a key's group as further queries."""
    rows, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    folded_mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    out = scaled_dot_product_attention(query.reshape(rows, key.shape[1], groups * queries, width), key, value,
                                       attn_mask=folded_mask, scale=scaling)
    return out.reshape(rows, heads, queries, width)


def register() -> None:
    """Make the function known to transformers; without the mask entry a padding mask would be dropped in silence."""
    for name, function in ((NAME, tree_attention), (_RECORDED, _recorded_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def recording(model: Any) -> Iterator[list[AttentionCall]]:
    """Run `tree_attention` in a model and collect its calls, in order; after the block it runs without a record."""
    calls: list[AttentionCall] = []
    token = _CALLS.set(calls)
    model.set_attn_implementation(_RECORDED)
    try:
        yield calls
    finally:
        model.set_attn_implementation(NAME)
        _CALLS.reset(token)


def _recorded_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    placed = kwargs.get("position_ids") is not None and kwargs.get("key_positions") is not None
    _CALLS.get().append(AttentionCall(kwargs.get("sliding_window"), placed))
    return tree_attention(module, *args, **kwargs)
