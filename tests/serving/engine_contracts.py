"""Contracts of serving engines: the parameters, keys and layers that their own loaders read of an exported folder.

Each contract names all that an engine would not do as the drafter was trained: a parameter without a tensor, a tensor
that no parameter reads, a shape, a key. Engines say little of it themselves: they start, and accept fewer drafts.
Sources: the wheel of SGLang 0.5.23 (`srt/models/llama_eagle3.py`, `llama_eagle.py`,
`model_runner_components/spec_aux_hidden_state.py`), TensorRT-LLM of 2026
(`_torch/models/modeling_speculative.py`, `modeling_dflash.py`, `modeling_dspark_qwen3.py`), Text Generation Inference 3
(`layers/medusa.py`), the conversion of llama.cpp.
"""

import json
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

Shapes = dict[str, tuple[int, ...]]
LAYERS = "eagle_aux_hidden_state_layer_ids"


class Folder(NamedTuple):
    """An exported folder."""

    config: dict[str, Any]
    shapes: Shapes  # Shapes of the tensors by name
    dtypes: dict[str, torch.dtype]
    files: set[str]

    @classmethod
    def read(cls, folder: Path) -> "Folder":
        """Its configuration and tensors."""
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        return cls(json.loads((folder / "config.json").read_text()),
                   {name: tuple(tensor.shape) for name, tensor in tensors.items()},
                   {name: tensor.dtype for name, tensor in tensors.items()}, {path.name for path in folder.iterdir()})


def compared(found: Shapes, read: Shapes, passed_over: Iterable[str] = ()) -> list[str]:
    """Differences between the tensors of a folder and the parameters of an engine's model."""
    faults = [f"no tensor for {name}" for name in sorted(read.keys() - found.keys())]
    faults += [f"nothing reads {name}" for name in sorted(found.keys() - read.keys() - set(passed_over))]
    return faults + [f"{name} is {found[name]}, read as {read[name]}" for name in sorted(read.keys() & found.keys())
                     if found[name] != read[name]]


def asked(config: dict[str, Any], **wanted: Any) -> list[str]:
    """Keys of a configuration with another value than an engine needs."""
    return [f"{key} is {config.get(key)!r}, not {value!r}" for key, value in wanted.items() if config.get(key) != value]


