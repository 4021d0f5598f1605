"""Files in GGUF, the format of llama.cpp: settings, tokenizer and weights of a model in one; and scaled rotary
embeddings in such a file.

The tokenizer is copied from the target's own GGUF file: llama.cpp drafts with a model of equal tokens alone, and only
its own conversion knows the name by which it splits text for a tokenizer.

llama.cpp's Llama and EAGLE-3 divide each frequency by a factor from the tensor `rope_freqs.weight`, so that any fixed
set of frequencies can be written. Its other architectures have no such tensor: they compute linear scaling and YaRN
themselves, from keys. The factor by which YaRN and LongRoPE lengthen queries and keys is a key everywhere."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....modules import UserError
from .checkpoint import Table, TensorForm

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
WEIGHTS = (FLOAT32, BFLOAT16, INT8)
"""Number formats of matrices. int8 is llama.cpp's Q8_0: blocks of 32 whole numbers with a scale of 16 bits each."""
_NAMES = {FLOAT32: "F32", BFLOAT16: "BF16", INT8: "Q8_0"}  # The same by GGUF's names
_FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "Q8_0": torch.int8, "I64": torch.int64}  # In tables
_BLOCK = 32
_COPIED = "tokenizer."  # Start of the keys of the tokenizer
_TOKENS, _MASK = "tokenizer.ggml.tokens", "tokenizer.ggml.mask_token_id"
FACTORS = "rope_freqs.weight"  # Name of the tensor of factors, one for each pair of numbers of a head
BY_FACTORS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings of a Llama of transformers that are the same at every context length."""
BY_KEYS = ("default", "linear", "yarn")  # Those that llama.cpp computes in architectures without factors
_SETTLED = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""YaRN's other settings, which such a file has no place for, with the values that llama.cpp takes."""


def write_gguf(file: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor],
               vocabulary: Path, weights: str, mask: int | None = None) -> Table:
    """Write a GGUF file with the tokenizer of another one, `vocabulary`; returns the table of what it holds. The keys
    of the settings get the architecture, llama.cpp's name of it, as their start; the tensors are on the CPU, and the
    matrices are written in a format of `WEIGHTS`. Without a `mask` token the tokenizer's own one stays."""
    import gguf

    kinds = gguf.GGUFValueType
    # Exact types: a truth value is a whole number to isinstance.
    single = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type("model")
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_key_value(f"{architecture}.{key}", value, kinds.ARRAY, kinds.INT32)
        else:
            writer.add_key_value(f"{architecture}.{key}", value, single[type(value)])
    # Only llama.cpp's own conversion knows how it splits text: its keys are copied as they are.
    for key, held in gguf.GGUFReader(vocabulary).fields.items():
        if key.startswith(_COPIED) and (mask is None or key != _MASK):
            writer.add_key_value(key, held.contents(), held.types[0], held.types[-1])
    if mask is not None:
        writer.add_key_value(_MASK, mask, kinds.UINT32)
    for name, tensor in tensors.items():
        form = gguf.GGMLQuantizationType[_held_as(tensor, weights)]
        values = tensor.contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(values, form) if tensor.is_floating_point() else values,
                          raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {one.name: TensorForm(tuple(map(int, reversed(one.shape))), _FORMATS[one.tensor_type.name])
            for one in gguf.GGUFReader(file).tensors}


def _held_as(tensor: Tensor, weights: str) -> str:
    """GGUF's name of the number format that a tensor is held in."""
    if tensor.dtype == torch.int64:
        return "I64"
    # llama.cpp's own conversion keeps norms and other vectors so, and the kernels of convolutions.
    if tensor.ndim != 2:
        return _NAMES[FLOAT32]
    # A block of Q8_0 does not go on in the next row.
    return _NAMES[BFLOAT16 if weights == INT8 and tensor.shape[-1] % _BLOCK else weights]


def rounded(tensor: Tensor, weights: str) -> Tensor:
    """A weight as an engine reads it from such a file, in float32."""
    import gguf

    if not tensor.is_floating_point():
        return tensor
    form = gguf.GGMLQuantizationType[_held_as(tensor, weights)]
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, form), form).copy())


def require_tokens(vocabulary: Path | None, size: int, target: str) -> Path:
    """The GGUF file whose tokenizer is copied. Raises UserError if none was given, it is no GGUF file with a tokenizer,
    or it has not as many tokens as the target's output layer has rows."""
    import gguf

    if vocabulary is None:
        raise UserError("the format gguf copies the tokenizer of the target's GGUF file, from which llama.cpp serves "
                        f"{target}; give it with --target_gguf FILE")
    try:
        tokens = gguf.GGUFReader(vocabulary).fields[_TOKENS]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{vocabulary} is no GGUF file with a tokenizer; give that of the target") from error
    # llama.cpp drafts with equal tokens alone: another number of them is another tokenizer.
    if len(tokens.data) != size:
        raise UserError(f"{vocabulary} has {len(tokens.data):,} tokens, but {target} has {size:,}; give the GGUF file "
                        "of this target")
    return vocabulary


# Scaled rotary embeddings ---------------------------------------------------------------------------------------------


def by_factors(frequencies: Tensor, length: float, base: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(keys without the architecture, tensor of factors) of a rotary embedding in an architecture with factors: from
    the scaled frequencies, one for each pair of numbers of a head, the factor of the rotated queries and keys, and the
    base of the frequencies before they were scaled. Both are empty where nothing is scaled."""
    slowed = frequencies.detach().cpu().double()
    plain = base ** (-torch.arange(len(slowed)).double() / len(slowed))
    factors = (plain / slowed).float()
    # A tensor of ones changes nothing, and readers that know no factors can then read the file, too.
    scaled = not torch.allclose(factors, torch.ones_like(factors))
    return _lengthened(length), {FACTORS: factors} if scaled else {}


def by_keys(rope: dict[str, Any], length: float) -> dict[str, Any]:
    """The keys of a rotary embedding in an architecture without factors: from `rope_parameters` of transformers, of a
    kind in `BY_KEYS`, and the factor of the rotated queries and keys."""
    if rope["rope_type"] == "default":
        return {}
    factor = float(rope["factor"])
    settings: dict[str, Any] = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": factor}
    if rope["rope_type"] == "linear":
        return settings
    settings["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    # llama.cpp lengthens by its own factor (arXiv:2309.00071, eq. 22) and then by that of the file.
    return settings | _lengthened(length / (1.0 + 0.1 * math.log(factor)))


def _lengthened(length: float) -> dict[str, Any]:
    return {} if math.isclose(length, 1.0, rel_tol=1e-6) else {"rope.scaling.attn_factor": float(length)}


def unsettled(rope: dict[str, Any]) -> str:
    """The first setting of YaRN that keys do not hold, for people; empty where there is none."""
    wrong = [name for name, value in _SETTLED.items() if rope.get(name) not in (None, value)]
    return f"{wrong[0]} {rope[wrong[0]]}" if rope.get("rope_type") == "yarn" and wrong else ""
