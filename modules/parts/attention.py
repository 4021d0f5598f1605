"""Operations of the attention in a drafter's own layers: rotary positions, with the scaling by which long-context
targets change them, and on a CPU one causal attention for each segment of a packed training row, without a mask.

A mask over the whole row would have every token score all others, those of other segments and those after it included:
for conversations of 170 tokens in rows of 512 that is six times the scores that count.

Keys that a token sees at its own position alone, those of the draft steps before it (`training_time_test.py`), join the
softmax by its log-sum-exp. Its gradient needs no scores of the whole either: the backward pass of the fused attention
recomputes the weights from the log-sum-exp and the output that it is given, and takes those of the joined softmax.

Shapes: B rows, N tokens, L positions of a row, H query heads, G key-value heads, R query heads of a key-value head, E
head dimension, J half of it, or keys at a token's own position."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..target.attention.segment_attention import QUERIES, Segments, additive

Rotation = tuple[Tensor, Tensor]  # Cosines and signed sines of a rotary embedding, [B, 1, N, E] each
SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""Scalings that a drafter takes over. Within the target's context length each is one fixed set of frequencies: those of
`dynamic` and `longrope` change beyond it alone."""


def carried_scaling(rope: dict[str, Any], head_dim: int, context_length: int) -> dict[str, Any] | None:
    """A target's scaling for a drafter's heads, as transformers writes it but without the base; None for none. The
    heads are `head_dim` wide and rotate whole: factors for a part of a head do not fit them."""
    if rope.get("rope_type") not in SCALINGS or len(rope.get("short_factor", [])) not in (0, head_dim // 2):
        return None
    kept = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return {"original_max_position_embeddings": context_length, **kept}


def rotation(positions_BN: Tensor, base: float, size: int, scaling: dict[str, Any] | None = None) -> Rotation:
    """The rotary position embedding of these positions (arXiv:2104.09864, eq. 34), angles in float32, of heads of this
    size E, whose element j rotates with j + E/2. A scaling is one of `carried_scaling`, and also scales the result
    where it says so (YaRN, arXiv:2309.00071, eq. 15)."""
    frequencies_J, factor = frequencies(base, size, scaling, positions_BN.device)
    angles_B1NJ = positions_BN[:, None, :, None].float() * frequencies_J
    cosine, sine = factor * angles_B1NJ.cos(), factor * angles_B1NJ.sin()
    return torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)


