"""Small models of a target's own kind: its configuration with fewer layers or less width, or some of its layers copied.

Shapes: V vocabulary, D hidden size."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UserError
from .attention.tree_attention import NAME, attend_by, register
from .loading.model_parts import decoder_of, layer_list, whole
from .loading.stored_weights import check_claims
from .model import Target

_FALLBACK_FIELDS = ("rms_norm_eps", "initializer_range", "rope_parameters", "bos_token_id", "eos_token_id",
                    "pad_token_id", "max_position_embeddings", "hidden_act")
_MACHINE_FIELDS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


def smaller(target: Target, *, num_layers: int, hidden_size: int | None = None, num_heads: int | None = None) -> Any:
    """The target's configuration with fewer layers and another width; the rest keeps the target's proportions.
    UserError if the width and the heads do not divide. A configuration that is no plain causal language model's, or has
    recurrent layers or layers of unlike shape, becomes a Llama's of the same numbers: a draft model reads the nodes of
    a tree level by level."""
    own, given = target.config, target.config.to_dict()
    width, unlike = hidden_size or own.hidden_size, bool(given.get("per_layer_config"))
    ratio = own.num_attention_heads / (given.get("num_key_value_heads") or own.num_attention_heads)
    head_dim = given.get("head_dim") or own.hidden_size // own.num_attention_heads
    if num_heads is not None:
        if width % num_heads or (width // num_heads) % 2:
            raise UserError(f"hidden_size {width} does not divide into {num_heads} heads of an even width; choose "
                            "another num_heads or hidden_size")
        head_dim = width // num_heads
    heads = num_heads or max(1, width // head_dim)
    shared = max(1, int(heads / ratio))
    # Attention in groups needs heads that the key-value heads divide: the nearest smaller number that does.
    while heads % shared:
        shared -= 1
    # GPT-2's and OPT's kinds have other names for the width of the MLP, and some mean four times their own by none.
    others = [name for name in ("n_inner", "ffn_dim") if given.get(name)]
    inner = getattr(own, "intermediate_size", None) or (given[others[0]] if others else 4 * own.hidden_size)
    wide = round(width * inner / own.hidden_size)
    fields = {"num_hidden_layers": num_layers, "hidden_size": width, "num_attention_heads": heads,
              "num_key_value_heads": shared, "head_dim": head_dim, "intermediate_size": wide,
              "vocab_size": target.vocab_size, **dict.fromkeys(others, wide)}
    return _changed(own, fields, range(num_layers), plain=target.recurrent or unlike)


def chosen(target: Target, layers: Sequence[int]) -> Any:
    """The target's configuration with some of its layers only. UserError if a layer is not one of the target's, or
    recurrent, or they are not ascending."""
    target.require_plain_layers("a draft model of the target's layers")
    last = target.num_layers - 1
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > last:
        raise UserError(f"layers must be ascending numbers from 0 to {last}, the layers of {target.identity.name}, at "
                        f"least one; got {list(layers)}")
    if not is_causal_lm(target.config):
        raise UserError(f"the layers of {target.identity.architecture} make no causal language model of their own; "
                        "leave layers out and give num_layers and hidden_size")
    return _changed(target.config, {"num_hidden_layers": len(layers), "vocab_size": target.vocab_size}, layers)


def one_layer(target: Target, *, sparse: bool) -> Any:
    """The target's configuration with a vocabulary of one token and one layer of full attention, whose MLP is a mixture
    of experts if `sparse` is true. Raises UserError if the target has no such layer."""
    own, count = target.config, target.num_layers
    kinds = getattr(own, "layer_types", None) or ["full_attention"] * count
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if not full or not is_causal_lm(own):
        raise UserError(f"{target.identity.architecture} has no layer of full attention of which a head could be made; "
                        "choose another family, such as medusa or eagle3")
    blank = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    one = {"num_hidden_layers": 1, "vocab_size": 1, "tie_word_embeddings": False, **blank}
    fields = {name: value for name, value in fields_of(_changed(own, one, full[-1:])).items()
              if name != "quantization_config"}
    # Each line of models says in its own way which layers have experts.
    kind = {"first_k_dense_replace": int(not sparse), "decoder_sparse_step": 1, "mlp_only_layers": [0] * (not sparse),
            "mlp_layer_types": ["sparse" if sparse else "dense"]}
    return config_of({**fields, **{name: value for name, value in kind.items() if fields.get(name) is not None}})


def window_of(config: Any) -> int | None:
    """The window of all layers of a configuration; None where one of them sees the whole text."""
    # Of a kind of models without windows a stray key means nothing.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    has_window = hasattr(type(config), "sliding_window") and set(kinds) == {"sliding_attention"}
    window: int | None = config.sliding_window if has_window else None
    return window


def windowed(config: Any, window: int) -> Any:
    """The configuration with this window in every layer. A Llama becomes a Mistral, whose layers are its own with a
    window. UserError for another kind of model without windows."""
    from transformers import MistralConfig

    fields = fields_of(config)
    if config.model_type == "llama" and not fields.get("attention_bias") and not fields.get("mlp_bias"):
        known = MistralConfig().to_dict().keys()
        fields = {**{name: value for name, value in fields.items() if name in known}, "sliding_window": window,
                  "model_type": "mistral"}
    if not hasattr(type(config_of(fields)), "sliding_window"):
        raise UserError(f"drafter.window is {window}, and the layers of a {config.model_type} have no window; leave "
                        "window out, or choose num_layers of a target that is a Llama, Mistral or Qwen")
    every = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0,
             "layer_types": ["sliding_attention"] * config.num_hidden_layers}
    return config_of(fields | {name: value for name, value in every.items() if name in fields})


def _changed(own: Any, fields: dict[str, Any], layers: Sequence[int], *, plain: bool = False) -> Any:
    from transformers import LlamaConfig

    given = own.to_dict()
    if plain or not is_causal_lm(own):
        kept = {name: given[name] for name in _FALLBACK_FIELDS if given.get(name) is not None}
        return LlamaConfig(**{"tie_word_embeddings": bool(given.get("tie_word_embeddings")), **kept, **fields})
    # Some architectures have names of their own for common fields: GPT-2's n_layer is num_hidden_layers.
    own_names = {own.attribute_map.get(name, name): value for name, value in fields.items()}
    known = {name: value for name, value in own_names.items() if name in given}
    # What is said of each layer: its kind, its rotation, its MLP. Numbers of layers are no such list.
    count = int(own.num_hidden_layers)
    known |= {name: [value[layer % count] for layer in layers] for name, value in given.items()
              if isinstance(value, list) and len(value) == count and value != list(range(count))}
    if per_layer := given.get("per_layer_config"):
        known["per_layer_config"] = {place: per_layer[str(layer)] for place, layer in enumerate(layers)
                                     if str(layer) in per_layer}
    return config_of({**given, **known})


def is_causal_lm(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def config_of(fields: dict[str, Any]) -> Any:
    """A configuration from `fields_of`'s answer; UserError if it is no model that transformers knows."""
    from transformers import AutoConfig

    plain = {name: value for name, value in fields.items() if name not in _MACHINE_FIELDS}
    check_claims(plain, "this draft")
    try:
        return AutoConfig.for_model(**plain)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"transformers cannot make the model of this draft ({error}); use the version that trained "
                        "it") from error


