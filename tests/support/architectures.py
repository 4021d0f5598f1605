"""Tiny random models of every architecture that must load as a target."""

from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "num_layers": 3, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "n_positions": 128, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "rotary_dim": 4, "ffn_dim": 64,
    "word_embed_proj_dim": 32, "num_heads": 4, "partial_rotary_factor": 0.5, "max_window_layers": 1,
}
SLIDING = {"sliding_window": 12, "use_sliding_window": True}
MUST_LOAD = (
    "Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen2Moe", "Mistral", "Mixtral", "Gemma", "Gemma2", "Phi", "Phi3", "Phimoe",
    "GPTNeoX", "GPT2", "GPTJ", "GPTBigCode", "CodeGen", "OPT", "Falcon", "Granite", "Cohere", "Cohere2", "Olmo2",
    "Olmo3", "SmolLM3", "Starcoder2", "StableLm", "Glm4", "Exaone4", "Nemotron", "Persimmon", "DiffLlama", "Doge",
    "Ministral", "Helium", "XGLM", "BioGpt",
)
"""Names in transformers."""


def random_model(family: str, **changes: Any) -> Any:
    config_class = getattr(transformers, f"{family}Config")
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    config = config_class(**{name: value for name, value in (SHAPE | changes).items() if name in known})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
