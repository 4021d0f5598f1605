"""Drafters over the target's states in the configurations and tensors of published layouts: what config.json says of
them, written and read, and their reduced vocabulary.

Shapes: V target vocabulary, Q entries of the draft vocabulary."""

import json
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....modules import BlockDraft, Eagle, Eagle3, PEagle, Target, UserError
from ....modules.families.eagle3.layout import MASK_TOKENS, NORMS, STEPS
from ....modules.parts.attention import SCALINGS, carried_scaling, frequencies
from ....modules.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from .checkpoint import Checkpoint
from .compressed_tensors import OUTPUT
from .export_format import ADAPTED, Places

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""The tapped layers. At the top level an id counts the layers before a state (vLLM, llama.cpp, speculators):
that of the output of layer t, from 0, is t + 1. Inside `eagle_config` it is t (SGLang, which reads no other). vLLM
falls back to `eagle_config` and takes its ids for the other kind, so that a file needs both."""
TAPS = "draftsmith_taps"  # The tapped layers by their outputs, from 0, whoever reads the file
ROPE_BASE = "draftsmith_rope_base"
"""The base of the rotary embedding, which in files of the official trainers is not the one of `rope_theta`."""
EMBEDDING = "embed_tokens.weight"
SLIDING = "sliding_attention"  # The kind of layers with a window


def linear_names(tensors: Mapping[str, Tensor], drafter: Eagle | Eagle3) -> set[str]:
    """The matrices of linear layers, with an output layer that the drafter has trained."""
    whole = {EMBEDDING} if drafter.outputs else {EMBEDDING, OUTPUT}
    return {name for name, tensor in tensors.items() if tensor.ndim == 2} - whole


def layer_config(drafter: Eagle | Eagle3 | BlockDraft, target: Target) -> dict[str, Any]:
    """A Llama configuration of the drafter's layers, under the names that engines read."""
    block = drafter.block
    further: dict[str, Any] = {} if block.rope_scaling is None else {"rope_scaling": block.rope_scaling}
    if drafter.window is not None:
        further |= {"layer_types": [SLIDING] * drafter.num_layers, "sliding_window": drafter.window,
                    "use_sliding_window": True}
    kind = "qwen3" if block.qk_norm else "llama"
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind, "hidden_act": "silu",
        "num_hidden_layers": drafter.num_layers,
        "hidden_size": block.hidden_size, "intermediate_size": block.intermediate_size,
        "num_attention_heads": block.num_heads, "num_key_value_heads": block.num_kv_heads, "head_dim": block.head_dim,
        "rms_norm_eps": block.norm_eps, "rope_theta": block.rope_base, "vocab_size": drafter.vocab_size,
        "max_position_embeddings": target.context_length, "tie_word_embeddings": False, "torch_dtype": "float32",
        "attention_bias": False, "mlp_bias": False, **further}


def eagle_config(drafter: Eagle | Eagle3, target: Target) -> dict[str, Any]:
    """config.json of a drafter in the official layout."""
    said = {**layer_config(drafter, target), ROPE_BASE: drafter.block.rope_base}
    if isinstance(drafter, Eagle):
        return {**said, "bias": drafter.config.bias}
    # TensorRT-LLM looks for this norm in eagle_config alone.
    inside = {LAYER_IDS: list(drafter.taps), "use_aux_hidden_state": True,
              "norm_before_fc": drafter.config.norm_before_fc}
    if isinstance(drafter, PEagle):
        said |= {MASK_TOKENS[0]: drafter.config.mask_token_id, STEPS: drafter.config.steps}
    # The only engine with norms of queries and keys is vLLM, under its own name of the model.
    kind = "Eagle3Qwen3ForCausalLM" if drafter.block.qk_norm else "LlamaForCausalLMEagle3"
    return {**said, "architectures": [kind], "draft_vocab_size": entries(drafter),
            "eagle_config": inside, **tapped(drafter), "num_aux_hidden_states": len(drafter.taps),
            TAPS: list(drafter.taps), **{name: getattr(drafter.config, name) for name in NORMS}}


