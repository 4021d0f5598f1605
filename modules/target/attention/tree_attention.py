"""One attention function for every target: the same mask for all layers and families.

transformers hands the mask over unchanged when it is four-dimensional, but each of its implementations reads it in
another way, and sliding windows and chunks need further ones. This function takes one mask for all layers and applies
windows and chunks by position ids. In a compiled layer it is one operation that the compiler does not look into, and
that calls what the pass has set: the cache grows and the masks change from pass to pass, and no graph depends on them.

Shapes: B rows, H query heads, G key-value heads, N queries, W keys, E width of a key, X width of a value."""

from collections.abc import Callable, Iterator
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
from .segment_attention import DENSE_LENGTH, AttentionForm, Segments, attend_by_scores
from .two_parts import TreeParts, attend_in_parts, takes_parts

Attend = Callable[[Tensor, Tensor, Tensor, AttentionForm], Tensor]  # The attention of a compiled layer
_ATTEND: ContextVar[Attend] = ContextVar("attention of the running layer")


@torch.library.custom_op("draftsmith::attend", mutates_args=())
def attend_apart(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, window: int | None = None,
                 chunk: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Attention output [B, N, H, X] of queries [B, H, N, E] by what the running layer's pass has set."""
    form = AttentionForm(scaling=scaling, window=window, chunk=chunk, softcap=softcap, sinks_H=sinks)
    return _ATTEND.get()(query, key, value, form)


@attend_apart.register_fake
def _shaped(query: Tensor, key: Tensor, value: Tensor, *_form: Any) -> Tensor:
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1])


