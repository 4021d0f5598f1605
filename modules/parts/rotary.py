"""Rotary position embedding of a drafter's own layers, with the scaling by which long-context targets change it.

Shapes: B rows, H heads, N tokens, E head dimension, J half of it.
"""

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Rotation = tuple[Tensor, Tensor]  # Cosines and signed sines of a rotary embedding, [B, 1, N, E] each
SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""Scalings that a drafter takes over. Within the target's context length each is one fixed set of frequencies: those of
`dynamic` and `longrope` change beyond it alone."""


def carried_scaling(rope: dict[str, Any], head_dim: int, context_length: int) -> dict[str, Any] | None:
    """A target's scaling for a drafter's heads, as transformers writes it but without the base; None for none.

    Args:
        rope: the target's `rope_parameters`.
        head_dim: width of the drafter's heads. They rotate whole: factors for a part of a head do not fit them.
        context_length: the target's.
    """
    if rope.get("rope_type") not in SCALINGS or len(rope.get("short_factor", [])) not in (0, head_dim // 2):
        return None
    kept = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return {"original_max_position_embeddings": context_length, **kept}


def rotation(positions_BN: Tensor, base: float, size: int, scaling: dict[str, Any] | None = None) -> Rotation:
    """The rotary position embedding of these positions (arXiv:2104.09864, eq. 34), angles in float32.

    Args:
        positions_BN: position ids.
        base: of the frequencies.
        size: head dimension E; element j rotates with j + E/2.
        scaling: of `carried_scaling`; also scales the result where it says so (YaRN, arXiv:2309.00071, eq. 15).
    """
    frequencies_J, factor = frequencies(base, size, scaling, positions_BN.device)
    angles_B1NJ = positions_BN[:, None, :, None].float() * frequencies_J
    cosine, sine = factor * angles_B1NJ.cos(), factor * angles_B1NJ.sin()
    return torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)


def frequencies(base: float, size: int, scaling: dict[str, Any] | None, device: torch.device) -> tuple[Tensor, float]:
    """(frequencies [E / 2] of a head of E numbers, factor of the cosines and sines); arguments as of `rotation`."""
    if scaling is not None:
        return _scaled(json.dumps(scaling, sort_keys=True), base, size, device)
    return base ** (-torch.arange(size // 2, device=device, dtype=torch.float32) / (size // 2)), 1.0


def rotate(heads_BHNE: Tensor, turns: Rotation) -> Tensor:
    """Heads rotated by their positions, in their own number format."""
    rotated: Tensor = _Rotated.apply(heads_BHNE, *turns)  # type: ignore[no-untyped-call]
    return rotated


class _Rotated(torch.autograd.Function):
    """A rotation, whose backward pass is the rotation back: autograd would keep and add up four products."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        # The roll swaps the halves: element j rotates with j + E/2.
        return (heads * cosine + heads.roll(heads.shape[-1] // 2, -1) * sine).to(heads.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (cosine, sine) = outer, ctx.saved_tensors
        return (grad * cosine + (grad * sine).roll(grad.shape[-1] // 2, -1)).to(grad.dtype), None, None


@cache
def _scaled(scaling: str, base: float, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """(frequencies [E / 2], factor of the result) as transformers has them; kept, since making them waits for the
    device."""
    rope = json.loads(scaling)
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
                         max_position_embeddings=rope["original_max_position_embeddings"],
                         rope_parameters={**rope, "rope_theta": base})
    frequencies_J, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
    return frequencies_J, float(factor)
