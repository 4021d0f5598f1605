"""The attention of a compiled layer: one operation that the compiler does not look into, and that calls what the pass
has set. The cache grows and the masks change from pass to pass, and no graph depends on them.

Shapes: B rows, N tokens of a pass, H query heads, G key-value heads, E width of a key, X width
of a value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scored_attention import AttentionForm


class Asked(NamedTuple):
    """The arguments of the attention of a compiled layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    form: AttentionForm


_ATTEND: ContextVar[Callable[[Asked], Tensor]] = ContextVar("attention of the running layer")


@torch.library.custom_op("draftsmith::attend", mutates_args=())
def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, window: int | None = None,
    chunk: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [B, N, H, X] of queries [B, H, N, E] by what the running layer's pass has set."""
    form = AttentionForm(scaling=scaling, window=window, chunk=chunk, softcap=softcap, sinks_H=sinks)
    return _ATTEND.get()(Asked(query, key, value, form))


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
def attending(attend: Callable[[Asked], Tensor]) -> Iterator[None]:
    """A block in which the attention of a compiled layer is this function."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)
