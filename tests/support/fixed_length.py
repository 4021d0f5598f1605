"""A stopping rule for tests: always the same number of tokens, 0 included."""

from dataclasses import dataclass

import torch
from draftsmith.modules.policies.stopping_chains import Drafted, StoppingRule
from torch import Tensor


@dataclass(frozen=True)
class FixedLength(StoppingRule):
    """Drafts so many tokens, whatever they are."""

    length: int

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor:
        return torch.full_like(peak_B, drafted.length >= self.length, dtype=torch.bool)