def entries(drafter: Eagle3 | BlockDraft) -> int:
    """Number of tokens that the drafter proposes."""
    return drafter.vocab_size if drafter.token_ids_Q is None else len(drafter.token_ids_Q)


def tapped(drafter: Eagle3) -> dict[str, Any]:
    """The taps as vLLM, llama.cpp and the speculators library count them; the states' width if not the drafter's."""
    layers: dict[str, Any] = {LAYER_IDS: [tap + 1 for tap in drafter.taps]}
    wide = drafter.hidden_size
    return layers if wide == drafter.block.hidden_size else {**layers, "target_hidden_size": wide}


def sglang_command(algorithm: str, places: Places, **drafts: int) -> str:
    """SGLang's server with its name of the method, and its options of drafts, such as `num_draft_tokens`."""
    # A folder with target and head in one needs no second name.
    options = {"algorithm": algorithm, **({} if places.folder == places.target else {
        "draft-model-path": places.folder}), **drafts}
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", places.target, *(
        word for name, value in options.items() for word in (f"--speculative-{name.replace('_', '-')}", str(value))),
        *(["--lora-paths", f"{ADAPTED}={places.adapter}"] if places.added else [])])


# Reading --------------------------------------------------------------------------------------------------------------


def take_vocabulary(tensors: dict[str, Tensor], target: Target, folder: Path) -> int | None:
    """Replace `d2t` and `t2d` among the tensors by the ids of a reduced draft vocabulary; returns its size, or None.
    Entry i is token i + d2t[i], and t2d marks it. Raises UserError if they differ, or name no tokens of the target."""
    offsets_Q, inside_V = tensors.pop("d2t", None), tensors.pop("t2d", None)
    # Without both the entries are the target's tokens.
    if offsets_Q is None and inside_V is None:
        return None
    if offsets_Q is None or offsets_Q.ndim != 1 or not len(offsets_Q):
        held = "t2d and no d2t" if offsets_Q is None else "a d2t that is no list of offsets"
        raise UserError(f"{folder} holds {held}, which says which token each entry of the draft "
                        "vocabulary is; copy it again")
    ids_Q = offsets_Q + torch.arange(len(offsets_Q))
    if outside := [one for one in (int(ids_Q.min()), int(ids_Q.max())) if not 0 <= one < target.vocab_size]:
        raise UserError(f"d2t in {folder} names the token {outside[-1]}, but {target.identity.name} has "
                        f"{target.vocab_size}; load the target it was trained for")
    if inside_V is not None and len(inside_V) != target.vocab_size:
        raise UserError(f"t2d in {folder} marks {len(inside_V)} tokens, but {target.identity.name} has "
                        f"{target.vocab_size}; load the target it was trained for")
    if inside_V is not None and not torch.equal(inside_V.nonzero()[:, 0], ids_Q.sort().values):
        raise UserError(f"d2t and t2d in {folder} name different tokens; d2t[i] must be an offset, the token of "
                        "entry i being i + d2t[i]")
    tensors["token_ids"] = ids_Q
    return len(ids_Q)


