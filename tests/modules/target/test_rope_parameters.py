"""Rotary parameters that a configuration nests by kind of layer."""

from typing import Any

import pytest
from draftsmith.modules import Target
from draftsmith.modules.parts.feature_drafter import block_like
from draftsmith.modules.target.loading.model_parts import rope_by_kind
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from support.architectures import random_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Olmo3Config

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LONG = {"rope_type": "longrope", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def nested(config: type[Any], rope: dict[str, Any]) -> Target:
    """A random target of two kinds of layers, of which those with full attention are rotated by `rope`."""
    settings = config(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=192, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={"sliding_attention": PLAIN, "full_attention": rope})
    return Target(AutoModelForCausalLM.from_config(settings).eval(), tiny_tokenizer(), name="nested")


@pytest.mark.parametrize("config", [Gemma3TextConfig, Olmo3Config])
def test_a_nested_longrope_bounds_the_context_where_its_frequencies_switch(config: type[Any]) -> None:
    assert nested(config, LONG).context_length == 48
    assert nested(config, {**PLAIN, "rope_theta": 1_000_000.0}).context_length == 192


def test_a_context_ends_where_the_length_of_a_pass_decides_what_is_attended_to() -> None:
    """Doge keeps the best keys beyond its window; of equal ones, of repeated tokens, another pass keeps others."""
    assert Target(random_model("Doge", keep_window_size=24), None, name="doge").context_length == 24
    assert Target(random_model("Llama"), None, name="llama").context_length == 128


def test_a_drafters_layers_are_rotated_as_those_with_full_attention() -> None:
    block = block_like(nested(Gemma3TextConfig, {**PLAIN, "rope_theta": 500_000.0}))
    assert (block.rope_base, block.rope_scaling) == (500_000.0, None)


def test_parameters_without_kinds_are_of_one_kind() -> None:
    assert rope_by_kind(PLAIN) == {"": PLAIN}
    assert rope_by_kind(None) == {"": {}}
    assert rope_by_kind({"sliding_attention": PLAIN}) == {"sliding_attention": PLAIN}
