"""Attention of packed rows by segments: against one softmax over all keys, with its gradients."""

import pytest
import torch
from draftsmith.modules import Features
from draftsmith.modules.parts.attention import attend_segments
from draftsmith.modules.parts.decoder_block import AttentionContext
from draftsmith.modules.target.attention.segment_attention import Segments
from torch import Tensor

SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1], [-1] * 8])
REAL = SEGMENTS >= 0


def rows(segments: Tensor) -> Features:
    zeros = torch.zeros_like(segments)
    return Features(tokens_BL=zeros, supervised_BL=zeros.bool(), segments_BL=segments, positions_BL=zeros)


def heads(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, 8, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def plain(query: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One softmax over the keys of the row and, one after another, the keys of the tokens' own positions."""
    order = torch.arange(8)
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (order[:, None] >= order)
    mask = torch.cat([seen, *[torch.eye(8, dtype=torch.bool).expand(3, 8, 8)] * len(own)], dim=2)[:, None]
    keys, values = (torch.cat(parts, 2).repeat_interleave(query.shape[1] // key.shape[1], 1)
                    for parts in zip((key, value), *own, strict=True))
    return (query @ keys.mT / 4).masked_fill(~mask, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_output_and_gradients_equal_one_softmax(steps: int, dtype: torch.dtype, bound: float) -> None:
    states = [heads(6, dtype, 0), *(heads(2, dtype, 1 + number) for number in range(2 + 2 * steps))]
    query, key, value, *own = states
    pairs, segments = list(zip(own[::2], own[1::2], strict=True)), Segments.of(rows(SEGMENTS))
    found = []
    for mixed in (attend_segments(query, key, value, segments, pairs), plain(query, key, value, pairs)):
        real = mixed.transpose(1, 2)[REAL]
        # Gradients of order 1, so that one bound fits outputs and gradients.
        found.append([real, *torch.autograd.grad((real * real.detach().roll(1, 0)).sum(), states)])
    for ours, twin in zip(*found, strict=True):
        torch.testing.assert_close(ours, twin, atol=10 * bound, rtol=bound)


def test_spans_are_the_segments_without_padding() -> None:
    found = AttentionContext.training(rows(SEGMENTS)).visible_BNW
    assert isinstance(found, Segments)
    assert found.spans == ((0, slice(0, 4)), (0, slice(4, 6)), (1, slice(0, 1)), (1, slice(1, 8)))


def test_padding_has_finite_states() -> None:
    query, key = (heads(2, torch.float32, seed) for seed in (0, 1))
    assert bool(attend_segments(query, key, key, Segments.of(rows(SEGMENTS)), [(key, key)]).isfinite().all())


def test_bfloat16_stays_near_float32() -> None:
    segments = Segments.of(rows(SEGMENTS))
    states = [heads(6, torch.float32, 0), *(heads(2, torch.float32, seed) for seed in (1, 2, 3, 4))]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value, *own = (state.detach().to(dtype).requires_grad_() for state in states)
        mixed = attend_segments(query, key, value, segments, [(own[0], own[1])])
        found.append([mixed, *torch.autograd.grad(mixed.float().square().sum(), (query, key, value, *own))])
    for full, half in zip(*found, strict=True):
        torch.testing.assert_close(half.float(), full, atol=0.06, rtol=0.06)
