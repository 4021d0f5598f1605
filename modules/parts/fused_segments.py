"""Attention of training rows on a CPU: one causal attention for each segment of a packed row, without a mask.

A mask over the whole row would have every token score all others, those of other segments and those after it included:
for conversations of 170 tokens in rows of 512 that is six times the scores that count.

Keys that a token sees at its own position alone, those of the draft steps before it (`training_time_test.py`), join the
softmax by its log-sum-exp. Its gradient needs no scores of the whole either: the backward pass of the fused attention
recomputes the weights from the log-sum-exp and the output that it is given, and takes those of the joined softmax.

Shapes: B rows, L positions, H query heads, G key-value heads, R query heads of a key-value head, E head dimension,
J keys at a token's own position.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..features import Features
from ..target.attention.segment_attention import Segments, Sight, Span, visible_text


def visible_rows(features: Features) -> Sight:
    """Sight of the tokens of training rows in a layer that a drafter trains: their segments on a CPU, and elsewhere as
    `visible_text` has it: one launch for each segment, and the wait for their borders, cost a GPU more than a mask."""
    return Segments.of(features) if features.tokens_BL.device.type == "cpu" else visible_text(features)


def attend_segments(query_BHLE: Tensor, key_BGLE: Tensor, value_BGLE: Tensor, segments: Segments,
                    own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """Attention output [B, H, L, E] of tokens that see their own segment up to themselves; zero at padding where there
    are no other keys.

    Args:
        query_BHLE: the queries.
        key_BGLE: the keys.
        value_BGLE: the values.
        segments: the segments.
        own: further (keys, values) [B, G, L, E], of which a token sees those at its own position.
    """
    mixed_BHLE: Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]
        segments.spans, query_BHLE, key_BGLE, value_BGLE, *(part for pair in own for part in pair))
    return mixed_BHLE


class _SegmentAttention(torch.autograd.Function):
    """The attention with a backward pass that stores the log-sum-exp in place of scores."""

    @staticmethod
    def forward(ctx: Any, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        rows, heads, length, size = query.shape
        # In the order of the output layer's input, which then needs no copy.
        mixed = query.new_zeros(rows, length, heads, size).transpose(1, 2)
        total_BHL = query.new_zeros(rows, heads, length, dtype=torch.promote_types(query.dtype, torch.float32))
        for (row, places), parts in zip(spans, _cut(spans, query, key, value), strict=True):
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
            mixed[row, :, places], total_BHL[row, :, places] = found[0], sums[0]
        scores_JBHL = [_dotted(query, own_key) * size**-0.5 for own_key in own[::2]]
        if scores_JBHL:
            joined_BHL = torch.stack([total_BHL, *scores_JBHL]).logsumexp(0)
            mixed.mul_((total_BHL - joined_BHL).exp_()[..., None])
            for scores_BHL, own_value in zip(scores_JBHL, own[1::2], strict=True):
                share = (scores_BHL - joined_BHL).exp_()[..., None].to(mixed.dtype)
                _grouped(mixed, own_value).addcmul_(_grouped(share, own_value), own_value[:, :, None])
            total_BHL = joined_BHL
        ctx.spans = spans
        ctx.save_for_backward(total_BHL, mixed, query, key, value, *own, *scores_JBHL)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        total_BHL, mixed, query, key, value, *rest = ctx.saved_tensors
        count = len(rest) // 3
        own, scores_JBHL = rest[: 2 * count], rest[2 * count :]
        # The fused backward pass takes the last dimension for dense, which an expanded gradient is not.
        grad = outer[0] if outer[0].stride(-1) == 1 else outer[0].contiguous()
        grads = [torch.zeros_like(part) for part in (query, key, value)]
        for (row, places), parts in zip(ctx.spans, _cut(ctx.spans, query, key, value, mixed, grad), strict=True):
            *read, made, given = parts
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                given, *read, made, total_BHL[row : row + 1, :, places], 0.0, True)
            grads[0][row, :, places] = found[0][0]
            for whole, part in zip(grads[1:], found[1:], strict=True):
                whole[row, :, places] = torch.unflatten(part[0], 0, (key.shape[1], -1)).sum(1)
        for scores_BHL, own_key, own_value in zip(scores_JBHL, own[::2], own[1::2], strict=True):
            share_BHL = (scores_BHL - total_BHL).exp_()
            change_BHL = _dotted(grad, own_value).sub_(_dotted(grad, mixed)).mul_(share_BHL).mul_(query.shape[-1]**-0.5)
            change, share = (part.to(query.dtype)[..., None] for part in (change_BHL, share_BHL))
            _grouped(grads[0], own_key).addcmul_(_grouped(change, own_key), own_key[:, :, None])
            grads += [_grouped(change * query, own_key).sum(2), _grouped(share * grad, own_key).sum(2)]
        return None, *grads


def _cut(spans: Sequence[Span], *states: Tensor) -> Iterator[list[Tensor]]:
    """The states of each segment as one row, keys and values repeated for the query heads that read them."""
    heads = states[0].shape[1]
    for row, places in spans:
        parts = [part[row : row + 1, :, places] for part in states]
        yield [part if part.shape[1] == heads else part.repeat_interleave(heads // part.shape[1], 1) for part in parts]


def _grouped(states_BHLX: Tensor, like: Tensor) -> Tensor:
    """Query heads by the key-value head that they read, a view [B, G, R, L, X]."""
    return torch.unflatten(states_BHLX, 1, (like.shape[1], -1))


def _dotted(states_BHLE: Tensor, own: Tensor) -> Tensor:
    """Scalar products at each position, [B, H, L], float32 or wider."""
    wide = torch.promote_types(states_BHLE.dtype, torch.float32)
    return (_grouped(states_BHLE, own) * own[:, :, None]).sum(-1, dtype=wide).flatten(1, 2)
