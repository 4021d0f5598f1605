"""Weights and tokenizer of a model as its files hold them: all there, in their shapes, finite, a row for each token;
GGUF files, each parsed once; and quantised weights, of published files or rounded on reading.

transformers draws at random what a checkpoint lacks, leaves out what its model has no place for, and makes some
tokenizers without a vocabulary: such a folder would answer nonsense. It asks for a GGUF file's header, which holds the
whole vocabulary, with the configuration, the tokenizer and the weights, and builds the table of tensor names once for
every module: 17 seconds for a model of 135 million weights, most of them spent on the same work again.

The sizes that a configuration claims are compared with the weights before memory is taken for them: a configuration of
a few bytes can ask for a billion layers. The weights cannot lie about their size: a parameter takes at least a bit of
them, and a layer at least one tensor.

Layers that keep 4 or 8 bits stay so on accelerators. Others are dequantised once they are read: on a CPU plain ones are
faster, drafters borrow rows of embedding and output layer, and decoding is not exact where activations are rounded."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import UserError
from .model_parts import auto_class, dequantise, is_quantised, text_of, whole
from .self_check import LIBRARY_ERRORS

log = logging.getLogger(__name__)
_REPORT = logging.getLogger("transformers.modeling_utils")
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")  # Files with a tokenizer's tokens
_MARK = re.compile(r"<.*>|\[.*\]")
Quantization = Literal["int8", "float8", "nf4"]  # Formats that weights can be rounded to on reading
_STORED = {"compressed-tensors": ("compressed_tensors",), "fp8": (), "mxfp4": (), "torchao": ("torchao",),
           "bitsandbytes": ("bitsandbytes", "accelerate")}
_PACKAGES = _STORED | {"int8": ("torchao",), "float8": ("torchao",), "nf4": ("bitsandbytes", "accelerate")}
"""Packages that read a format: the names of quant_method in config.json, and those of `Quantization`."""
MOST_LAYERS = 10_000  # Most layers or experts of a model: each may be a module of its own
MOST_WIDTH = 2**26  # Largest width, number of heads or vocabulary
_PARTS = re.compile(r"(.*_)?(n_)?layers?|.*expert.*")
_WIDTHS = re.compile(r"(num|n|d)_.*|.*_(size|dim|rank)")


def check_claims(fields: Mapping[str, Any], name: str) -> None:
    """Refuse sizes in a configuration, as JSON gave it, that no model has: UserError with field, value and bound."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            check_claims(value, name)
        if not isinstance(value, int):
            continue
        most = MOST_LAYERS if _PARTS.fullmatch(str(key)) else MOST_WIDTH if _WIDTHS.fullmatch(str(key)) else None
        if most is not None and not abs(value) <= most:
            raise UserError(f"the configuration of {name} has {key} {value}, more than any model ({most:,}); correct "
                            "it, or copy the model again")


