"""EAGLE-3 in the official code (SafeAILab/EAGLE), the speculators library and llama.cpp, whose other names are those of
a Llama.

One layer is `midlayer`, the first of several `layers.0`, as in the library whatever their number. Of the others vLLM
reads `input_layernorm` as the norm before the attention, SGLang and TensorRT-LLM `hidden_norm`: both are written."""

from typing import Any

from ...interfaces.layout import Pairs

LAYERS: Pairs = (("layers.0.", "midlayer."),)
"""The first of several layers; all of them in the speculators library and, for its names, in llama.cpp."""
TWIN, NORM = "layers.{}.hidden_norm.weight", "layers.{}.input_layernorm.weight"
"""Two names of the norm before the attention of a layer after the first."""
GGUF: Pairs = (("fc.weight", "fc.weight"), ("d2t", "d2t"), ("enc.output_norm.weight", "input_norm.weight"),
               ("blk.0.attn_norm_2.weight", "layers.0.hidden_norm.weight"))
"""Tensors in llama.cpp that a Llama has not."""
FACTORS: Pairs = (("efficient_lm_head_down_proj.weight", "head.down.weight"),
                  ("efficient_lm_head.weight", "head.up.weight"))
"""The candidate head of EAGLE-4."""
MASK_STATE, MASK_TOKENS, STEPS = "mask_hidden", ("mask_token_id", "pard_token", "ptd_token_id"), "draftsmith_depths"
"""P-EAGLE: the tensor of the masks' state, keys of their token, all of which vLLM knows, and the key of its guesses."""
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
"""Settings of its norms, under the names that vLLM, SGLang and the speculators library read."""
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (None, False), "mlp_bias": (None, False),
    "speculators_model_type": (None, "eagle3", "peagle"), "dflash_config": (None,), "dspark_config": (None,),
}
"""Settings that are fixed in this implementation, with the values that a configuration may give them."""
HEAD, KINDS = "efficient_lm_head_config", ("low_rank", "weighted_low_rank")
"""The section of EAGLE-4's candidate head, and the ways to make its factors where the file has none."""
SECTIONS: dict[str, frozenset[str]] = {
    "eagle_config": frozenset({"eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output", "use_aux_hidden_state"}),
    HEAD: frozenset({"type", "rank", "num_candidates", "smooth_factor"})}
"""Keys of the sections of EAGLE-4's configuration."""
FOURTH: dict[str, tuple[Any, ...]] = {
    **FIXED, "num_hidden_layers": (1,), "attn_norm": (None, False), "use_rope": (None, True),
    "moe_architecture": (None, False), "norm_before_fc": (None, False), "norm_before_residual": (None, False)}
"""Fixed settings of EAGLE-4: one layer, whose attention rotates and has no norm of its own."""
KEYS = frozenset({*SECTIONS, *FOURTH} | {
    "architectures", "attention_dropout", "bos_token_id", "draft_vocab_size", "dtype", "eos_token_id", "fc_norm",
    "head_dim", "hidden_size", "initializer_range", "intermediate_size", "is_causal", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "norm_output", "num_attention_heads",
    "num_key_value_heads", "pad_token_id", "pretraining_tp", "quantization_config", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "use_bidirectional_attention", "use_cache", "use_sliding_window", "vocab_size"})
"""Keys of EAGLE-4's configuration: its readers refuse any other, since it might change what is computed."""
