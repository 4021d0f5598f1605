"""DSpark's Markov head: a low-rank bigram table of the draft, with a gate or with a recurrent state (arXiv:2607.05147).

Shapes: D width of a slot's state, P numbers of a path, X numbers of a state, R rank, Q entries of the draft vocabulary,
V tokens of the target's vocabulary.
"""

import torch
from torch import Tensor, nn

from ....target.draft_vocabulary import OwnOutput
from .correction import Correction, Embed, Shape, table


class Markov(Correction):
    """A bias W2 b of rank R with b = W1[x] of the token x before: a bigram table of the draft (DSpark).

    `gated` multiplies b by a gate of slot and b; `rnn` reads b into a recurrent state, from which the bias comes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank = self.width, self.rank
        self.path_size = rank if shape.name == "rnn" else 0
        self.state_size = width + (rank if shape.name == "markov" else 2 * rank)
        self.markov_w1, self.markov_w2 = table(shape.tokens, rank), OwnOutput(rank, shape.entries, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if shape.name == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if shape.name == "rnn" else None

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, then W1[x], then what is made of it."""
        before = self.markov_w1(tokens)
        if self.gate_proj is not None:
            return path, torch.cat([slot, before, before * self.gate_proj(torch.cat([slot, before], -1)).sigmoid()], -1)
        if self.joint_proj is None:
            return path, torch.cat([slot, before], dim=-1)
        keep, new, out = self.joint_proj(torch.cat([path, before, slot], dim=-1)).chunk(3, dim=-1)
        path = keep.sigmoid() * path + (1 - keep.sigmoid()) * new.tanh()
        return path, torch.cat([slot, before, out.tanh()], dim=-1)

    def initialise(self, table_VD: Tensor) -> None:
        """No bias yet. The rows of W1 are the embeddings' principal components, about 1 in size: a token that training
        seldom sees then has neighbours, where the official code draws its row at random."""
        wide_VD = table_VD.to(torch.promote_types(table_VD.dtype, torch.float32))
        values_D, axes_DD = torch.linalg.eigh(wide_VD.mT @ wide_VD / len(wide_VD))
        rows = min(self.rank, len(values_D))
        # The largest first: the new columns of a table that continues one of smaller rank are others then.
        scale = values_D.flip(0)[:rows].clamp(min=1e-12).rsqrt()
        self.markov_w1.weight.zero_()
        self.markov_w1.weight[:, :rows] = wide_VD @ (axes_DD.flip(1)[:, :rows] * scale)
        self.markov_w2.weight.zero_()
