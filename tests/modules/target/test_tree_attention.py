"""Tests of the attention function: groups of heads under a mask, in every number format."""

import pytest
import torch
from draftsmith.modules.target.tree_attention import additive, tree_attention
from torch import Tensor, nn


def by_hand(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Attention in float64, one head after the other."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head].double() @ key[:, head // group].double().mT * scaling
        scores = scores.masked_fill(~visible[:, head % visible.shape[1]], -torch.inf)
        heads.append(scores.softmax(-1) @ value[:, head // group].double())
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("masks", [1, 6], ids=["one mask", "a mask for each head"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_each_group_of_heads_attends_with_its_own_key_under_its_rows_mask(
    dtype: torch.dtype, queries: int, masks: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype)
                         for shape in ((3, 6, queries, 8), (3, 2, 11, 8), (3, 2, 11, 8)))
    visible = torch.rand((3, masks, queries, 11), generator=generator) < 0.5
    visible[..., 0] = True

    out, _ = tree_attention(nn.Identity(), query, key, value, additive(visible, dtype), scaling=0.3)

    expected = by_hand(query, key, value, visible, 0.3)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert out.dtype is dtype
    assert out.is_contiguous()
    assert (out.double() - expected).abs().max() < bound