def llama_layer(config: dict[str, Any], prefix: str, norms: Iterable[str], read: int) -> Shapes:
    """Parameters of a decoder layer whose attention reads `read` numbers."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: Shapes = {"self_attn.q_proj": (queries, read), "self_attn.k_proj": (keys, read),
                      "self_attn.v_proj": (keys, read), "self_attn.o_proj": (width, queries),
                      "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    shapes |= dict.fromkeys(norms, (width,))
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


# EAGLE-3 -------------------------------------------------------------------------------------------------------------


def third_of(config: dict[str, Any], taps: int, further: tuple[str, ...], norm_before_fc: bool) -> Shapes:
    """Parameters of EAGLE-3 with `taps` tapped layers; `further` names the norms of the layers after the first."""
    width, wide = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    first = "midlayer." if config["num_hidden_layers"] == 1 else "layers.0."
    ordinary = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    read = {"fc.weight": (width, taps * wide), "norm.weight": (width,),
            "lm_head.weight": (config["draft_vocab_size"], width), **llama_layer(config, first, ordinary, 2 * width)}
    for layer in range(1, config["num_hidden_layers"]):
        read |= llama_layer(config, f"layers.{layer}.", (*further, "post_attention_layernorm"), width)
    if config.get("fc_norm"):
        read |= {f"fc_norm.{tap}.weight": (wide,) for tap in range(taps)}
    if norm_before_fc:
        read["input_norm.weight"] = (taps * wide,)
    if config["draft_vocab_size"] != config["vocab_size"]:
        read["d2t"] = (config["draft_vocab_size"],)
    if wide != width:
        read["embed_tokens.weight"] = (config["vocab_size"], width)
    return read


def unread_norms(config: dict[str, Any]) -> set[str]:
    """Norms of further layers under the name that the engine at hand does not read."""
    return {f"layers.{layer}.{norm}.weight" for layer in range(1, config["num_hidden_layers"])
            for norm in ("input_layernorm", "hidden_norm")}


def third_for_sglang(folder: Folder) -> list[str]:
    """SGLang 0.5.23: `LlamaForCausalLMEagle3`. Further layers read `hidden_norm`; t2d is passed over."""
    config = folder.config
    inside = config.get("eagle_config") or {}
    taps = config.get("num_aux_hidden_states") or len(inside.get(LAYERS) or [0] * 3)
    faults = asked(config, architectures=["LlamaForCausalLMEagle3"], tie_word_embeddings=False)
    faults += [f"no {key}" for key in ("draft_vocab_size",) if key not in config]
    faults += asked(config, norm_before_residual=False) if config.get("norm_before_residual") else []
    if taps == 1 and "target_hidden_size" not in config:
        faults.append("fc is passed over, since its input is as wide as the embedding")
    if len(inside.get(LAYERS) or []) != taps:
        faults.append(f"eagle_config names other than {taps} layers")
    read = third_of(config, taps, ("hidden_norm",), bool(inside.get("norm_before_fc", config.get("norm_before_fc"))))
    return faults + compared(folder.shapes, read, {"t2d", *unread_norms(config)})


def third_for_tensorrt(folder: Folder) -> list[str]:
    """TensorRT-LLM: `EAGLE3LlamaForCausalLM`, which it makes of any name with Eagle3 in it. The layers come from the
    command line; `norm_before_fc` from `eagle_config` alone; d2t is read as it comes."""
    config = folder.config
    taps = len(config["draftsmith_taps"])
    faults = [f"no {key}" for key in ("draft_vocab_size", "attention_bias", "torch_dtype") if key not in config]
    faults += [] if "Eagle3" in config["architectures"][0] else ["no EAGLE-3 by its architecture"]
    faults += asked(config, norm_before_residual=False) if config.get("norm_before_residual") else []
    faults += ["no fc with a single layer"] if taps == 1 else []
    read = third_of(config, taps, ("hidden_norm",), bool(config["eagle_config"].get("norm_before_fc")))
    return faults + compared(folder.shapes, read, {"t2d", *unread_norms(config)})


def third_for_llama_cpp(folder: Folder) -> list[str]:
    """llama.cpp's conversion: one layer, exactly three tapped ones, no norm of its own for each, none fed back."""
    config = folder.config
    faults = asked(config, num_hidden_layers=1)
    faults += [f"{len(config.get(LAYERS) or [])} tapped layers, not 3"] if len(config.get(LAYERS) or []) != 3 else []
    faults += [f"{norm} is unknown" for norm in ("fc_norm", "norm_output") if config.get(norm)]
    read = third_of(config, 3, (), bool(config.get("norm_before_fc")))
    return faults + compared(folder.shapes, read, {"t2d"})


# EAGLE-1, Medusa, draft models ---------------------------------------------------------------------------------------


def first_for_sglang(folder: Folder) -> list[str]:
    """SGLang 0.5.23: `LlamaForCausalLMEagle`, whose fc has a bias that is random where the file has none."""
    config, width = folder.config, folder.config["hidden_size"]
    read = {"fc.weight": (width, 2 * width), "fc.bias": (width,),
            **llama_layer(config, "layers.0.", ("post_attention_layernorm",), width)}
    return asked(config, architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1, tie_word_embeddings=False) + \
        compared(folder.shapes, read, {"embed_tokens.weight"})


def medusa_for_tgi(folder: Folder) -> list[str]:
    """Text Generation Inference 3: `MedusaHeadV1`, which it takes for one by the lack of `architectures`."""
    config, faults = folder.config, []
    faults += [] if "medusa_lm_head.safetensors" in folder.files else ["no medusa_lm_head.safetensors"]
    faults += ["architectures is there"] if "architectures" in config else []
    layers, width = config["medusa_num_layers"], config["hidden_size"]
    read: Shapes = {}
    for head in range(config["medusa_num_heads"]):
        read |= {f"{head}.{layer}.linear.weight": (width, width) for layer in range(layers)}
        read |= {f"{head}.{layer}.linear.bias": (width,) for layer in range(layers)}
        read[f"{head}.{layers}.weight"] = (config["vocab_size"], width)
    return faults + compared(folder.shapes, read)


def draft_model(folder: Folder) -> list[str]:
    """SGLang's STANDALONE and TensorRT-LLM's DraftTarget: an ordinary model, by the names of transformers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**folder.config))
    tied = set(model._tied_weights_keys or ()) if folder.config.get("tie_word_embeddings") else set()
    read = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    faults = [f"no {name}" for name in ("tokenizer.json", "tokenizer_config.json") if name not in folder.files]
    return faults + compared(folder.shapes, read)


def mask_drafts(folder: Folder) -> list[str]:
    """TensorRT-LLM's PARD: the same, with the id of the mask token, for which it would take one past the vocabulary."""
    token = folder.config.get("pard_token")
    known = isinstance(token, int) and 0 <= token < folder.config["vocab_size"]
    return draft_model(folder) + ([] if known else [f"pard_token is {token!r}"])


