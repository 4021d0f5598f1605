"""Attention whose scores are squashed before the softmax, as Gemma 2 has it.

Shapes: B rows, H heads, N queries, W keys, E head dimension.
"""

import torch
from torch import Tensor


def soft_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Attention output [B, H, N, E] with scores squashed to (-softcap, softcap) before the mask, as Gemma 2 does.

    Args:
        query: [B, H, N, E].
        key: [B, G, W, E]; G divides H.
        value: [B, G, W, E].
        mask: True, or above minus infinity, where a query sees a key; None for causal attention of the last N of W.
        scaling: factor of the scores; None takes one over the root of E.
        softcap: their bound.
    """
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(key.shape[2] - query.shape[2])
    hidden = ~mask if mask.dtype is torch.bool else mask == -torch.inf
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ value
