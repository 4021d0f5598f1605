"""Scaled rotary embeddings in a GGUF file.

llama.cpp's Llama and EAGLE-3 divide each frequency by a factor from the tensor `rope_freqs.weight`, so that any fixed
set of frequencies can be written. Its other architectures have no such tensor: they compute linear scaling and YaRN
themselves, from keys. The factor by which YaRN and LongRoPE lengthen queries and keys is a key everywhere.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FACTORS = "rope_freqs.weight"  # Name of the tensor of factors, one for each pair of numbers of a head
BY_FACTORS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings of a Llama of transformers that are the same at every context length."""
BY_KEYS = ("default", "linear", "yarn")  # Those that llama.cpp computes in architectures without factors
_SETTLED = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""YaRN's other settings, which such a file has no place for, with the values that llama.cpp takes."""


@dataclass(frozen=True, kw_only=True)
class GgufRope:
    """A scaled rotary embedding as llama.cpp reads it; empty where it is not scaled."""

    settings: dict[str, Any] = field(default_factory=dict)  # Keys without the architecture
    tensors: dict[str, Tensor] = field(default_factory=dict)  # Factors of the frequencies


def by_factors(frequencies: Tensor, length: float, base: float) -> GgufRope:
    """A rotary embedding of an architecture with factors.

    Args:
        frequencies: the scaled ones, one for each pair of numbers of a head.
        length: factor of the rotated queries and keys.
        base: of the frequencies before they were scaled.
    """
    slowed = frequencies.detach().cpu().double()
    plain = base ** (-torch.arange(len(slowed)).double() / len(slowed))
    factors = (plain / slowed).float()
    # A tensor of ones changes nothing, and readers that know no factors can then read the file, too.
    scaled = not torch.allclose(factors, torch.ones_like(factors))
    return GgufRope(settings=_lengthened(length), tensors={FACTORS: factors} if scaled else {})


def by_keys(rope: dict[str, Any], length: float) -> GgufRope:
    """A rotary embedding of an architecture without factors.

    Args:
        rope: `rope_parameters` of transformers, of a kind in `BY_KEYS`.
        length: factor of the rotated queries and keys.
    """
    if rope["rope_type"] == "default":
        return GgufRope()
    factor = float(rope["factor"])
    settings: dict[str, Any] = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": factor}
    if rope["rope_type"] == "linear":
        return GgufRope(settings=settings)
    settings["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    # llama.cpp lengthens by its own factor (arXiv:2309.00071, eq. 22) and then by that of the file.
    return GgufRope(settings=settings | _lengthened(length / (1.0 + 0.1 * math.log(factor))))


def _lengthened(length: float) -> dict[str, Any]:
    return {} if math.isclose(length, 1.0, rel_tol=1e-6) else {"rope.scaling.attn_factor": float(length)}


def unsettled(rope: dict[str, Any]) -> str:
    """The first setting of YaRN that keys do not hold, for people; empty where there is none."""
    wrong = [name for name, value in _SETTLED.items() if rope.get(name) not in (None, value)]
    return f"{wrong[0]} {rope[wrong[0]]}" if rope.get("rope_type") == "yarn" and wrong else ""
