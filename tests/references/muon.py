"""Muon in float64, one matrix at a time."""

import torch
from torch import Tensor


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five rounds of a x + (b (x x^T) + c (x x^T)^2) x, from the matrix at norm 1."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def plain_muon(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    """The weight after a step with each gradient."""
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        average = 0.95 * average + 0.05 * gradient.double()
        looked_ahead = 0.95 * average + 0.05 * gradient.double()
        weight = (1 - lr * decay) * weight - lr * 0.2 * max(weight.shape) ** 0.5 * orthogonalised(looked_ahead)
    return weight
