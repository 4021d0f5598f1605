"""Rotary position embedding of a drafter's own layers, with the scaling by which long-context targets change it.

Shapes: B rows, H heads, N tokens, E head dimension.
"""

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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


def rotate(heads_BHNE: Tensor, positions_BN: Tensor, base: float, scaling: dict[str, Any] | None = None) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864, eq. 34): element j rotates with j + E/2, angles in float32.

    Args:
        heads_BHNE: queries or keys.
        positions_BN: position id of each token.
        base: base of the frequencies.
        scaling: of `carried_scaling`; also scales the result where it says so (YaRN, arXiv:2309.00071, eq. 15).
    """
    half, size = heads_BHNE.shape[-1] // 2, 1.0
    order = torch.arange(half, device=positions_BN.device, dtype=torch.float32)
    frequencies = base ** (-order / half)
    if scaling is not None:
        frequencies, size = _scaled(json.dumps(scaling, sort_keys=True), base, 2 * half, positions_BN.device)
    angles_B1NE = (positions_BN[:, None, :, None].float() * frequencies).repeat(1, 1, 1, 2)
    turned = torch.cat([-heads_BHNE[..., half:], heads_BHNE[..., :half]], dim=-1)
    return (size * (heads_BHNE * angles_B1NE.cos() + turned * angles_B1NE.sin())).to(heads_BHNE.dtype)


@cache
def _scaled(scaling: str, base: float, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """(frequencies [E / 2], factor of the result) as transformers has them; kept, since making them waits for the
    device."""
    rope = json.loads(scaling)
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
                         max_position_embeddings=rope["original_max_position_embeddings"],
                         rope_parameters={**rope, "rope_theta": base})
    frequencies, size = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
    return frequencies, float(size)
