"""XPress's refiner: a bias by all tokens before a guess in its block (arXiv:2608.02438).

Shapes: D width of a slot's state, R rank, S slots of a block, P numbers of a path, X numbers of a state.
"""

import torch
from torch import Tensor, nn

from ....parts.decoder_block import GatedMLP
from ....target.draft_vocabulary import OwnOutput
from .correction import Correction, Embed, Shape, table

SLOTS_WEIGHT = 0.6  # Weight of the slots' own guesses next to the refined ones


class Refiner(Correction):
    """A bias W2 x of the token after slot k, with x = y + MLP(y), y = a_k + sum_{j <= k} L[:, k, j] a_j and
    a_k = Win [Dh h_k ; Dg mean h ; E[t_k]] for the token t_k before the guess; before the first two slots stands the
    root, as in vLLM."""

    reads_block = alone_too = own_token = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank, slots = self.width, self.rank, self.slots
        self.path_size, self.state_size, self.w1 = slots * rank, width + rank, table(shape.tokens, rank)
        self.down_h, self.down_g = nn.Linear(width, rank, bias=False), nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = nn.ParameterDict({"L": torch.zeros(rank, slots, slots)})
        self.mlp = GatedMLP(rank, 2 * rank)
        self.w2 = OwnOutput(rank, shape.entries, bias=False)

    def begin(self, block: Tensor) -> Tensor:
        """The states of the slots that guess, and the parts of their a and of the first slot's that are known."""
        mean = self.down_g(block.mean(-2, keepdim=True)).expand(*block.shape[:-1], -1)
        known = nn.functional.linear(torch.cat([self.down_h(block), mean], -1), self.in_proj.weight[:, : 2 * self.rank])
        first = known[..., :1, :].expand_as(known)
        return torch.cat([block, known, first], dim=-1)[..., 1:, :]

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, and x. A path has the a of each slot so far."""
        state, known, first = torch.split(slot, [self.width, self.rank, self.rank], dim=-1)
        read = nn.functional.linear(self.w1(tokens), self.in_proj.weight[:, 2 * self.rank :])
        kept = [first + read] if step == 0 else list(torch.split(path, self.rank, dim=-1)[: step + 1])
        kept.append(known + read)
        mixed = kept[-1] + sum((self.mix["L"][:, step + 1, place] * one for place, one in enumerate(kept)),
                               torch.zeros_like(known))
        path = torch.cat([*kept, path[..., len(kept) * self.rank :]], dim=-1)
        return path, torch.cat([state, mixed + self.mlp(mixed)], dim=-1)

    @staticmethod
    def weighed(weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """The slots' own guesses count less."""
        return weights + tuple(SLOTS_WEIGHT * weight for weight in weights)

    def initialise(self, table_VD: Tensor) -> None:
        """No bias yet, where the paper starts with a random one."""
        layers = (self.w1, self.down_h, self.down_g, self.in_proj, *self.mlp.children())
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
        self.w2.weight.zero_()