def vocabulary_marks(ids_Q: Tensor, target: Target) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a reduced draft vocabulary: an offset for each entry, a mark for each token."""
    inside_V = torch.zeros(target.vocab_size, dtype=torch.bool)
    inside_V[ids_Q.cpu()] = True
    return {"d2t": ids_Q.cpu() - torch.arange(len(ids_Q)), "t2d": inside_V}


def check_joined(tensors: dict[str, Tensor], taps: Sequence[int], target: Target, folder: Path) -> None:
    """Check that `fc` is as wide as the tapped states. Raises UserError."""
    if "fc.weight" not in tensors:
        raise UserError(f"{folder} holds no fc.weight, which joins the taps; copy it again")
    # Checked before the drafter is made, whose message would name a shape and not the layers.
    width, wanted = tensors["fc.weight"].shape[1], len(taps) * target.hidden_size
    if width != wanted:
        raise UserError(f"fc in {folder} reads {width} numbers, but the {len(taps)} taps {list(taps)} of "
                        f"{target.identity.name} are {wanted}; give the layers that are read with --taps")


def named_base(said: dict[str, Any]) -> float:
    """The base of the rotary embedding in a configuration."""
    return float(said.get("rope_theta") or (said.get("rope_parameters") or {}).get("rope_theta") or OFFICIAL_ROPE_BASE)


def block_of(given: Checkpoint, target: Target, rope_base: float | None) -> BlockConfig:
    """The shape of the layers, from the configuration; with another base of the rotary embedding where one is given.
    Raises UserError if a key is missing, or the states that the drafter reads are not as wide as the target's."""
    said = given.said
    missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if key not in said]
    if missing:
        raise UserError(f"{given.config} lacks {', '.join(missing)}; copy it again")
    states = said.get("target_hidden_size") or said["hidden_size"]
    if states != target.hidden_size:
        key = "target_hidden_size" if said.get("target_hidden_size") else "hidden_size, without a target_hidden_size"
        raise UserError(f"the drafter in {given.folder} reads states {states} wide ({key}), but those of "
                        f"{target.identity.name} are {target.hidden_size} wide; load the target it was trained for")
    heads, named = said["num_attention_heads"], named_base(said)
    return BlockConfig(
        hidden_size=said["hidden_size"], intermediate_size=said["intermediate_size"], num_heads=heads,
        num_kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=said.get("head_dim") or said["hidden_size"] // heads,
        norm_eps=float(said.get("rms_norm_eps", BlockConfig.norm_eps)), rope_base=float(rope_base or named),
        # A trainer that passes over the base passes over its scaling too.
        rope_scaling=_scaling(said, target) if rope_base in (None, named) else None)


def window_in(given: Checkpoint) -> int | None:
    """The window of all layers; None where they see the whole text. Raises UserError for a window without a size, and
    for unknown kinds of layers; warns where only some layers have a window."""
    said = given.settings
    # Qwen3's two keys stand for a window where no list says which layers have one.
    kinds = {*(said.get("layer_types") or [SLIDING] * any(said.get(key) for key in ("use_sliding_window", "use_swa")))}
    if strange := kinds - {"full_attention", SLIDING}:
        raise UserError(f"{given.config} says layer_types: {json.dumps(sorted(strange))}; only full_attention and "
                        f"{SLIDING} can be imported, choose such a checkpoint")
    if SLIDING not in kinds:
        return None
    size = said.get("swa_window_size", said.get("sliding_window"))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"{given.config} has layers with a window and says sliding_window: {json.dumps(size)}; it must "
                        "be a number of tokens of at least 1, copy it again")
    if len(kinds) > 1:
        warnings.warn(f"{given.config} has layers with a window over the text (sliding_window: {size} tokens) next to "
                      "layers without, and here all see the whole of it: in longer texts the draft reads more than in "
                      "its training, and less of it may be accepted", stacklevel=4)
        return None
    return size


def _scaling(said: dict[str, Any], target: Target) -> dict[str, Any] | None:
    """The scaling of the rotary embedding. Raises UserError for one that is not implemented."""
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if (share := rope.get("partial_rotary_factor")) not in (None, 1):
        raise UserError(f"config.json says partial_rotary_factor: {json.dumps(share)}; heads rotate whole here; "
                        "take it out if the trainer passed over it, or choose another checkpoint")
    if kind == "default" or set(rope) <= {"rope_theta"}:
        return None
    named = {name: value for name, value in rope.items() if name != "type"} | {"rope_type": kind}
    head_dim = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
    scaling = carried_scaling(named, head_dim, said.get("max_position_embeddings", target.context_length))
    # A scaling without its numbers, or with others, would fail in the first pass, or draft nothing of use.
    found = None if scaling is None else frequencies(named_base(said), head_dim, scaling, torch.device("cpu"))
    if found is None or not all(0 < one < math.inf for one in (*found[0].tolist(), found[1])):
        raise UserError(f"config.json says rope_scaling: {json.dumps(rope)}; only the rope_type {', '.join(SCALINGS)} "
                        "with factors above 0 can be imported, choose such a checkpoint")
    return scaling