def frequencies(base: float, size: int, scaling: dict[str, Any] | None, device: torch.device) -> tuple[Tensor, float]:
    """(frequencies [E / 2] of a head of E numbers, factor of the cosines and sines); arguments as of `rotation`."""
    if scaling is not None:
        return _scaled(json.dumps(scaling, sort_keys=True), base, size, device)
    return base ** (-torch.arange(size // 2, device=device, dtype=torch.float32) / (size // 2)), 1.0


def rotate(heads_BHNE: Tensor, turns: Rotation) -> Tensor:
    """Heads rotated by their positions, in their own number format."""
    rotated: Tensor = _Rotated.apply(heads_BHNE, *turns)  # type: ignore[no-untyped-call]
    return rotated


class _Rotated(torch.autograd.Function):
    """A rotation, whose backward pass is the rotation back: autograd would keep and add up four products."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        # The roll swaps the halves: element j rotates with j + E/2.
        return (heads * cosine + heads.roll(heads.shape[-1] // 2, -1) * sine).to(heads.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (cosine, sine) = outer, ctx.saved_tensors
        return (grad * cosine + (grad * sine).roll(grad.shape[-1] // 2, -1)).to(grad.dtype), None, None


@cache
def _scaled(scaling: str, base: float, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """(frequencies [E / 2], factor of the result) as transformers has them; kept: making them waits for the device."""
    rope = json.loads(scaling)
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
                         max_position_embeddings=rope["original_max_position_embeddings"],
                         rope_parameters={**rope, "rope_theta": base})
    frequencies_J, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
    return frequencies_J, float(factor)


def attend_segments(query_BHLE: Tensor, key_BGLE: Tensor, value_BGLE: Tensor, segments: Segments,
                    own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """Attention output [B, H, L, E] of tokens that see their own segment up to themselves, with a window the newest of
    it; zero at padding where there are no other keys. A token also sees the further (keys, values) [B, G, L, E] of
    `own` at its own position."""
    mixed_BHLE: Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]
        _pieces(segments, query_BHLE), query_BHLE, key_BGLE, value_BGLE, *(part for pair in own for part in pair))
    return mixed_BHLE


Piece = tuple[int, slice, slice, Tensor | None]  # A row, places of queries and of their keys, mask unless plain causal


def _pieces(segments: Segments, like: Tensor) -> list[Piece]:
    """The segments; a text that is longer than the window in blocks of queries, each with the keys that it can see."""
    found: list[Piece] = []
    for row, places in segments.spans:
        first, end, window = places.start, places.stop, segments.window
        if window is None or end - first <= window:
            found.append((row, places, places, None))
            continue
        for start in range(first, end, QUERIES):
            stop, oldest = min(end, start + QUERIES), max(first, start + 1 - window)
            after_NW = torch.arange(start, stop)[:, None] - torch.arange(oldest, stop)
            mask = additive((after_NW >= 0) & (after_NW < window), like.dtype)[None, None]
            found.append((row, slice(start, stop), slice(oldest, stop), mask))
    return found


class _SegmentAttention(torch.autograd.Function):
    """The attention with a backward pass that stores the log-sum-exp in place of scores."""

    @staticmethod
    def forward(ctx: Any, pieces: Sequence[Piece], query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        rows, heads, length, size = query.shape
        # In the order of the output layer's input, which then needs no copy.
        mixed = query.new_zeros(rows, length, heads, size).transpose(1, 2)
        total_BHL = query.new_zeros(rows, heads, length, dtype=torch.promote_types(query.dtype, torch.float32))
        for row, places, seen, mask in pieces:
            parts = _cut(row, heads, (query, places), (key, seen), (value, seen))
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, mask is None, attn_mask=mask)
            mixed[row, :, places], total_BHL[row, :, places] = found[0], sums[0]
        scores_JBHL = [_dotted(query, own_key) * size**-0.5 for own_key in own[::2]]
        if scores_JBHL:
            joined_BHL = torch.stack([total_BHL, *scores_JBHL]).logsumexp(0)
            mixed.mul_((total_BHL - joined_BHL).exp_()[..., None])
            for scores_BHL, own_value in zip(scores_JBHL, own[1::2], strict=True):
                share = (scores_BHL - joined_BHL).exp_()[..., None].to(mixed.dtype)
                _grouped(mixed, own_value).addcmul_(_grouped(share, own_value), own_value[:, :, None])
            total_BHL = joined_BHL
        ctx.pieces = pieces
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
        for row, places, seen, mask in ctx.pieces:
            given, *read, made = _cut(row, query.shape[1], (grad, places), (query, places), (key, seen), (value, seen),
                                      (mixed, places))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                given, *read, made, total_BHL[row : row + 1, :, places], 0.0, mask is None, attn_mask=mask)
            grads[0][row, :, places] = found[0][0]
            for whole, part in zip(grads[1:], found[1:], strict=True):
                # Pieces of one text share keys.
                whole[row, :, seen] += torch.unflatten(part[0], 0, (key.shape[1], -1)).sum(1)
        for scores_BHL, own_key, own_value in zip(scores_JBHL, own[::2], own[1::2], strict=True):
            share_BHL = (scores_BHL - total_BHL).exp_()
            change_BHL = _dotted(grad, own_value).sub_(_dotted(grad, mixed)).mul_(share_BHL).mul_(query.shape[-1]**-0.5)
            change, share = (part.to(query.dtype)[..., None] for part in (change_BHL, share_BHL))
            _grouped(grads[0], own_key).addcmul_(_grouped(change, own_key), own_key[:, :, None])
            grads += [_grouped(change * query, own_key).sum(2), _grouped(share * grad, own_key).sum(2)]
        return None, *grads


def _cut(row: int, heads: int, *states: tuple[Tensor, slice]) -> list[Tensor]:
    """The states of a row at these places, keys and values repeated for the query heads that read them."""
    parts = [part[row : row + 1, :, places] for part, places in states]
    return [part if part.shape[1] == heads else part.repeat_interleave(heads // part.shape[1], 1) for part in parts]


def _grouped(states_BHLX: Tensor, like: Tensor) -> Tensor:
    """Query heads by the key-value head that they read, a view [B, G, R, L, X]."""
    return torch.unflatten(states_BHLX, 1, (like.shape[1], -1))


def _dotted(states_BHLE: Tensor, own: Tensor) -> Tensor:
    """Scalar products at each position, [B, H, L], float32 or wider."""
    wide = torch.promote_types(states_BHLE.dtype, torch.float32)
    return (_grouped(states_BHLE, own) * own[:, :, None]).sum(-1, dtype=wide).flatten(1, 2)
