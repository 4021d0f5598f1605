"""Plain twin of a bigram drafter: one token at a time."""

import torch
from draftsmith.modules.families.bigram.drafter import Bigram
from torch import Tensor


def scores_after(drafter: Bigram, embedding_VD: Tensor, output_VD: Tensor, token: int) -> Tensor:
    """Log-probabilities [V] of the token after `token`, by the formula."""
    inner = drafter.down.weight @ embedding_VD[token]
    state = drafter.up.weight @ (inner / (1 + torch.exp(-inner)))
    return (output_VD @ state).log_softmax(-1)