def fields_of(config: Any) -> dict[str, Any]:
    """A configuration as JSON gives it back, without fields of this machine or its versions."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _MACHINE_FIELDS}
    found: dict[str, Any] = json.loads(json.dumps(fields))
    return found


def new_model(config: Any) -> Any:
    """A random causal language model in float32, with the one attention function of this package."""
    from transformers import AutoModelForCausalLM

    register()
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    attend_by(model, NAME)
    return model


@torch.no_grad()
def copy_layers(model: Any, target: Target, layers: Sequence[int]) -> None:
    """Give a model of `chosen`'s configuration the target's layers, embedding, last norm and output layer. Processes
    that share the target must call it together."""
    decoder = decoder_of(model)
    own = layer_list(decoder, len(layers))
    numbers = {id(layer): place for place, layer in enumerate(own)}
    sources = dict(target.decoder.named_parameters())
    prefix = next(name for name, module in decoder.named_modules() if id(module) in numbers)
    prefix = prefix.rsplit(".", 1)[0]
    for name, parameter in decoder.named_parameters():
        # Layers are numbered anew in the smaller model, and everything else has the same name in both.
        if name.startswith(f"{prefix}."):
            place, rest = name.removeprefix(f"{prefix}.").split(".", 1)
            name = f"{prefix}.{layers[int(place)]}.{rest}"
        parameter.copy_(whole(sources[name]))
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        for name, parameter in target.head.named_parameters():
            getattr(head, name).data.copy_(parameter)
