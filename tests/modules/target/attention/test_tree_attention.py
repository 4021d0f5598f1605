"""Tests of the attention function: groups of heads, sinks, values of their own width, windows and chunks under a mask,
in every number format."""

import pytest
import torch
from draftsmith.modules import Target, Topology
from draftsmith.modules.target.attention import tree_attention as attention
from draftsmith.modules.target.attention.segment_attention import additive
from draftsmith.modules.target.attention.tree_attention import CHUNKED, place_arguments, tree_attention
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM

pytestmark = pytest.mark.usefixtures("on_device")


BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def by_hand(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float,
            sinks: Tensor | None = None) -> Tensor:
    """Attention in float64, one head after the other; a sink is a key of score s and value 0."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head].double() @ key[:, head // group].double().mT * scaling
        scores = scores.masked_fill(~visible[:, head % visible.shape[1]], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(*scores.shape[:-1], 1)], -1)
        heads.append(scores.softmax(-1)[..., : key.shape[2]] @ value[:, head // group].double())
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("masks", [1, 6], ids=["one mask", "a mask for each head"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("wide", "sinking"), [(8, False), (8, True), (5, False), (12, True)],
                         ids=["plain", "sinks", "narrow values", "sinks and wide values"])
def test_each_group_of_heads_attends_with_its_own_key_under_its_rows_mask(dtype: torch.dtype, queries: int, masks: int,
                                                                          wide: int, sinking: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype)
                         for shape in ((3, 6, queries, 8), (3, 2, 11, 8), (3, 2, 11, wide)))
    sinks = torch.randn(6, generator=generator).to(dtype) if sinking else None
    visible = torch.rand((3, masks, queries, 11), generator=generator) < 0.5
    visible[..., 0] = True

    out, _ = tree_attention(nn.Identity(), query, key, value, additive(visible, dtype), scaling=0.3, s_aux=sinks)

    expected = by_hand(query, key, value, visible, 0.3, sinks)
    assert out.dtype is dtype
    assert out.is_contiguous()
    assert (out.double() - expected).abs().max() < BOUNDS[dtype]


class Chunked(nn.Module):
    """An attention module with chunks and a temperature by position, as Llama 4 has them."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.config = LlamaConfig(attention_chunk_size=size, attn_temperature_tuning=size is None)
        self.config.layer_types = ["full_attention" if size is None else CHUNKED]
        self.layer_idx, self.use_rope, self.attn_temperature_tuning = 0, size is not None, False
        self.floor_scale, self.attn_scale = 2, 0.5


@pytest.mark.parametrize("sinking", [False, True])
@pytest.mark.parametrize("size", [1, 4, 100, None])
def test_chunks_and_temperatures_follow_positions(size: int | None, sinking: bool) -> None:
    """Nodes of a tree share positions, and rows are unlike."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64)
                         for shape in ((2, 4, 5, 8), (2, 2, 13, 8), (2, 2, 13, 6)))
    positions, places = torch.tensor([[7, 8, 8, 9, 9], [2, 3, 3, 4, 4]]), torch.arange(13) - torch.tensor([[0], [4]])
    earlier = positions[:, None, :, None] >= places[:, None, None]
    visible = (torch.rand((2, 1, 5, 13), generator=generator) < 0.7) & earlier
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if sinking else None
    out, _ = tree_attention(Chunked(size), query, key, value, additive(visible, torch.float64), scaling=0.3,
                            s_aux=sinks, **place_arguments(positions, places))
    if size is None:
        query = query * (1 + 0.5 * torch.log1p((positions + 1) // 2))[:, None, :, None]
    else:
        visible = visible & (positions[:, None, :, None] // size == places[:, None, None] // size)
    # Without a visible key, plain attention has no weights to give.
    some = visible.any(-1)[:, 0, :, None, None]
    expected = by_hand(query, key, value, visible, 0.3, sinks)
    assert float(torch.where(some, out - expected, 0.0).abs().max()) < BOUNDS[torch.float64]


def test_layers_with_a_window_share_the_mask_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MistralConfig(vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=4, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2)
    target = Target(MistralForCausalLM(config).eval(), tiny_tokenizer(), name="windowed")
    masks: list[Tensor] = []
    made: list[Tensor] = []
    attend, near = attention.scaled_dot_product_attention, attention.AttentionForm.near

    def noting(*args: Tensor, attn_mask: Tensor, **options: object) -> Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    def near_noting(*args: Tensor) -> Tensor:
        made.append(near(*args))
        return made[-1]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(attention.AttentionForm, "near", near_noting)
    rows = target.start(1, 20)
    for _ in range(2):
        rows.run(Topology.chain(5).plant(torch.full((1, 6), 7)))
    # One for each pass of three layers.
    assert (len(masks), len(made)) == (6, 2)
    first = torch.arange(6)[:, None] - torch.arange(6)
    # On CUDA the queries of a key's group follow one another.
    assert torch.equal(masks[0][0, 0, :6] == 0, (first >= 0) & (first < 4))