class PassedOn:
    """A cache inside a compiled layer: the keys and values of the new tokens alone, which attention stores."""

    def update(self, keys: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values themselves."""
        return keys, values


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """A block in which the attention of a compiled layer is this function."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


NAME = "draftsmith"  # Name of the attention implementation in transformers' registry
CHUNKED = "chunked_attention"  # The kind of layers whose tokens see those of their own chunk of positions
_RECORDED = f"{NAME}-recorded"  # The same with a record of its calls: a context variable cannot be compiled


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of the attention function, apart from queries, keys and values."""

    reach: tuple[int | None, int | None]  # The layer's window and its chunk in tokens; None for what does not bound it
    placed: bool  # Whether it gave the positions of queries and keys
    shape: tuple[int, int, int, int]  # Query heads, key-value heads, width of a key, and width of a value


_CALLS: ContextVar[list[AttentionCall]] = ContextVar("attention calls")


def place_arguments(positions_BN: Tensor, key_positions_BW: Tensor) -> dict[str, Any]:
    """The arguments by which a decoder of transformers hands positions on to `tree_attention`, and an empty dictionary
    for the masks that the layers of a pass share."""
    # Once more under a name of our own: not every layer hands `position_ids` on to its attention.
    return {"position_ids": positions_BN, "query_positions": positions_BN, "key_positions": key_positions_BW,
            "near_masks": {}}


def tree_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                   scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
                   sliding_window: int | None = None, query_positions: Tensor | None = None,
                   key_positions: Tensor | None = None, s_aux: Tensor | None = None, segments: Segments | None = None,
                   near_masks: dict[tuple[int | None, int | None], Tensor] | None = None, apart: bool = False,
                   tree_parts: TreeParts | None = None, **_: Any) -> tuple[Tensor, None]:
    """Attend with a mask [B, 1, N, W]; `key_positions` [B, W] lets windows and chunks follow positions, not slots;
    UserError where they need them and there are none. transformers' attention modules call this signature. With
    `segments` the mask is not read: whole rows attend inside them; UserError for a long row to which the model did not
    hand them. With `apart` the layer is compiled, and attention is the operation that its pass has set."""
    form = AttentionForm(scaling=scaling, window=sliding_window, chunk=chunk_of(module), softcap=softcap, sinks_H=s_aux)
    if tuned(module):
        # Llama 4 widens the scores of late queries by their slots, which are no positions in a tree or a packed row.
        if query_positions is None:
            raise UserError(f"{type(module).__name__} scales its queries by positions that it is not given; choose "
                            "another target")
        stage = torch.floor((query_positions.float() + 1.0) / module.floor_scale)
        query = (query * (torch.log1p(stage) * module.attn_scale + 1.0)[:, None, :, None]).to(query.dtype)
    if apart:
        attended: Tensor = attend_apart(query, key, value, scaling, sliding_window, form.chunk, softcap, s_aux)
        return attended, None
    if segments is not None:
        return segments.attend(query, key, value, form).transpose(1, 2).contiguous(), None
    mask = attention_mask
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise UserError(f"{type(module).__name__} does not hand on the segments of a row of {key.shape[2]} tokens; "
                        f"set row_length to at most {DENSE_LENGTH}, or choose another target")
    return attend_masked(query, key, value, mask, form, query_positions, key_positions, near_masks, tree_parts), None


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm,
                  query_positions: Tensor | None, key_positions: Tensor | None,
                  near_masks: dict[tuple[int | None, int | None], Tensor] | None,
                  tree_parts: TreeParts | None = None) -> Tensor:
    """Attention output [B, N, H, X] under a mask that is boolean or `additive`: every layer makes a boolean one
    additive anew. The first layer of a pass with a window or a chunk puts its mask into `near_masks` for the others.
    UserError for a window or a chunk without positions."""
    if tree_parts is not None and takes_parts(query, key, value, mask, form, tree_parts):
        return attend_in_parts(query, key, value, form.scaling, tree_parts)
    queries, grouped = query.shape[2], query.shape[1] != key.shape[1]
    reach = form.window, form.chunk
    if mask is not None and reach != (None, None):
        if query_positions is None or key_positions is None:
            raise UserError(f"an attention layer has {reach_words(reach)} and is not given the positions to apply "
                            "that by; choose another target")
        shared = {} if near_masks is None else near_masks
        if reach not in shared:
            near = form.near(query_positions, key_positions)[:, None]
            shared[reach] = mask & near if mask.dtype is torch.bool else mask.masked_fill(~near, -torch.inf)
        mask = shared[reach]
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(query.dtype)
    # On a CPU no fused kernel takes values of another width than keys: torch would write out all scores at once.
    unlike = not query.is_cuda and key.shape[-1] != value.shape[-1]
    if form.softcap is not None or form.sinks_H is not None or unlike:
        out = attend_by_scores(query, key, value, mask, form)
    elif mask is not None and mask.shape[1] == 1 and grouped and (query.is_cuda or query.dtype.itemsize < 4):
        # There torch's own grouping under a mask is slow: in half precision on a CPU one query of a row takes four
        # times as long as with the heads of a group as further queries, and on CUDA no fast kernel takes both.
        rows, heads, _, width = query.shape
        folded = query.reshape(rows, key.shape[1], heads // key.shape[1] * queries, width)
        mask = mask[:, :, None].expand(-1, -1, heads // key.shape[1], -1, -1).flatten(2, 3)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=form.scaling)
        out = out.reshape(rows, heads, queries, -1)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=form.scaling, is_causal=mask is None
                                           and queries > 1, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def chunk_of(module: Any) -> int | None:
    """Tokens of a chunk of an attention module of transformers, by its configuration; None for one without chunks."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    if CHUNKED not in kinds or kinds[module.layer_idx] != CHUNKED:
        return None
    size: int = module.config.attention_chunk_size
    return size


def tuned(module: Any) -> bool:
    """True for an attention module that scales its queries by their place in the text."""
    return (hasattr(module, "attn_temperature_tuning") and module.config.attn_temperature_tuning
            and not module.use_rope)


def reach_words(reach: tuple[int | None, int | None]) -> str:
    """A window and a chunk in words."""
    window, chunk = reach
    if window is None and chunk is None:
        return "no sliding window"
    return f"a sliding window of {window} tokens" if chunk is None else f"chunks of {chunk} tokens"


def register() -> None:
    """Make the function known to transformers; without the mask entry a padding mask would be dropped in silence."""
    for name, function in ((NAME, tree_attention), (_RECORDED, _recorded_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


def attend_by(model: Any, name: str) -> None:
    """Let a model attend by an implementation of transformers' registry."""
    model.set_attn_implementation(name)
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            # `tree_attention` scales the queries itself.
            module.attn_temperature_tuning = module.config.attn_temperature_tuning and name not in (NAME, _RECORDED)


@contextmanager
def recording(model: Any) -> Iterator[list[AttentionCall]]:
    """Run `tree_attention` in a model and collect its calls, in order; after the block it runs without a record."""
    calls: list[AttentionCall] = []
    token = _CALLS.set(calls)
    attend_by(model, _RECORDED)
    try:
        yield calls
    finally:
        attend_by(model, NAME)
        _CALLS.reset(token)


def _recorded_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
                        ) -> tuple[Tensor, None]:
    placed = kwargs.get("query_positions") is not None and kwargs.get("key_positions") is not None
    shape = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    _CALLS.get().append(AttentionCall((kwargs.get("sliding_window"), chunk_of(module)), placed, shape))
    return tree_attention(module, query, key, value, *args, **kwargs)
