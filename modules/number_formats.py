"""Number formats in which logits are processed."""

import torch
from torch import Tensor


def widened(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 if they already are, in which transformers processes them."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
