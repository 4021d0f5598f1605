"""Number formats in which logits are processed."""

import torch
from torch import Tensor


def widened(logits_BMV: Tensor) -> Tensor:
    """Logits in float32 or wider, in which transformers processes them."""
    return logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32))
