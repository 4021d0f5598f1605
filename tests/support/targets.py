"""Tiny random models of every architecture that must load as a target, and targets made of them."""

from typing import Any

import torch
import transformers
from draftsmith.modules import Adapter, Target
from draftsmith.modules.target.adapter import LowRank, choose_layers, linear_layers
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

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


_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
           "linear_conv_kernel_dim": 4, "num_hidden_layers": 4}
_MIXTURE = {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
_MAMBA2 = {"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
           "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 2, "mamba_ngroups": 2, "ssm_state_size": 8,
           "n_groups": 2, "conv_kernel": 4, "mamba_chunk_size": 8, "chunk_size": 8}
_MAMBA1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "attn_layer_period": 2,
           "attn_layer_offset": 1}
_SHORT = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3Next": _LINEAR | _MIXTURE,
    "NemotronH": _MAMBA2 | {"layer_types": ["mamba", "attention", "mlp"],
                            "layers_block_type": ["mamba", "attention", "mlp"]},
    "KimiLinear": {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "kv_lora_rank": 16,
                   "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 12,
                   "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
                   "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "Lfm2": _SHORT,
    "Jamba": _MAMBA1 | {"expert_layer_period": 2, "expert_layer_offset": 1},
    "Qwen3_5Text": _LINEAR,
    "Qwen3_5MoeText": _LINEAR | _MIXTURE,
    "OlmoHybrid": _LINEAR,
    "Bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1": _MAMBA2 | {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": _MAMBA2 | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
                                   "layers_block_type": ["mamba", "attention", "mamba"],
                                   "shared_intermediate_size": 32, "position_embedding_type": "rope"},
    "Zamba2": _MAMBA2 | {"n_mamba_heads": 8, "mamba_headdim": 8, "hybrid_layer_ids": [1], "num_mem_blocks": 1,
                         "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "Lfm2Moe": _SHORT | {"num_dense_layers": 1},
    "Lfm3": {"num_hidden_layers": 4},
}
"""Names in transformers, and what differs from `SHAPE`; the first ones have all kinds of recurrences."""
KINDS = 5  # How many of them have all kinds


def recurrent_model(family: str, **changes: Any) -> Any:
    """A random model of a family of `RECURRENT`, in float32."""
    return random_model(family, **(RECURRENT[family] | changes))


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


def random_target(layers: int, **gemma: float) -> Target:
    """A random model with more layers than the shared one: a Llama, or a Gemma 2 with these settings."""
    model = random_model("Gemma2" if gemma else "Llama", num_hidden_layers=layers, max_position_embeddings=256, **gemma)
    return Target(model.double(), tiny_tokenizer(), name="random")


def tied_target() -> Target:
    """A tiny target whose output layer is its embedding."""
    with torch.random.fork_rng(devices=[]):
        model = random_model("Llama", num_hidden_layers=2, max_position_embeddings=2048, tie_word_embeddings=True)
    return Target(model, tiny_tokenizer(), name="tiny-tied")


def templated_target(source: str | None) -> Target:
    """The tiny target with another chat template; with None a base model."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = source
    return Target(tiny_model(), tokenizer, name="templated")


def with_broken(*tokens: int, eos: int | None = None) -> Target:
    """The tiny target with NaN embeddings."""
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[list(tokens)] = torch.nan
    if eos is not None:
        model.generation_config.eos_token_id = eos
    return Target(model, tiny_tokenizer(), name="broken")


def random_adapter(target: Target, modules: tuple[str, ...] = (), rank: int = 3, size: float = 0.2) -> Adapter:
    """An adapter that changes a lot."""
    generator = torch.Generator().manual_seed(1)
    linears = linear_layers(target.model)
    return Adapter({name: LowRank(a_RI=size * torch.randn(rank, linears[name].in_features, generator=generator),
                                  b_OR=size * torch.randn(linears[name].out_features, rank, generator=generator))
                    for name in choose_layers(target.model, modules, without=target.head)}, 0.7)


def six_layers(rows: int = 100) -> Target:
    """A random Llama of six layers, so that three can be tapped, as wide as `tiny_target` and with its tokenizer."""
    return Target(random_model("Llama", vocab_size=rows, num_hidden_layers=6, max_position_embeddings=2048,
                               initializer_range=0.02, tie_word_embeddings=False), tiny_tokenizer(), name="tiny-target")
