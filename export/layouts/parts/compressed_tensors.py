"""Weights of fewer bits as vLLM reads them: linear layers in the layout of the library compressed-tensors.

A matrix of whole numbers (int8) or of float8 (e4m3) has a scale for each row, `NAME_scale`. vLLM rounds the inputs of
such a layer to the same bits, each token with a scale of its own. An output layer that the drafter has trained is
rounded too; vLLM has another class for it than for linear layers, so that it is named. Embeddings, and output layers
that are the target's or an embedding, become bfloat16; norms and other vectors stay as they are.

Shapes: Q rows of a matrix, D its columns."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .gguf_file import BFLOAT16, FLOAT32, INT8

FLOAT8 = "float8"
OUTPUT = "lm_head.weight"  # Name of the output layer in every layout that is written so
COMPRESSED = (FLOAT32, BFLOAT16, INT8, FLOAT8)  # Number formats of matrices
_ROUNDED = {INT8: (torch.int8, 127.0), FLOAT8: (torch.float8_e4m3fn, 448.0)}  # Torch's formats and largest numbers
_SCALE = "_scale"  # End of the name of a matrix's scales


def rounded_rows(weight_QD: Tensor, weights: str) -> tuple[Tensor, Tensor]:
    """(the matrix in int8 or float8, the scale of each row, [Q, 1])."""
    dtype, largest = _ROUNDED[weights]
    own_QD = weight_QD.detach().float()
    # A row of zeros would divide by zero.
    scale_Q1 = own_QD.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / largest
    values_QD = own_QD / scale_Q1
    return (values_QD.round() if weights == INT8 else values_QD).clamp(-largest, largest).to(dtype), scale_Q1


def as_compressed(weight: Tensor, weights: str, linear: bool) -> Tensor:
    """A trained weight as vLLM reads it from such a file, in its own number format; `linear` says that it is the matrix
    of a linear layer, which is no embedding too."""
    if weights == FLOAT32 or weight.ndim < 2 or not weight.is_floating_point():
        return weight
    # vLLM reads an embedding in eight bits in another layout alone, packed into 32.
    if not linear or weights == BFLOAT16:
        return weight.bfloat16().to(weight)
    values_QD, scale_Q1 = rounded_rows(weight, weights)
    return (values_QD.float() * scale_Q1).to(weight)


def compressed(tensors: Mapping[str, Tensor], linear: Collection[str], weights: str) -> dict[str, Tensor]:
    """The tensors of a layout with weights of fewer bits; `linear` are the names of the matrices to be rounded."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in linear and weights in _ROUNDED:
            found[name], found[name + _SCALE] = rounded_rows(tensor, weights)
        else:
            whole = weights == FLOAT32 or tensor.ndim < 2 or not tensor.is_floating_point()
            found[name] = tensor if whole else tensor.bfloat16()
    return found


def compressed_config(weights: str, linear: Collection[str]) -> dict[str, Any]:
    """The keys of config.json that name the number format; none where vLLM needs none."""
    if weights == FLOAT32:
        return {}
    if weights == BFLOAT16:
        return {"torch_dtype": BFLOAT16}
    kind = {"num_bits": 8, "type": "int" if weights == INT8 else "float", "symmetric": True}
    whole = [] if OUTPUT in linear else ["lm_head"]
    named = ["re:.*lm_head"] if OUTPUT in linear else []
    # vLLM's class of output layers is not "Linear": one that is rounded must be named, another one left out.
    group = {"targets": ["Linear", *named], "weights": {**kind, "strategy": "channel", "dynamic": False},
             "input_activations": {**kind, "strategy": "token", "dynamic": True}}
    return {"torch_dtype": BFLOAT16, "quantization_config": {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": whole,
        "format": f"{kind['type']}-quantized", "config_groups": {"group_0": group}}}
