"""One pass per anchor and depth: what a draft model with mask tokens says, without packing anything."""

import torch
from draftsmith.modules import DraftLM
from torch import Tensor


@torch.no_grad()
def state_behind(drafter: DraftLM, text: list[int], masks: int) -> Tensor:
    """The last state of a causal pass over a text and so many mask tokens after it."""
    tokens = torch.tensor([text + [-1] * masks])
    length = tokens.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    positions = torch.arange(length)[None]
    return drafter._states(drafter.embed(tokens), causal, positions, positions)[0, -1]