def check_layers(num_layers: int, folder: Path, name: str) -> int:
    """Bytes of the weights in a Hugging Face folder; 0 where it is none. Refuses more layers than its safetensors files
    have tensors, before a module is made for each: UserError, of a damaged file too."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = 0
    for file in files:
        try:
            # The header alone is read: it names the tensors.
            with safe_open(file, framework="pt") as opened:
                tensors += len(opened.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} is no readable safetensors file ({error}); copy it again") from error
    if files and num_layers > tensors:
        raise UserError(f"the configuration of {name} has {num_layers:,} layers, but its weights hold {tensors:,} "
                        "tensors; correct it, or copy the model again")
    return sum(file.stat().st_size for file in (*files, *folder.glob("*.bin")) if file.is_file())


def check_parameters(sketch: nn.Module, stored: int, name: str) -> None:
    """Refuse a model (`sketch`, on torch's meta device) with more parameters than its weights have bits; `stored`
    bytes, 0 where they are not here yet. Raises UserError."""
    claimed = sum(parameter.numel() for parameter in sketch.parameters())
    if stored and claimed > 8 * stored:
        raise UserError(f"the configuration of {name} makes {claimed:,} parameters, but its weights have {stored:,} "
                        "bytes; correct it, or copy the model again")


def read_model_whole(source: Any, name: str, *, spread: bool = False, **options: Any) -> Any:
    """The causal language model of a folder, hub id or GGUF file, all of whose weights are those of its files. `source`
    is None for tensors that `options`, of `from_pretrained`, hold; for `spread` see `text_of`. UserError names tensors
    that are missing, that are of another shape, or that belong to modules of the model whose configuration has no place
    for them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = options.get("config")
    quantised = getattr(config, "quantization_config", None) is not None
    # It would print a table of what is named here.
    _REPORT.disabled = True
    try:
        # The automatic classes look for files in any case.
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if source is None else auto_class(config)
        read: Any = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    finally:
        _REPORT.disabled = False
    model, info = read
    # transformers ties no weights that differ, whatever the configuration says. What is made by that configuration,
    # such as a draft model of the same layers, would be tied.
    if apart := model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys():
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        log.warning("the weights of %s hold %s with values of its own, which its configuration ties to the embedding; "
                    "they are used, but an engine that goes by the configuration runs another model: set "
                    "tie_word_embeddings to false in its config.json", name, _listed(apart))
    # Around a text there may be other parts, which are not used and may be left out of its files.
    text = text_of(model, spread=spread)
    held = {id(tensor) for tensor in (*text.parameters(), *text.buffers())}
    weights, buffers = ({path for path, tensor in named if id(tensor) in held} for named in (
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    # Tied weights, and those that an architecture may lack, are not among them.
    missing = (weights | buffers) & set(info["missing_keys"])
    unexpected, mend = info["unexpected_keys"], "save or copy the model again"
    if missing:
        others = f", and holds {_listed(unexpected)}, which it does not have" if unexpected else ""
        raise UserError(f"the weights of {name} lack {_listed(missing)}, which its configuration asks for{others}; "
                        f"they would be drawn at random: {mend}, with the names of transformers")
    for key, found, expected in sorted(odd for odd in info["mismatched_keys"] if odd[0] in weights)[:1]:
        raise UserError(f"the weights of {name} hold {key} of shape {list(found)}, its configuration asks for "
                        f"{list(expected)}; correct it, or {mend}")
    # A bias of a layer that has none by the configuration is part of what the model computed. Other modules, such as
    # those for images or for further tokens, are not: many published checkpoints hold some. Quantised weights come with
    # tensors that transformers reads in ways of its own.
    modules = {path.rpartition(".")[0] for path in weights}
    lost = [key for key in unexpected if key.rpartition(".")[0] in modules]
    if lost and not quantised:
        raise UserError(f"the weights of {name} hold {_listed(lost)}, for which its configuration leaves no place; "
                        f"without them it is another model: correct the configuration, or {mend}")
    # Scales of what an engine rounds while it runs.
    if unexpected := [key for key in unexpected if not quantised or key not in lost]:
        log.warning("the weights of %s hold %s, which its model does not have; they are left out", name,
                    _listed(unexpected))
    return text


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    named, more = [first, *others[:2]], len(others) - 2
    return ", ".join(named) + (f" and {more:,} more" if more > 0 else "")


def all_finite(tensor: Tensor) -> bool:
    """False if a tensor of real numbers holds NaN or infinities."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # torch has no extremes of formats of 8 bits.
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    # They take one pass and no memory, and are NaN where an element is.
    return bool(torch.stack(wide.aminmax()).isfinite().all())


@torch.no_grad()
def require_finite(model: Any, name: str) -> None:
    """Refuse weights and stored buffers that hold NaN or infinities, but for an input embedding of which a token has a
    finite row. Raises UserError. Processes that share the model must call it together."""
    embedding = model.get_input_embeddings().weight
    # Other buffers are in no file: a model makes them, and those of masks are full of infinities.
    made = {id(module._buffers[key]) for module in model.modules() for key in module._non_persistent_buffers_set}
    buffers = [one for one in model.named_buffers() if id(one[1]) not in made]
    for path, parameter in [*model.named_parameters(), *buffers]:
        weight = whole(parameter)
        if all_finite(weight):
            continue
        # Tokens without a finite embedding end an answer and hurt no other one, unless the output layer has the row.
        rows = weight.isfinite().all(-1) if parameter is embedding else torch.zeros(1)
        if not bool(rows.any()) or model.get_output_embeddings().weight is embedding:
            # Larger numbers became infinite when they were read in this format, unless they were before.
            narrow = weight.dtype is torch.float16 and not bool(weight.isnan().any())
            remedy = "set target.dtype to bfloat16 or float32, which hold larger ones" if narrow else \
                "save or copy the model again"
            raise UserError(f"the tensor {path} of {name} holds values that are not finite (nan or inf) in "
                            f"{str(weight.dtype).removeprefix('torch.')}; {remedy}")
        log.warning("%d tokens of %s have an embedding that holds nan or inf; answers end at them", int((~rows).sum()),
                    name)


def read_tokenizer(source: str, name: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a folder, hub id or GGUF file, as `read_model_whole` has them; UserError if there is none."""
    from transformers import AutoTokenizer

    folder, tokenizer = Path(source), None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except LIBRARY_ERRORS as error:
        there = any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES)
        if not folder.is_dir() or "gguf_file" in options or there or "trust_remote_code" in str(error):
            raise
    # Some classes are made without any file, and then know their marks alone: no text has tokens.
    if tokenizer is None or all(_MARK.fullmatch(token) for token in tokenizer.get_vocab()):
        raise UserError(f"{name} has no tokenizer (no file such as tokenizer.json with its tokens); copy those of the "
                        "model that it was made from into its folder, or save it there with tokenizer.save_pretrained")
    return tokenizer


def require_rows(tokenizer: Any, rows: int, name: str) -> None:
    """Refuse a tokenizer, with the chat template in use, whose tokens have no row of the embedding where prompts may
    hold them. Raises UserError."""
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    # Published models keep the mark of an image, say, that their text alone never holds.
    aside = {index for index, token in tokenizer.added_tokens_decoder.items()
             if str(token) not in f"{tokenizer.chat_template}"
             and str(token) not in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)}
    needed = [(index, token) for index, token in beyond if index not in aside]
    for index, token in (needed or beyond)[:1]:
        sentence = f"the tokenizer of {name} gives {token!r} the id {index}, but its embedding has {rows:,} rows"
        if needed:
            raise UserError(f"{sentence}; use the tokenizer that the model was trained with, or the model after "
                            "model.resize_token_embeddings(len(tokenizer))")
        log.warning("%s; text with that token cannot be read", sentence)


@contextmanager
def parsed_once() -> Iterator[None]:
    """A block in which the header of a GGUF file and a table of tensor names are parsed once, however often they are
    asked for."""
    import gguf

    # transformers imports both names inside the functions that use them, so it finds what stands here for the moment.
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    replaced: Any = gguf
    replaced.GGUFReader, replaced.get_tensor_name_map = lru_cache(reader), lru_cache(names)
    try:
        yield
    finally:
        replaced.GGUFReader, replaced.get_tensor_name_map = reader, names


def gguf_config(file: Path) -> Any:
    """transformers' configuration of a GGUF file; a file that has not changed is not read again."""
    # A copy for each caller: loading a model writes to its configuration.
    stat = file.stat()
    return deepcopy(_config(file, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4)
def _config(file: Path, _size: int, _changed: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


def quantisation_of(config: Any, wanted: Quantization | None, name: str) -> str:
    """The format of a model's weights, that of its files or the wanted one; empty for plain weights. The configuration
    then has transformers dequantise what it can. Raises UserError if the format or its package is not known here."""
    # A GGUF file, which has no configuration, is dequantised by another reader.
    settings = {"quant_method": ""} if config is None else getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None) or {}
    if not isinstance(settings, dict):
        raise UserError(f"quantization_config of {name} is {settings!r} and no mapping; correct its config.json")
    # Files of bitsandbytes once named no method.
    form = wanted or (str(settings.get("quant_method", "bitsandbytes")) if settings else "")
    if settings and wanted is not None:
        raise UserError(f"the weights of {name} are already quantised, and target.quantization {wanted} would round "
                        "them again; leave it out, or choose the model's unquantised weights")
    if form and form not in _PACKAGES:
        raise UserError(f"the weights of {name} are quantised by {form!r}, and this version reads "
                        f"{', '.join(_STORED)}; choose another checkpoint, or unquantised weights")
    if missing := [package for package in _PACKAGES.get(form, ()) if find_spec(package) is None]:
        packages = " ".join(missing).replace("_", "-")
        raise UserError(f"{name} has weights in the format {form}, for which {packages} is not installed; install it "
                        f"(pip install {packages}), or choose the model's unquantised weights")
    if form in ("compressed-tensors", "fp8", "mxfp4"):
        config.quantization_config = {**settings, "dequantize": True}
    return form


@torch.no_grad()
def read_quantised(source: Any, name: str, form: str, device: torch.device, *, dtype: torch.dtype,
                   plain: bool = False, **options: Any) -> Any:
    """`read_model_whole` for weights of a format, kept or dequantised by the rule of this file; `plain` keeps none."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    given, bitsandbytes = {"dtype": dtype, **options}, "bitsandbytes" in _PACKAGES.get(form, ())
    cpu, rounded = device.type == "cpu", form in ("int8", "float8")
    if form == "fp8" and Path(source).is_dir():
        _require_scales(Path(source), name)
    if bitsandbytes:
        # Without a place it would take the first accelerator, whatever was asked for.
        given["device_map"] = {"": device}
    if form == "nf4":
        given["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    elif rounded:
        from torchao import quantization

        given["quantization_config"] = TorchAoConfig(getattr(quantization, f"{form.capitalize()}WeightOnlyConfig")())
    if rounded or (form == "nf4" and cpu):
        # Rounded from the target's own number format, the weights would be others in each.
        given["dtype"] = torch.float32
    model = read_model_whole(source, name, **given)
    model.quantised_as, weights = form, [weight for weight in model.parameters() if is_quantised(weight)]
    borrowed = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    # By either package, what the weight of a layer has that rounds activations.
    marks = ("SCB", "act_quant_kwargs", "activation_quantization")
    plain = plain or cpu or rounded or any(map(is_quantised, borrowed)) or any(
        getattr(weight, mark, None) is not None for weight in weights for mark in marks)
    if not form or (weights and not plain):
        return model
    # bitsandbytes reads blocks row by row on a CPU, and has rounded them one after the other.
    if cpu and any(hasattr(one, "quant_state") and one.quant_state.shape[-1] % one.blocksize for one in weights):
        raise UserError(f"{name} has 4-bit blocks that cross rows, which bitsandbytes does not read on a CPU; choose "
                        "the model's unquantised weights, or set target.device: cuda")
    if bitsandbytes:
        logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)
        model = model.dequantize(dtype=dtype)
    elif weights:
        dequantise(model)
        model.hf_quantizer.remove_quantization_config(model)
    log.warning("the weights of %s are quantised (%s) and dequantised on reading; what an engine rounds besides, such "
                "as activations, is not rounded here", name, form)
    return model.to(dtype)


def _require_scales(folder: Path, name: str) -> None:
    """Refuse float8 weights without the scales of their blocks, and scales without such weights: transformers reads
    either as other values. Raises UserError."""
    kinds: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names: list[str] = list(opened.keys())
            kinds |= {key: opened.get_slice(key).get_dtype() for key in names}
    for key, kind in kinds.items():
        weight, scale = key.removesuffix("_scale_inv"), f"{key}_scale_inv"
        if kind.startswith("F8") and scale not in kinds:
            raise UserError(f"the weights of {name} hold {key} in float8 and lack its scale, {scale}; save or copy the "
                            "model again")
        if weight != key and not kinds.get(weight, "").startswith("F8"):
            raise UserError(f"the weights of {name} hold {key}, the scale of a float8 weight, and {weight} is none; "
                            "save or copy the model again")
