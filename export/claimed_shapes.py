"""Shapes that an artifact's config.json describes, compared with its weights before memory is taken for them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..modules import DRAFTERS, Drafter, TargetIdentity, UserError
from ..modules.target.adapter import PREFIX


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
    with torch.device("meta"):
        described = {name: list(tensor.shape) for name, tensor in family.rebuild(description, identity)
                     .state_dict().items()}
    held = _shapes(weights)
    for name in sorted(described.keys() | held.keys()):
        if described.get(name) != held.get(name):
            raise UserError(f"{weights} does not fit the drafter that config.json describes: the tensor {name} should "
                            f"be {described.get(name, 'absent')} and is {held.get(name, 'absent')}; copy or train the "
                            "artifact again")


def _shapes(file: Path) -> dict[str, list[int]]:
    """Shapes of a drafter's tensors by name, from the header of their file. Those of an adapter are left out."""
    try:
        with safe_open(file, framework="pt") as opened:
            names: list[str] = opened.keys()
            return {name: opened.get_slice(name).get_shape() for name in names if not name.startswith(PREFIX)}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({error}); copy or train the artifact again") from error
