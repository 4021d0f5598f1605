"""DFlash 2's selector: a choice among the likeliest tokens of each slot by the token before.

Shapes: D width of a slot's state, P numbers of a path, X numbers of a state, R rank, Q tokens of the vocabulary.
"""

import torch
from torch import Tensor, nn

from .correction import Correction, Embed, Logits, Shape, table

CANDIDATES = 16  # Likeliest tokens of a slot among which a selector chooses


class Selector(Correction):
    """A choice among a slot's likeliest tokens b: U(b) + <A[a] * (P h), C[b]> for the token a before (DFlash 2)."""

    chooses = alone_too = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.state_size, self.most = self.width + self.rank, min(CANDIDATES, shape.tokens)
        self.hidden_projection = nn.Linear(self.width, self.rank, bias=False)
        self.predecessor_codebook, self.successor_codebook = (table(shape.tokens, self.rank) for _ in range(2))

    def begin(self, slots: Tensor) -> Tensor:
        """The slots' states, and P h."""
        return torch.cat([slots, self.hidden_projection(slots)], dim=-1)

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, and what its candidates are compared with."""
        compared = self.predecessor_codebook(tokens) * slot[..., self.width :]
        return path, torch.cat([slot[..., : self.width], compared], dim=-1)

    def candidates(self, states: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the slot, with their corrected logits."""
        best = logits(states[..., : self.width]).topk(self.most, dim=-1)
        added = (self.successor_codebook(best.indices) * states[..., None, self.width :]).sum(-1)
        return best.indices, best.values + added.to(best.values.dtype)

    def initialise(self, table_VD: Tensor) -> None:
        """Choose the slot's likeliest token: C is zero. A learns nothing before C does."""
        for weight in (self.predecessor_codebook.weight, self.hidden_projection.weight):
            nn.init.normal_(weight, std=0.02)
        self.successor_codebook.weight.zero_()

    def output_parameters(self) -> tuple[nn.Parameter, ...]:
        """C."""
        return tuple(self.successor_codebook.parameters())
