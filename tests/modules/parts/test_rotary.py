"""The rotary embedding with the scalings of long-context targets, against transformers' own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import import_drafter
from draftsmith.export.layouts.eagle import export_eagle
from draftsmith.export.layouts.kangaroo import KANGAROO
from draftsmith.modules import Eagle, Eagle3, Eagle3Config, EagleConfig, Kangaroo, KangarooConfig, Target, UserError
from draftsmith.modules.parts.attention import carried_scaling, rotate, rotation
from draftsmith.modules.parts.decoder_block import BlockConfig
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
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
