"""Checks of a drafter's tensors in a file, before they become its weights or take memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..modules import DRAFTERS, Drafter, TargetIdentity, UserError
from ..modules.target.adapter import PREFIX
from ..modules.target.loading.stored_weights import all_finite

_NAMED = 5
"""Number of wrong tensors that an error names."""


def check_shapes(family: type[Drafter], description: dict[str, Any], identity: TargetIdentity, weights: Path) -> None:
    """Refuse a description of other tensors than the weights hold.

    A family outside the package is not checked: its code is trusted, and need not run on torch's meta device.

    Args:
        family: class of the drafter.
        description: of the drafter, from config.json.
        identity: of its target, which must be that of the target in use.
        weights: the safetensors file; a missing one is left to its reader.

    Raises:
        UserError: naming the first tensor that differs.
    """
    if family not in DRAFTERS or not weights.is_file():
        return
    described = _described(family, description, identity)
    try:
        with safe_open(weights, framework="pt") as opened:
            names: list[str] = opened.keys()
            # The same file may hold an adapter of the target, which the drafter knows nothing of.
            held = {name: opened.get_slice(name).get_shape() for name in names if not name.startswith(PREFIX)}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights} is damaged ({error}); copy or train the artifact again") from error
    for name in sorted(described.keys() | held.keys()):
        if described.get(name) != held.get(name):
            raise UserError(f"{weights} does not fit the drafter that config.json describes: the tensor {name} should "
                            f"be {described.get(name, 'absent')} and is {held.get(name, 'absent')}; copy or train the "
                            "artifact again")


def require_described(drafter: Drafter, identity: TargetIdentity) -> None:
    """Refuse a drafter with other tensors than its own description asks for: an engine passes over an unknown one and
    leaves a missing one at random. Raises ValueError."""
    if type(drafter) in DRAFTERS:
        described = _described(type(drafter), drafter.describe(), identity)
        held = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
        if wrong := sorted(name for name in described | held if described.get(name) != held.get(name)):
            raise ValueError(f"the export would hold wrong tensors: {', '.join(wrong[:_NAMED])}")


def _described(family: type[Drafter], description: dict[str, Any], identity: TargetIdentity) -> dict[str, list[int]]:
    """Shapes of the tensors that a description asks for."""
    # On the meta device nothing is allocated: config.json could claim any size.
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in family.rebuild(description, identity).state_dict().items()}


def require_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Refuse values that are not finite, and weights whose number format is of another kind than a drafter's.

    Loading would turn them into weights without a word. Names and shapes are left to it.

    Args:
        tensors: what the file holds.
        expected: tensors of the drafter by name; anything else in the file is a matrix of real numbers.
        where: name of what was read: the path of the file.

    Raises:
        UserError: naming the first such tensor.
    """
    for name, tensor in tensors.items():
        wanted = expected[name].dtype if name in expected else torch.float32
        if _kind(tensor.dtype) != _kind(wanted):
            raise UserError(f"the tensor {name} of {where} holds {_kind(tensor.dtype)} ({tensor.dtype}), "
                            f"{_kind(wanted)} were expected; train, export or copy it again")
        if not all_finite(tensor):
            raise UserError(f"the tensor {name} of {where} holds values that are not finite (nan or inf); train, "
                            "export or copy it again")


def _kind(dtype: torch.dtype) -> str:
    """Name of the numbers of a number format."""
    if dtype == torch.bool:
        return "truth values"
    if dtype.is_complex:
        return "complex numbers"
    return "real numbers" if dtype.is_floating_point else "whole numbers"
