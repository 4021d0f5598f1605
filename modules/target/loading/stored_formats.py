"""Formats of stored weights: GGUF files, each parsed once, and quantised weights, of published files or rounded on
reading.

transformers asks for a GGUF file's header, which holds the whole vocabulary, when it reads the configuration, the
tokenizer and the weights, and builds the table of tensor names once for every module: 17 seconds for a model of 135
million weights, most of them spent on the same work again.

Layers that keep 4 or 8 bits stay so on accelerators. Others are dequantised once they are read: on a CPU plain ones are
faster, drafters borrow rows of embedding and output layer, and decoding is not exact where activations are rounded.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from ...errors import UserError
from ..devices.split_weights import dequantise, is_quantised
from .stored_weights import read_model_whole


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


log = logging.getLogger(__name__)

Quantization = Literal["int8", "float8", "nf4"]  # Formats that weights can be rounded to on reading
_STORED = {"compressed-tensors": ("compressed_tensors",), "fp8": (), "mxfp4": (), "torchao": ("torchao",),
           "bitsandbytes": ("bitsandbytes", "accelerate")}
_PACKAGES = _STORED | {"int8": ("torchao",), "float8": ("torchao",), "nf4": ("bitsandbytes", "accelerate")}
"""Packages that read a format: the names of quant_method in config.json, and those of `Quantization`."""


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
                   **options: Any) -> Any:
    """`read_model_whole` for weights of a format, kept or dequantised by the rule of this file."""
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
    plain = cpu or rounded or any(map(is_quantised, borrowed)) or any(
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
