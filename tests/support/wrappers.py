"""Tiny random models of text and pictures: with a class for their text alone, and without one."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

_TEXT: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_PICTURES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_heads": 4,
    "head_dim": 8, "image_size": 28, "patch_size": 14, "depth": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {"sliding_window": None},
    "gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3_vl": {"rope_parameters": _AXES},
    "qwen3_5": {"rope_parameters": _AXES | {"partial_rotary_factor": 1.0},
                "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
                "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
"""Types in transformers with what their texts have of their own. That of Qwen3-VL has no class without a wrapper."""


def random_wrapper(name: str, **changes: Any) -> Any:
    """The model with random weights, whose towers are there as well, and changes of its text's configuration."""
    kind = CONFIG_MAPPING[name]
    text, pictures = kind().text_config, kind().vision_config
    config = kind(text_config={"model_type": text.model_type} | _known(text, _TEXT | WRAPPERS[name] | changes),
                  vision_config={"model_type": pictures.model_type} | _known(pictures, _PICTURES),
                  tie_word_embeddings=False, image_token_id=98, image_token_index=98, video_token_id=97)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def _known(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    names = {*config.to_dict(), *config.attribute_map}
    return {key: value for key, value in fields.items() if key in names}