# Drafters of blocks --------------------------------------------------------------------------------------------------


def backbone_of(config: dict[str, Any]) -> Shapes:
    """Parameters of the layers of a drafter of blocks."""
    width, head, read = config["hidden_size"], config["head_dim"], dict[str, tuple[int, ...]]()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        read |= llama_layer(config, prefix, ("input_layernorm", "post_attention_layernorm"), width)
        read |= {f"{prefix}self_attn.q_norm.weight": (head,), f"{prefix}self_attn.k_norm.weight": (head,)}
    taps = config["dflash_config"].get("target_layer_ids") or ()
    return read | {"fc.weight": (width, len(taps) * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}


def dspark_heads(config: dict[str, Any]) -> Shapes:
    """Parameters of DSpark's two heads, by the keys at the top."""
    width, rank = config["hidden_size"], config["markov_rank"]
    read: Shapes = {f"markov_head.{name}.weight": (config["vocab_size"], rank) for name in ("markov_w1", "markov_w2")}
    for form, name, shape in (("gated", "gate_proj", (rank, width + rank)),
                              ("rnn", "joint_proj", (3 * rank, width + 2 * rank))):
        if config["markov_head_type"] == form:
            read |= {f"markov_head.{name}.weight": shape, f"markov_head.{name}.bias": shape[:1]}
    if config.get("enable_confidence_head"):
        joined = width + rank * config["confidence_head_with_markov"]
        read |= {"confidence_head.proj.weight": (1, joined), "confidence_head.proj.bias": (1,)}
    return read


def blocks_for_sglang(folder: Folder) -> list[str]:
    """SGLang 0.5.23: DFLASH and DSPARK. It reads `is_causal` at the top alone, takes a missing `sample_from_anchor` for
    true, and has no reduced vocabulary. With the projector `domino` it takes no key for granted, and refuses an
    alignment that differs from `sample_from_anchor`, or an `emb_dim` that differs at the top."""
    config, inside = folder.config, folder.config.get("dflash_config") or {}
    faults = [f"no {key}" for key in ("is_causal", "sample_from_anchor", "block_size") if key not in config]
    faults += [f"no {key} in dflash_config" for key in ("target_layer_ids", "mask_token_id") if key not in inside]
    faults += asked(config, draft_vocab_size=config["vocab_size"])
    width, read = config["hidden_size"], backbone_of(config)
    if (rank := inside.get("selector_rank")) is not None:
        faults += asked(config, architectures=["DFlash2DraftModel"])
        faults += asked(inside, conv_kernel_size=2, conv_group_size=16, selector_top_k=16)
        read |= {f"candidate_selector.{side}_codebook": (config["vocab_size"], rank)
                 for side in ("predecessor", "successor")}
        read["candidate_selector.hidden_projection.weight"] = (rank, width)
        for layer, conv in product(range(config["num_hidden_layers"]), ("attention_conv", "mlp_conv")):
            read |= {f"layers.{layer}.{conv}.base_kernel": (2, 2, width),
                     f"layers.{layer}.{conv}.kernel_projection.weight": (4 * width // 16, width)}
    elif inside.get("projector_type") == "domino":
        faults += asked(config, architectures=["DFlashDraftModel"])
        faults += asked(inside, pure_draft_prefix_len=1)
        faults += ["a single slot"] if config["block_size"] < 2 else []
        faults += ["no alignment"] if not isinstance(inside.get("shift_label"), bool) else asked(
            config, sample_from_anchor=inside["shift_label"])
        rank, state = inside["emb_dim"], inside["gru_hidden_dim"]
        faults += asked({"emb_dim": rank, **config}, emb_dim=rank)
        read |= {"prefix_gru.weight_ih_l0": (3 * state, width), "prefix_gru.weight_hh_l0": (3 * state, state),
                 "embed_proj.0.weight": (rank, width + state), "embed_proj.2.weight": (config["vocab_size"], rank)}
    elif "markov_rank" in config:
        faults += asked(config, architectures=["Qwen3DSparkModel"])
        read |= dspark_heads(config)
    else:
        faults += asked(config, architectures=["DFlashDraftModel"])
    return faults + compared(folder.shapes, read)


def blocks_for_tensorrt(folder: Folder) -> list[str]:
    """TensorRT-LLM's DFlash and DSpark: slots see their whole block whatever the file says, the first slot of DFlash
    guesses nothing and that of DSpark does, both draft over the target's vocabulary. DFlash is a Qwen3 by its
    `model_type` with its keys in `dflash_config`; DSpark has them at the top, and every tensor must have a
    parameter."""
    config, sparks = folder.config, "markov_rank" in folder.config
    faults = asked(config, is_causal=False, use_sliding_window=False, draft_vocab_size=config["vocab_size"],
                   sample_from_anchor=sparks, model_type="qwen3",
                   architectures=["Qwen3DSparkModel" if sparks else "DFlashDraftModel"])
    place = config if sparks else config["dflash_config"]
    faults += [f"no {key}" for key in ("target_layer_ids", "mask_token_id") if key not in place]
    faults += [] if "block_size" in config else ["no block_size"]
    faults += [] if (config.get("rope_parameters") or config).get("rope_theta") else ["no rope_theta"]
    return faults + compared(folder.shapes, backbone_of(config) | (dspark_heads(config) if sparks else {}))


def windowed(config: dict[str, Any], layer: int) -> bool:
    """True if a layer sees a window of the text alone."""
    return bool(config["layer_types"][layer] == "sliding_attention")


def stated(*values: bool | None) -> bool:
    """The first value that is stated."""
    return next(bool(value) for value in values if value is not None)


CAUSAL: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "vLLM": lambda config, layer: stated(
        config.get("is_causal"), config["dflash_config"].get("causal"), windowed(config, layer)),
    "vLLM, speculators": lambda config, layer: stated(
        config["transformer_layer_config"].get("is_causal"), not config.get("sliding_window_non_causal", True)),
    "SGLang": lambda config, layer: stated(config.get("is_causal"), windowed(config, layer)),
    "llama.cpp": lambda config, layer: stated(config.get("is_causal"), config["dflash_config"].get("causal"), False),
}
"""Whether a slot of a layer sees those before it alone, by engine and layout (vLLM 0.33, SGLang 0.5.23, llama.cpp's
conversion)."""
ANCHORS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "vLLM, DFlash": lambda config: config["dflash_config"].get("sample_from_anchor", False),
    "vLLM, DSpark": lambda config: config.get("sample_from_anchor", True),
    "vLLM, speculators": lambda config: config.get("sample_from_anchor", False),
    "SGLang": lambda config: config.get("sample_from_anchor", True),
    "llama.cpp": lambda config: config.get("sample_from_anchor", True),
    "llama.cpp, speculators": lambda config: config.get("sample_from_anchor", False),
}
"""Whether the first slot of a block guesses, in the same way."""


CONTRACTS: dict[tuple[str, str, str], Callable[[Folder], list[str]]] = {
    ("eagle3", "eagle", "SGLang 0.5.23"): third_for_sglang,
    ("eagle3", "eagle", "TensorRT-LLM"): third_for_tensorrt,
    ("eagle3", "eagle", "llama.cpp"): third_for_llama_cpp,
    ("block", "dflash", "SGLang 0.5.23"): blocks_for_sglang,
    ("block", "dflash", "TensorRT-LLM"): blocks_for_tensorrt,
    ("eagle", "eagle-sglang", "SGLang 0.5.23"): first_for_sglang,
    ("medusa", "medusa", "TGI 3"): medusa_for_tgi,
    ("draft_lm", "huggingface", "SGLang 0.5.23"): draft_model,
    ("draft_lm", "huggingface", "TensorRT-LLM"): draft_model,
    ("draft_lm, mask tokens", "huggingface", "TensorRT-LLM"): mask_drafts,
}
"""Contracts by family, format and engine."""


# Tapped layers -------------------------------------------------------------------------------------------------------


def states_of_sglang(config: dict[str, Any]) -> list[int]:
    """The `hidden_states` that SGLang gives the drafter: the ids of `eagle_config` alone, one added to each."""
    return [layer + 1 for layer in config["eagle_config"][LAYERS]]


def states_of_vllm(config: dict[str, Any]) -> list[int]:
    """Those of vLLM 0.32 and 0.33: the ids of the top level, else those of `eagle_config`, unchanged; sorted."""
    ids = config.get(LAYERS) or config["eagle_config"][LAYERS]
    return sorted(set(ids))


def states_of_llama_cpp(config: dict[str, Any]) -> list[int]:
    """Those of llama.cpp's conversion: the ids of the top level."""
    return list(config[LAYERS])
