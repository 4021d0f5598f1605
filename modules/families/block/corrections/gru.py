"""Domino's correction: a bias by all tokens before a guess in its block, which a gated recurrent unit reads
(arXiv:2605.29707).

Shapes: D width of a slot's state, R rank, G width of the recurrent state, P numbers of a path, X numbers of a state.
"""

import torch
from torch import Tensor, nn

from ....target.draft_vocabulary import OwnOutput
from .correction import Correction, Embed, Shape

WIDER = 4  # Width of the recurrent state in ranks: the papers have 1,024 and 256
ALONE_UNTIL = 0.5  # Share of a training in which the weight goes from the slots' own guesses to those with the bias


class RecurrentBias(Correction):
    """A bias W2 SiLU(W1 [h ; g]) of every guess but the first of a block, with g the state of a gated recurrent unit
    (arXiv:1406.1078, without biases) after the embeddings of all tokens before the guess, the root's first."""

    alone_too = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank = self.width, self.rank
        self.path_size, self.state_size = WIDER * rank, width + rank
        # The names are torch's; so is the order of the three gates: reset, update, new.
        self.prefix_gru = nn.ModuleDict({"weight_ih_l0": nn.Linear(width, 3 * self.path_size, bias=False),
                                         "weight_hh_l0": nn.Linear(self.path_size, 3 * self.path_size, bias=False)})
        self.embed_proj = nn.Sequential(nn.Linear(width + self.path_size, rank, bias=False), nn.SiLU(),
                                        OwnOutput(rank, shape.entries, bias=False))

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, and what W2 reads, zeros for the first guess. A path is the recurrent state."""
        reset, update, new = self.prefix_gru["weight_ih_l0"](embed(tokens)).chunk(3, dim=-1)
        kept_reset, kept_update, kept_new = self.prefix_gru["weight_hh_l0"](path).chunk(3, dim=-1)
        share = (update + kept_update).sigmoid()
        path = (1 - share) * (new + (reset + kept_reset).sigmoid() * kept_new).tanh() + share * path
        if step == 0:
            return path, nn.functional.pad(slot, (0, self.rank))
        return path, torch.cat([slot, self.embed_proj[:2](torch.cat([slot, path], dim=-1))], dim=-1)

    @staticmethod
    def weighed(weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """The slots learn to guess first."""
        alone = max(0.0, 1 - progress / ALONE_UNTIL)
        return tuple(share * weight for share in (1 - alone, alone) for weight in weights)

    def initialise(self, table_VD: Tensor) -> None:
        """No bias yet, where the paper starts with a random one."""
        for layer in self.prefix_gru.values():
            nn.init.uniform_(layer.weight, -self.path_size**-0.5, self.path_size**-0.5)  # type: ignore[arg-type]
        nn.init.normal_(self.embed_proj[0].weight, std=0.02)  # type: ignore[arg-type]
        self.embed_proj[2].weight.zero_()  # type: ignore[operator]
