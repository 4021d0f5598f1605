"""Tiny random models with recurrent layers: gated delta rules, Mamba layers, short convolutions."""

from typing import Any

from support.architectures import random_model

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
