"""Files in GGUF, the format of llama.cpp: settings, tokenizer and weights of a model in one.

The tokenizer is copied from the target's own GGUF file: llama.cpp drafts with a model of equal tokens alone, and only
its own conversion knows the name by which it splits text for a tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....modules import UserError
from .layout_folder import Table, TensorForm

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
WEIGHTS = (FLOAT32, BFLOAT16, INT8)
"""Number formats of matrices. int8 is llama.cpp's Q8_0: blocks of 32 whole numbers with a scale of 16 bits each."""
_NAMES = {FLOAT32: "F32", BFLOAT16: "BF16", INT8: "Q8_0"}  # The same by GGUF's names
_FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "Q8_0": torch.int8, "I64": torch.int64}
"""Number formats in tables, by GGUF's names."""
_BLOCK = 32
_COPIED = "tokenizer."  # Start of the keys of the tokenizer
_TOKENS, _MASK = "tokenizer.ggml.tokens", "tokenizer.ggml.mask_token_id"


def write_gguf(file: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor],
               vocabulary: Path, weights: str = FLOAT32, mask: int | None = None) -> None:
    """Write a GGUF file.

    Args:
        file: its path.
        architecture: llama.cpp's name of the architecture, with which the keys of the settings begin.
        settings: numbers, truth values, texts and lists of integers by key.
        tensors: the weights, on the CPU.
        vocabulary: GGUF file whose tokenizer is copied.
        weights: number format of the matrices, one of `WEIGHTS`.
        mask: the token that stands for a mask; None leaves the one that the tokenizer may have.
    """
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
    for key, field in gguf.GGUFReader(vocabulary).fields.items():
        if key.startswith(_COPIED) and (mask is None or key != _MASK):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
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


def gguf_forms(file: Path) -> Table:
    """Names, shapes and number formats of the weights in a GGUF file."""
    import gguf

    return {one.name: TensorForm(tuple(map(int, reversed(one.shape))), _FORMATS[one.tensor_type.name])
            for one in gguf.GGUFReader(file).tensors}


def require_tokens(vocabulary: Path | None, size: int, target: str) -> Path:
    """The GGUF file whose tokenizer is copied.

    Args:
        vocabulary: the file that was given.
        size: rows of the target's output layer.
        target: name of the target.

    Raises:
        UserError: if none was given, it is no GGUF file with a tokenizer, or it has another number of tokens.
    """
    import gguf

    if vocabulary is None:
        raise UserError("the format gguf copies the tokenizer of the target's GGUF file, from which llama.cpp serves "
                        f"{target}; give it with --target_gguf FILE")
    try:
        field = gguf.GGUFReader(vocabulary).fields[_TOKENS]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{vocabulary} is no GGUF file with a tokenizer; give that of the target") from error
    # llama.cpp drafts with equal tokens alone: another number of them is another tokenizer.
    if len(field.data) != size:
        raise UserError(f"{vocabulary} has {len(field.data):,} tokens, but {target} has {size:,}; give the GGUF file "
                        "of this target")
    return vocabulary
