"""Sizes that a configuration claims, compared with the weights before memory is taken for them.

A configuration of a few bytes can ask for a billion layers. The weights cannot lie about their size: a parameter takes
at least a bit of them, and a layer at least one tensor.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from ...errors import UserError

MOST_LAYERS = 10_000  # Most layers or experts of a model: each may be a module of its own
MOST_WIDTH = 2**26  # Largest width, number of heads or vocabulary
_PARTS = re.compile(r"(.*_)?(n_)?layers?|.*expert.*")
_WIDTHS = re.compile(r"(num|n|d)_.*|.*_(size|dim|rank)")
_WEIGHTS = ("*.safetensors", "*.bin")  # Files of weights in a Hugging Face folder


def check_claims(fields: Mapping[str, Any], name: str) -> None:
    """Refuse sizes in a configuration, as JSON gave it, that no model has: UserError with field, value and bound."""
    for key, value in _integers(fields):
        most = MOST_LAYERS if _PARTS.fullmatch(key) else MOST_WIDTH if _WIDTHS.fullmatch(key) else None
        if most is not None and not abs(value) <= most:
            raise UserError(f"the configuration of {name} has {key} {value}, more than any model ({most:,}); correct "
                            "it, or copy the model again")


def _integers(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(key, value) of all whole numbers in a configuration, sections included."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _integers(value)
        elif isinstance(value, int):
            yield str(key), value


def check_layers(num_layers: int, folder: Path, name: str) -> None:
    """Refuse more layers than a folder's safetensors files have tensors, before a module is made for each. Raises
    UserError, of a damaged file too."""
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


def check_parameters(sketch: nn.Module, stored: int, name: str) -> None:
    """Refuse a model (`sketch`, on torch's meta device) with more parameters than its weights have bits; `stored`
    bytes, 0 where they are not here yet. Raises UserError."""
    claimed = sum(parameter.numel() for parameter in sketch.parameters())
    if stored and claimed > 8 * stored:
        raise UserError(f"the configuration of {name} makes {claimed:,} parameters, but its weights have {stored:,} "
                        "bytes; correct it, or copy the model again")


def stored_bytes(folder: Path) -> int:
    """Bytes of the weights in a Hugging Face folder; 0 where it is none."""
    return sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern) if file.is_file())
