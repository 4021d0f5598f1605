"""Checks of tensors that were read from a file, before they become a drafter's weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..modules import UserError


def require_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Refuse values that are not finite, and weights whose number format is of another kind than a drafter's.

    Loading would turn them into weights without a word. Names and shapes are left to it.

    Args:
        tensors: what the file holds.
        expected: tensors of the drafter by name; anything else in the file is a matrix of real numbers.
        where: what was read, for people: the path of the file.

    Raises:
        UserError: naming the first such tensor.
    """
    for name, tensor in tensors.items():
        wanted = expected[name].dtype if name in expected else torch.float32
        if _kind(tensor.dtype) != _kind(wanted):
            raise UserError(f"the tensor {name} of {where} holds {_kind(tensor.dtype)} ({tensor.dtype}), "
                            f"{_kind(wanted)} were expected; train, export or copy it again")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(f"the tensor {name} of {where} holds values that are not finite (nan or inf); train, "
                            "export or copy it again")


def _kind(dtype: torch.dtype) -> str:
    """Name of the numbers of a number format."""
    if dtype == torch.bool:
        return "truth values"
    if dtype.is_complex:
        return "complex numbers"
    return "real numbers" if dtype.is_floating_point else "whole numbers"
