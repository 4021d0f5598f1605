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
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
"""Settings of its norms, under the names that vLLM, SGLang and the speculators library read."""
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (None, False), "mlp_bias": (None, False),
    "speculators_model_type": (None, "eagle3"), "dflash_config": (None,), "dspark_config": (None,),
}
"""Settings that are fixed in this implementation, with the values that a configuration may give them."""
