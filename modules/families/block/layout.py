"""Drafters of blocks in DFlash (z-lab, SpecForge) and its corrections, whose layers and norms have the same names here.

DFlash: `fc`, `hidden_norm`, `layers.{i}` of Qwen3, `norm`; the embedding, with the row of the mask token, and the
output layer are the target's. Each correction adds layers, some of which are parameters without `.weight` there."""

from typing import Any, NamedTuple

from ...interfaces.layout import Pairs
from .corrections import CANDIDATES, GROUP, TAPS, CorrectionName

MARKOV = ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")  # Layers of DSpark's forms
NAMES: Pairs = (*((f"markov_head.{name}", f"correction.{name}") for name in MARKOV),
                ("candidate_selector.predecessor_codebook", "correction.predecessor_codebook.weight"),
                ("candidate_selector.successor_codebook", "correction.successor_codebook.weight"),
                ("candidate_selector.hidden_projection.", "correction.hidden_projection."),
                ("prefix_gru.weight_ih_l0", "correction.prefix_gru.weight_ih_l0.weight"),
                ("prefix_gru.weight_hh_l0", "correction.prefix_gru.weight_hh_l0.weight"),
                ("embed_proj.", "correction.embed_proj."), ("xpress_head.", "correction."),
                ("confidence_head.proj.", "confidence."))
READ: Pairs = (*NAMES, ("confidence_proj.", "confidence."), *((name, f"correction.{name}") for name in MARKOV),
               ("candidate_selector.", "correction."), ("markov_head.", "correction."))
"""With the names in files of ModelOpt."""
GGUF: Pairs = (("fc.weight", "fc.weight"), ("d2t", "d2t"), ("enc.output_norm.weight", "hidden_norm.weight"),
               ("conf_proj.", "confidence_head.proj."), ("markov_w1.", "markov_head.markov_w1."),
               ("markov_w2.", "markov_head.markov_w2."),
               ("selector_predecessor.weight", "candidate_selector.predecessor_codebook"),
               ("selector_successor.weight", "candidate_selector.successor_codebook"),
               ("selector_hidden.", "candidate_selector.hidden_projection."),
               ("blk.{i}.attn_conv_base", "layers.{i}.attention_conv.base_kernel"),
               ("blk.{i}.attn_conv_proj.", "layers.{i}.attention_conv.kernel_projection."),
               ("blk.{i}.ffn_conv_base", "layers.{i}.mlp_conv.base_kernel"),
               ("blk.{i}.ffn_conv_proj.", "layers.{i}.mlp_conv.kernel_projection."))
"""Tensors in llama.cpp that a Qwen 3 has not, by the names of DFlash."""
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (None, False), "mlp_bias": (None, False),
    **dict.fromkeys(("is_causal", "causal", "causal_head", "sample_from_anchor", "shift_label",
                     "sliding_window_non_causal"), (None, False, True)),
    "partial_rotary_factor": (None, 1), "speculators_model_type": (None, "dflash", "dspark", "dflash2"),
    "conv_kernel_size": (None, TAPS), "conv_group_size": (None, GROUP), "selector_top_k": (None, CANDIDATES),
    "lilicorr_enabled": (None, False),
    "markov_head_type": (None, "vanilla", "gated", "rnn"),
    "input_embedding_scale": (None, 1), "output_multiplier": (None, 1), "final_logit_softcapping": (None,),
}
"""Settings that are fixed in this implementation, with the values that a configuration may give them."""
FORMS: dict[CorrectionName, str] = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
"""Corrections by their names in `markov_head_type`."""


class Kind(NamedTuple):
    """A method with a name and a layout of its own."""

    title: str
    architecture: str
    mark: str  # A layer of its correction, with as many columns as the rank, by which it is known; empty for none
    engines: tuple[str, ...]  # Engines that load it in one of the layouts
    library: str | None = None  # The speculators library's name; None where it has none
    method: str = "dflash"  # vLLM's and llama.cpp's name


_DSPARK = Kind("DSpark", "Qwen3DSparkModel", "markov_w1", ("vLLM", "SGLang", "TensorRT-LLM"), "dspark", "dspark")
KINDS: dict[CorrectionName, Kind] = {
    "none": Kind("DFlash", "DFlashDraftModel", "", (*_DSPARK.engines, "llama.cpp", "OpenVINO GenAI"), "dflash"),
    "markov": _DSPARK._replace(engines=(*_DSPARK.engines, "llama.cpp")), "gated": _DSPARK, "rnn": _DSPARK,
    "selector": Kind("DFlash 2", "DFlash2DraftModel", "predecessor_codebook", ("vLLM", "SGLang", "llama.cpp"),
                     "dflash2"),
    "refiner": Kind("XPress", "Qwen3XPressModel", "w1", ("vLLM",)),
    "gru": Kind("Domino", "DFlashDraftModel", "embed_proj.2", ("SGLang",)),
}
"""Methods by their correction."""
