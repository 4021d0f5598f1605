"""Hydra's states in the plainest form: one position and one head at a time, the parts joined as in the paper."""

import torch
from draftsmith.modules import Features, Hydra
from torch import Tensor
from torch.nn.functional import linear, silu


def hydra_state(drafter: Hydra, features: Features, context_BLD: Tensor, row: int, place: int, step: int) -> Tensor:
    """Output of head `step` at one index, [D]; `context_BLD` is what it reads of the text."""
    segment, parts = int(features.segments_BL[row, place]), [context_BLD[row, place]]
    for ahead in range(1, step + 2):
        index = place + ahead
        inside = index < features.tokens_BL.shape[1] and int(features.segments_BL[row, index]) == segment >= 0
        token = features.tokens_BL[row, min(index, features.tokens_BL.shape[1] - 1)]
        embedded = drafter.output_rows().target.embed(token)
        parts.append(embedded if inside else torch.zeros_like(embedded))
    head = drafter.heads[step]
    joined, first = torch.cat(parts), head.first
    hidden = linear(joined, first.res_connection.weight, first.res_connection.bias)
    hidden = hidden + silu(linear(joined, first.linear.weight, first.linear.bias))
    for layer in range(drafter.config.num_layers - 1):
        block = head.blocks[0 if drafter.config.tie_blocks else layer].linear
        hidden = hidden + silu(linear(hidden, block.weight, block.bias))
    return hidden
