"""The files around an EAGLE drafter's weights: config.json, README.md, and the table of its tensors.

Shapes: V target vocabulary, Q entries of the draft vocabulary.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ....modules import BlockDraft, Eagle, Eagle3, Target
from ....modules.families.eagle3.layout import NORMS
from .compressed_tensors import OUTPUT
from .export_format import Places

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""The tapped layers. At the top level an id counts the layers before a state (vLLM, llama.cpp, speculators):
that of the output of layer t, from 0, is t + 1. Inside `eagle_config` it is t (SGLang, which reads no other). vLLM
falls back to `eagle_config` and takes its ids for the other kind, so that a file needs both."""
TAPS = "draftsmith_taps"  # The tapped layers by their outputs, from 0, whoever reads the file
ROPE_BASE = "draftsmith_rope_base"
"""The base of the rotary embedding, which in files of the official trainers is not the one of `rope_theta`."""
EMBEDDING = "embed_tokens.weight"
LOST_BIAS = ("vLLM drops `fc.bias`, which this drafter was trained with, and then accepts hardly a draft; train with "
             "`bias: false` for it.")
"""The part of EAGLE-1 that is lost in an engine which reads the official layout."""
def linear_names(tensors: Mapping[str, Tensor], drafter: Eagle | Eagle3) -> set[str]:
    """The matrices of linear layers, with an output layer that the drafter has trained."""
    whole = {EMBEDDING} if drafter.output_parameters(0) else {EMBEDDING, OUTPUT}
    return {name for name, tensor in tensors.items() if tensor.ndim == 2} - whole


def layer_config(drafter: Eagle | Eagle3 | BlockDraft, target: Target) -> dict[str, Any]:
    """A Llama configuration of the drafter's layers, under the names that engines read."""
    block = drafter.block
    scaled = {} if block.rope_scaling is None else {"rope_scaling": block.rope_scaling}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": drafter.num_layers,
        "hidden_size": block.hidden_size, "intermediate_size": block.intermediate_size,
        "num_attention_heads": block.num_heads, "num_key_value_heads": block.num_kv_heads, "head_dim": block.head_dim,
        "rms_norm_eps": block.norm_eps, "rope_theta": block.rope_base, "vocab_size": drafter.vocab_size,
        "max_position_embeddings": target.context_length, "tie_word_embeddings": False, "torch_dtype": "float32",
        "attention_bias": False, "mlp_bias": False, **scaled,
    }


def eagle_config(drafter: Eagle | Eagle3, target: Target) -> dict[str, Any]:
    """config.json of a drafter in the official layout."""
    said = {**layer_config(drafter, target), ROPE_BASE: drafter.block.rope_base}
    if isinstance(drafter, Eagle):
        return {**said, "bias": drafter.config.bias}
    # TensorRT-LLM looks for this norm in eagle_config alone.
    inside = {LAYER_IDS: list(drafter.taps), "use_aux_hidden_state": True,
              "norm_before_fc": drafter.config.norm_before_fc}
    return {**said, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": entries(drafter),
            "eagle_config": inside, **tapped(drafter), "num_aux_hidden_states": len(drafter.taps),
            TAPS: list(drafter.taps), **{name: getattr(drafter.config, name) for name in NORMS}}


def entries(drafter: Eagle3 | BlockDraft) -> int:
    """Number of tokens that the drafter proposes."""
    return drafter.vocab_size if drafter.token_ids_Q is None else len(drafter.token_ids_Q)


def tapped(drafter: Eagle3) -> dict[str, Any]:
    """The tapped layers as vLLM, llama.cpp and the speculators library count them; the width of their states where it
    is not the drafter's."""
    layers: dict[str, Any] = {LAYER_IDS: [tap + 1 for tap in drafter.taps]}
    wide = drafter.hidden_size
    return layers if wide == drafter.block.hidden_size else {**layers, "target_hidden_size": wide}


def sglang_command(algorithm: str, places: Places, **drafts: int) -> str:
    """SGLang's server with its name of the method, and its options of drafts, such as `num_draft_tokens`."""
    options = {"algorithm": algorithm, "draft-model-path": places.folder, **drafts}
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", places.target, *(
        word for name, value in options.items() for word in (f"--speculative-{name.replace('_', '-')}", str(value)))])
