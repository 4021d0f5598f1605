"""Rotary positions with the scalings of long-context targets, against transformers' own, and the attention of packed
rows by segments, against one softmax over all keys, with its gradients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import import_drafter
from draftsmith.export.layouts.eagle import export_eagle
from draftsmith.export.layouts.official_code import KANGAROO
from draftsmith.modules import (
    Eagle,
    Eagle3,
    Eagle3Config,
    EagleConfig,
    Features,
    Kangaroo,
    KangarooConfig,
    Target,
    UserError,
)
from draftsmith.modules.parts.attention import attend_segments, carried_scaling, rotate, rotation
from draftsmith.modules.parts.decoder_block import AttentionContext, BlockConfig
from draftsmith.modules.target.attention.segment_attention import Segments
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0,
                 "original_max_position_embeddings": 64},
}


def target_with(kind: str) -> Target:
    """A random target whose rotary embedding is scaled."""
    torch.manual_seed(4)
    return Target(LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **SCALINGS[kind]})),
        tiny_tokenizer(), name="tiny-scaled")


@pytest.mark.parametrize("kind", SCALINGS)
def test_heads_rotate_as_the_scaled_target_s(kind: str) -> None:
    target = target_with(kind)
    block = Eagle3.create(Eagle3Config(taps=(0, 1)), target).block
    heads = torch.randn(1, 4, 6, 8)
    # Beyond its original context longrope changes; no sequence of such a target is longer.
    positions = torch.tensor([[0, 1, 30, 62, 62, 63] if kind == "longrope" else [0, 1, 63, 64, 200, 255]])
    cos, sin = LlamaRotaryEmbedding(target.config)(heads, positions)
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    found = rotate(heads, rotation(positions, block.rope_base, 8, block.rope_scaling))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if kind != "dynamic":
        unscaled = rotate(heads, rotation(positions, block.rope_base, 8))
        assert not torch.allclose(found, unscaled, atol=1e-3), "scaling does nothing"


def test_the_official_code_s_base_has_no_scaling() -> None:
    target = target_with("yarn")
    assert Kangaroo.create(KangarooConfig(), target).block.rope_scaling is None
    assert Eagle.create(EagleConfig(rope_base=1e4), target).block.rope_scaling is None


def test_scalings_that_do_not_fit_whole_heads_are_left_out() -> None:
    rope = {"rope_type": "longrope", **SCALINGS["longrope"]}
    assert carried_scaling(rope, 8, 64) is not None
    assert carried_scaling(rope, 12, 64) is None
    assert carried_scaling({"rope_type": "proportional"}, 8, 64) is None
    with pytest.raises(UserError, match=r"rope_type of rope_scaling must be one of linear, .*, got 'mrope'"):
        replace(BlockConfig(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8),
                rope_scaling={"rope_type": "mrope"})


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_is_exported_and_imported(kind: str, tmp_path: Path) -> None:
    target = target_with(kind)
    drafter = Eagle3.create(Eagle3Config(taps=(0, 1)), target)
    (tmp_path / "out").mkdir()
    export_eagle(drafter, target, tmp_path / "out")
    assert import_drafter("eagle", tmp_path / "out", target).block == drafter.block
    described = drafter.describe()
    assert Eagle3.rebuild(described, target.identity).block == drafter.block
    described["block"].pop("rope_scaling")
    assert Eagle3.rebuild(described, target.identity).block.rope_scaling is None


def test_an_adapter_with_scaling_is_not_exported_as_official() -> None:
    target = target_with("linear")
    drafter = Kangaroo.create(KangarooConfig(rope_base=None), target)
    assert "this adapter with 500 and linear scaling; train with rope_base" in KANGAROO.refusal(drafter, target)


# Segments -------------------------------------------------------------------------------------------------------------


SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1], [-1] * 8])
REAL = SEGMENTS >= 0


def rows(segments: Tensor) -> Features:
    zeros = torch.zeros_like(segments)
    return Features(tokens_BL=zeros, supervised_BL=zeros.bool(), segments_BL=segments, positions_BL=zeros)


def heads(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, 8, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def plain(query: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]], window: int = 8) -> Tensor:
    """One softmax over the keys of the row and, one after another, the keys of the tokens' own positions."""
    order = torch.arange(8)
    after = order[:, None] - order
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (after >= 0) & (after < window)
    mask = torch.cat([seen, *[torch.eye(8, dtype=torch.bool).expand(3, 8, 8)] * len(own)], dim=2)[:, None]
    keys, values = (torch.cat(parts, 2).repeat_interleave(query.shape[1] // key.shape[1], 1)
                    for parts in zip((key, value), *own, strict=True))
    return (query @ keys.mT / 4).masked_fill(~mask, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_output_and_gradients_equal_one_softmax(window: int | None, steps: int, dtype: torch.dtype, bound: float,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more tokens than the window are read in blocks of queries."""
    monkeypatch.setattr("draftsmith.modules.parts.attention.QUERIES", 2)
    states = [heads(6, dtype, 0), *(heads(2, dtype, 1 + number) for number in range(2 + 2 * steps))]
    query, key, value, *own = states
    pairs, segments = list(zip(own[::2], own[1::2], strict=True)), replace(Segments.of(rows(SEGMENTS)), window=window)
    found = []
    for mixed in (attend_segments(query, key, value, segments, pairs), plain(query, key, value, pairs, window or 8)):
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
