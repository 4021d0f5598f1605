"""Parts of a model of transformers: weights that are no plain tensors, the text of a model that reads pictures or sound
too, copies that share its weights, an excerpt that can be checked exactly at little cost; and the identity of a target,
so that a draft made for one is not used with another."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config_checks import Whole
from ...errors import UserError
from ...files.json_records import record_of
from ...processes import whole_in_zero3


def is_quantised(weight: Tensor) -> bool:
    """True for a weight in few bits, which only its own layer or package can multiply with."""
    return type(weight).__module__.partition(".")[0] in ("bitsandbytes", "torchao")


def dequantise(model: nn.Module) -> None:
    """Give the layers of a model the plain values of torchao's weights."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if type(weight).__module__.startswith("torchao."):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))


def whole(tensor: Tensor) -> Tensor:
    """All of a weight of which this process holds a part; its processes must call it together. The values of a
    quantised one; others as they are, without a gradient."""
    if hasattr(tensor, "stored"):
        # A layer's, which stays in its file; see the placement `Disk`.
        return tensor.stored()  # type: ignore[no-any-return]
    if hasattr(tensor, "ds_id"):
        return whole_in_zero3(tensor)
    if dist.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            with torch.no_grad():
                return tensor.full_tensor()
    if hasattr(tensor, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensor.data, tensor.quant_state)  # type: ignore[no-any-return]
    return (tensor.dequantize() if is_quantised(tensor) else tensor).detach()


def plain_class(model: nn.Module) -> type[Any]:
    """The class of a model as transformers has it: splitting its weights makes another class of it."""
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return type(model)


