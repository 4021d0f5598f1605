"""Tests of the attention function: groups of heads under a mask, in every number format."""

import pytest
import torch
from draftsmith.modules import Target, Topology
from draftsmith.modules.target.attention import tree_attention as attention
from draftsmith.modules.target.attention.segment_attention import additive
from draftsmith.modules.target.attention.tree_attention import tree_attention
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

pytestmark = pytest.mark.usefixtures("on_device")


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


def test_layers_with_a_window_share_the_mask_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MistralConfig(vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=4, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2)
    target = Target(MistralForCausalLM(config).eval(), tiny_tokenizer(), name="windowed")
    masks: list[Tensor] = []
    attend = attention.scaled_dot_product_attention

    def noting(*args: Tensor, attn_mask: Tensor, **options: object) -> Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noting)
    rows = target.start(1, 20)
    for _ in range(2):
        rows.run(Topology.chain(5).plant(torch.full((1, 6), 7)))
    assert len(masks) == 6
    assert [mask is masks[0] for mask in masks] == [True] * 3 + [False] * 3
    first = torch.arange(6)[:, None] - torch.arange(6)
    assert torch.equal(masks[0][0, 0] == 0, (first >= 0) & (first < 4))
