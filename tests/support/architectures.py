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
MUST_LOAD = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen2Moe", "Mistral", "Mixtral", "Gemma", "Gemma2", "Phi", "Phi3",
             "Phimoe", "GPTNeoX", "GPT2", "GPTJ", "GPTBigCode", "CodeGen", "OPT", "Falcon", "Granite", "Cohere",
             "Cohere2", "Olmo2", "Olmo3", "SmolLM3", "Starcoder2", "StableLm", "Glm4", "Exaone4", "Nemotron",
             "Persimmon", "DiffLlama", "Doge", "Ministral", "Helium", "XGLM", "BioGpt")
"""Names in transformers."""


_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4,
    "num_key_value_heads": 4, "partial_rotary_factor": 1.0, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}
_BY_TURNS = ["sliding_attention", "full_attention"]
_GEMMA4 = {"sliding_window": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "layer_types": 2 * _BY_TURNS,
           "num_hidden_layers": 4}
_EARLIER_KEYS = {"num_hidden_layers": 6, "layer_types": 3 * _BY_TURNS, "num_kv_shared_layers": 2, "sliding_window": 8,
                 "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}
TRAITS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOss", {"sliding_window": 8, "intermediate_size": 32, "num_experts_per_tok": 4}),
    "granite-swa": ("GraniteSWA", {"sliding_window": 8}),
    "granite-moe-swa": ("GraniteMoeSWA", {"sliding_window": 8}),
    "deepseek-v2": ("DeepseekV2", _LATENT),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "glm-4.7-flash": ("Glm4MoeLite", _LATENT),
    "minicpm3": ("MiniCPM3", _LATENT),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4-moe": ("Gemma4", _GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "top_k_experts": 2,
                                        "enable_moe_block": True, "final_logit_softcapping": 5.0}),
    "gemma4-e2b": ("Gemma4", _GEMMA4 | _EARLIER_KEYS | {"use_double_wide_mlp": True}),
    "mimo-v2-flash": ("MiMoV2Flash", {"sliding_window": 8, "v_head_dim": 6, "n_routed_experts": 4}),
    "llama4": ("Llama4", {"attention_chunk_size": 8, "floor_scale": 4, "no_rope_layers": [1, 0, 1, 0],
                          "num_hidden_layers": 4, "moe_layers": [3], "intermediate_size_mlp": 64,
                          "num_experts_per_tok": 1}),
}
"""Targets with sinks, latent attention, layers of unlike shape, keys of earlier layers, or chunks: a name in
transformers and what differs from `SHAPE`."""


def random_model(family: str, **changes: Any) -> Any:
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    known = {*config_class().to_dict(), *config_class.attribute_map, "global_head_dim", "num_global_key_value_heads"}
    config = config_class(**{name: value for name, value in (SHAPE | changes).items() if name in known})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def random_trait(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A random model of `TRAITS`."""
    family, fields = TRAITS[name]
    return random_model(family, **(fields | changes)).to(dtype)