SAMPLES_PER_TENSOR = 4096  # Evenly spaced elements of each tensor that enter the hash
SHAPE = ("vocab_size", "hidden_size", "num_layers")  # Fields that decide the sizes of what a drafter reads


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Shape and weights hash, which must agree between the target of training and the one in use."""

    name: str  # Origin of the target; for people, not compared
    architecture: str  # Class of the model
    vocab_size: Whole  # Rows of the output layer
    hidden_size: Whole  # Width of the hidden states
    num_layers: Whole  # Number of decoder layers
    weights_hash: str  # Hash of the weights, see `hash_weights`
    quantization: str = ""  # Of quantised weights, as files or `target.quantization` name it, or empty. Not compared
    tokens_hash: str = ""  # Of tokens and ids, empty without a tokenizer. Compared where a draft changes its target
    adapter: str = ""
    """Hash of the adapter that is merged into the weights of `name`, empty without one. Not compared: a folder with
    both merged is the same target."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, name: str) -> "TargetIdentity":
        """The identity of a language model, without a hash of weights on torch's meta device."""
        config, rows = model.config.get_text_config(), model.get_output_embeddings().weight.shape[0]
        # SHA-256 over a tokenizer's tokens in the order of their ids: equal ones mean the same text by an id.
        tokens = [] if tokenizer is None else sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        merged = getattr(model, "merged_adapter", None)
        return cls(name=name, architecture=plain_class(model).__name__, vocab_size=int(rows),
                   adapter="" if merged is None else merged.digest,
                   hidden_size=int(config.hidden_size), num_layers=int(config.num_hidden_layers),
                   weights_hash="" if model.get_input_embeddings().weight.is_meta else hash_weights(model),
                   quantization=getattr(model, "quantised_as", ""),
                   tokens_hash=hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:32] if tokens else "")

    def fields(self) -> dict[str, Any]:
        """JSON-ready fields, without an adapter where there is none."""
        return {name: value for name, value in vars(self).items() if value or name != "adapter"}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "TargetIdentity":
        """Read the fields from JSON; UserError if a field is missing, unknown or of the wrong kind."""
        return record_of(cls, fields, "the identity of a target", "make the file again, or copy it again")

    def require_same(self, other: "TargetIdentity", compared: Sequence[str] = (*SHAPE, "weights_hash"),
                     remedy: str = "load the target it was made for", what: str = "this") -> None:
        """Refuse another target by the first of the `compared` fields that differs: UserError, whose sentence begins
        with what was made for this one and ends with the remedy."""
        for name in compared:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                if self.adapter and not other.adapter:
                    remedy = f"name the adapter of the target (target.adapter), or {remedy}"
                raise UserError(f"{what} was made for the target {self.name} with {name} {mine}, but the target here, "
                                f"{other.name}, has {theirs}; {remedy}")


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over names, shapes and evenly spaced elements of all parameters, each rounded to bfloat16. The rounding
    makes a model loaded in float32 and in bfloat16 the same; the spacing keeps it to a moment for models of any size,
    and training of any kind moves elements in every tensor it touches. Weights that are split among processes have the
    hash of the whole ones; all of these processes must call it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        found = whole(parameter)
        flat = found.reshape(-1)
        step = max(1, -(-flat.numel() // SAMPLES_PER_TENSOR))
        sample = flat[::step].to(torch.bfloat16).contiguous().cpu()
        digest.update(f"{name} {tuple(found.shape)}".encode())
        # The same bytes as whole numbers: numpy has no bfloat16.
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def rope_by_kind(said: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The rotary parameters of each kind of layer; of the kind "" where all layers have the same, or none. transformers
    nests them in `rope_parameters` by the names in `layer_types` where the layers differ (Gemma 3, OLMo 3)."""
    nested = {kind: own for kind, own in (said or {}).items() if isinstance(own, dict)}
    return nested or {"": dict(said or {})}


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a configuration: for a language model, or for one that is wrapped."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    wrapped = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if wrapped else AutoModelForCausalLM


def text_of(model: Any, *, spread: bool = False) -> Any:
    """The language model inside a model, around the very same weights; itself where nothing is wrapped around it. It is
    of the class that transformers has for such a text. Where there is none, or layers that are `spread` over processes
    or devices belong to the model that was read, that loses all but its decoder and output layer."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if config is model.config or config.is_encoder_decoder or head is None:
        return model
    decoder = model.get_decoder()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), type(model))
    if not spread and not isinstance(model, kind):
        with torch.device("meta"):
            text = kind(config)
        inside = text.base_model_prefix
        if type(getattr(text, inside)) is type(decoder):
            setattr(text, inside, decoder)
            text.set_output_embeddings(head)
            text.generation_config = model.generation_config
            for name in ("is_quantized", "hf_quantizer", "quantised_as", "stored_in", "merged_adapter"):
                if hasattr(model, name):
                    setattr(text, name, getattr(model, name))
            return text.train(model.training)
    kept = {id(module) for part in (decoder, head) for module in part.modules()}
    parents = [module for module in model.modules() if any(id(inner) in kept for inner in module.modules())]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if not any(child is other for other in parents):
                delattr(parent, name)
    return model


_SHORT = {"sliding_window": 4, "attention_chunk_size": 3, "floor_scale": 1}
"""Most tokens of an excerpt's windows, chunks and stages of temperature, by their names in a configuration: the text of
the check at load leaves them, chunks in both of its passes."""
_EXCERPT_VOCABULARY = 64  # Token ids that an excerpt keeps
_FEWEST_LAYERS = 2


def copy_modules(model: nn.Module) -> Any:
    """The model with modules and config of its own around the very same parameters and buffers."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def excerpt(model: Any, *, short_windows: bool, spread: bool = False) -> Any:
    """The first layers of a model, at least one of each kind, in float32 or wider; the model itself stays as it is, and
    tensors that need no conversion are shared. `short_windows` are left by a short text. It computes what the model
    computes, with fewer layers and token ids, so whatever is wrong with masks, positions or windows is wrong there too,
    and float32 tells it from rounding. Layers that are `spread` over processes or devices are gathered on the device of
    the embeddings: all processes that share the model must call it."""
    if spread:
        # Made anew: a copy would hold parts of weights, and the hooks that gather or move them.
        with torch.device("meta"):
            small = text_of(plain_class(model)(copy.deepcopy(model.config)).eval(), spread=True)
    else:
        small = copy_modules(model)
        dequantise(small)
    # An excerpt answers nothing: what the model's own asks for would be warned of or refused a second time.
    small.generation_config = None
    config, decoder = small.config.get_text_config(), decoder_of(small)
    layers = layer_list(decoder, config.num_hidden_layers)
    count = _first_of_every_kind(layers, getattr(config, "layer_types", None))
    del layers[count:]
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = count
    # Some configurations derive the kinds from the number of layers.
    if kinds and len(config.layer_types) != count:
        config.layer_types = kinds[:count]
    # Gathered only now, when the layers that are left out are gone.
    device = model.get_input_embeddings().weight.device
    for path, module in small.named_modules() if spread else ():
        source = model.get_submodule(path)
        for name in [name for name, parameter in module._parameters.items() if parameter is not None]:
            module._parameters[name] = _frozen(whole(source._parameters[name]).to(device))
        for name in [name for name, buffer in module._buffers.items() if buffer is not None]:
            module._buffers[name] = source._buffers[name].to(device)
    embedding, head = small.get_input_embeddings(), small.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear):
        # Before they are widened: the wider copies of a whole vocabulary would be the largest part of an excerpt.
        embedding.padding_idx = None
        embedding.weight = _frozen(embedding.weight[:_EXCERPT_VOCABULARY])
        head.weight = _frozen(head.weight[:_EXCERPT_VOCABULARY])
        if head.bias is not None:
            head.bias = _frozen(head.bias[:_EXCERPT_VOCABULARY])
    # Inputs of each layer by token, in one table: what layers and ids that are left out would read goes as well.
    if width := count * getattr(decoder, "hidden_size_per_layer_input", 0):
        table, projection = decoder.embed_tokens_per_layer, decoder.per_layer_model_projection
        table.padding_idx, table.weight = None, _frozen(table.weight[:_EXCERPT_VOCABULARY, :width])
        projection.weight = _frozen(projection.weight[:width])
    # A layer may read the window from the configuration or keep a number of its own.
    for owner in (config, *small.modules()) if short_windows else ():
        for name, least in _SHORT.items():
            size = getattr(owner, name, None)
            if isinstance(size, int) and size > least:
                setattr(owner, name, least)
    # Float32 copies of half-precision tensors; the tensors themselves stay.
    for module in small.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
                    tensors[name] = _frozen(tensor.float()) if isinstance(tensor, nn.Parameter) else tensor.float()
    return small


def decoder_of(model: Any) -> Any:
    """The decoder of a causal language model."""
    # Llama 4 names a part that it does not have, and passes for its own decoder.
    found = model.get_decoder()
    return model.model if found is model else found


def layer_list(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers. Raises UserError when it has none of that length."""
    # By its length: some architectures call it layers, others h or blocks.
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(f"{type(decoder).__name__} has no list of {num_layers} layers to tap; choose another target")


def _first_of_every_kind(layers: nn.ModuleList, layer_types: list[str] | None) -> int:
    """Length of the shortest prefix that holds a layer of every kind, and two layers where there are as many."""
    kinds: list[tuple[object, ...]] = []
    for place, layer in enumerate(layers):
        # The modules with their classes and switches: not every model declares the kinds of its layers. Layers that
        # differ by their number alone are equal.
        modules = tuple(
            (name, type(module).__name__, tuple(sorted(
                (key, value) for key, value in vars(module).items()
                if isinstance(value, bool | int | str) and key not in ("layer_idx", "layer_id", "layer_index"))))
            for name, module in layer.named_modules())
        kinds.append((modules, layer_types[place] if layer_types else ""))
    return min(len(layers), max(_FEWEST_LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds))))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
