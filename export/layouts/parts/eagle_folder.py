"""The files around an EAGLE drafter's weights: config.json, README.md, and the table of its tensors.

Shapes: V target vocabulary, Q entries of the draft vocabulary.
"""

import shlex
from typing import Any

import torch

from ....modules import BlockDraft, Eagle, Eagle3, Target
from .compressed_tensors import OUTPUT
from .export_format import Places
from .tensor_table import Table, TensorForm, layer_table

LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The tapped layers. At the top level an id counts the layers before a state (vLLM, llama.cpp, speculators):
that of the output of layer t, from 0, is t + 1. Inside `eagle_config` it is t (SGLang, which reads no other). vLLM
falls back to `eagle_config` and takes its ids for the other kind, so that a file needs both."""
TAPS = "draftsmith_taps"
"""The tapped layers by their outputs, from 0, whoever reads the file."""
ROPE_BASE = "draftsmith_rope_base"
"""The base of the rotary embedding, which in files of the official trainers is not the one of `rope_theta`."""
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
"""Settings of EAGLE-3's norms, under the names that vLLM, SGLang and the speculators library read."""
EMBEDDING = "embed_tokens.weight"
LOST_BIAS = ("vLLM drops `fc.bias`, which this drafter was trained with, and then accepts hardly a draft; train with "
             "`bias: false` for it.")
"""The part of EAGLE-1 that is lost in an engine which reads the official layout."""
MIDLAYER, FIRST = "midlayer.", "layers.0."
"""Prefixes of the first layer's tensors: of the official code with one layer, of the speculators library."""


def twin(layer: int) -> str:
    """The name under which SGLang and TensorRT-LLM read the norm before the attention of a layer after the first."""
    return f"layers.{layer}.hidden_norm.weight"


def first_table(drafter: Eagle, *, sglang: bool = False) -> Table:
    """The tensors of EAGLE-1 in the official layout.

    Args:
        sglang: as SGLang reads it: always with a bias, never with an embedding.
    """
    width = drafter.block.hidden_size
    table = {"fc.weight": TensorForm((width, 2 * width)),
             **layer_table(FIRST, drafter.block, norms=("post_attention_layernorm",))}
    if sglang or drafter.config.bias:
        table["fc.bias"] = TensorForm((width,))
    return table if sglang else {**table, EMBEDDING: TensorForm((drafter.vocab_size, width))}


def third_table(drafter: Eagle3) -> Table:
    """The tensors of EAGLE-3 in the official layout."""
    block, config, taps = drafter.block, drafter.config, len(drafter.taps)
    first = MIDLAYER if drafter.num_layers == 1 else FIRST
    ordinary = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    # The number of layers decides about the first one's name: official code and llama.cpp know `midlayer` alone.
    table = {"fc.weight": TensorForm((block.hidden_size, taps * drafter.hidden_size)),
             "norm.weight": TensorForm((block.hidden_size,)),
             **layer_table(first, block, norms=ordinary, read=2 * block.hidden_size)}
    for layer in range(1, drafter.num_layers):
        table |= layer_table(f"layers.{layer}.", block, norms=ordinary)
    if config.fc_norm:
        table |= {f"fc_norm.{tap}.weight": TensorForm((drafter.hidden_size,)) for tap in range(taps)}
    if config.norm_before_fc:
        table["input_norm.weight"] = TensorForm((taps * drafter.hidden_size,))
    # The target's embedding does not fit a drafter of another width, which has its own.
    if drafter.hidden_size != block.hidden_size:
        table[EMBEDDING] = TensorForm((drafter.vocab_size, block.hidden_size))
    table[OUTPUT] = TensorForm((entries(drafter), block.hidden_size))
    if drafter.token_ids_Q is not None:
        table |= {"d2t": TensorForm((entries(drafter),), torch.int64),
                  "t2d": TensorForm((drafter.vocab_size,), torch.bool)}
    return table


def linear_names(table: Table, drafter: Eagle | Eagle3) -> set[str]:
    """The matrices of linear layers, with an output layer that the drafter has trained."""
    whole = {EMBEDDING} if drafter.output_parameters(0) else {EMBEDDING, OUTPUT}
    return {name for name, form in table.items() if len(form.shape) == 2} - whole


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
    inside = {LAYERS: list(drafter.taps), "use_aux_hidden_state": True, "norm_before_fc": drafter.config.norm_before_fc}
    return {**said, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": entries(drafter),
            "eagle_config": inside, **tapped(drafter), "num_aux_hidden_states": len(drafter.taps),
            TAPS: list(drafter.taps), **{name: getattr(drafter.config, name) for name in NORMS}}


def entries(drafter: Eagle3 | BlockDraft) -> int:
    """Number of tokens that the drafter proposes."""
    return drafter.vocab_size if drafter.token_ids_Q is None else len(drafter.token_ids_Q)


def tapped(drafter: Eagle3) -> dict[str, Any]:
    """The tapped layers as vLLM, llama.cpp and the speculators library count them; the width of their states where it
    is not the drafter's."""
    layers: dict[str, Any] = {LAYERS: [tap + 1 for tap in drafter.taps]}
    wide = drafter.hidden_size
    return layers if wide == drafter.block.hidden_size else {**layers, "target_hidden_size": wide}


def sglang_command(algorithm: str, places: Places, **drafts: int) -> str:
    """SGLang's server with its name of the method, and its options of drafts, such as `num_draft_tokens`."""
    options = {"algorithm": algorithm, "draft-model-path": places.folder, **drafts}
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", places.target, *(
        word for name, value in options.items() for word in (f"--speculative-{name.replace('_', '-')}", str(value)))])
