"""A correction of the slot's state by the embedding of the token before, in front of the output layer: that of DFly
(arXiv:2607.25852), after TreeFlash (arXiv:2606.03819).

Shapes: D width of a slot's state, X numbers of a state.
"""

import torch
from torch import Tensor

from ....parts.decoder_block import GatedMLP, RMSNorm
from .correction import Correction, Embed, Shape


class StateCorrection(Correction):
    """h + down(SiLU(gate u) * up u) with u = [norm h ; norm e(x)], x the token before: the output layer reads it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.hidden_norm, self.embed_norm = (RMSNorm(self.width, eps=shape.eps) for _ in range(2))
        self.mlp = GatedMLP(2 * self.width, self.rank, output_size=self.width)

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The corrected state."""
        read = torch.cat([self.hidden_norm(slot), self.embed_norm(embed(tokens))], dim=-1)
        return path, slot + self.mlp(read)

    def initialise(self, table_VD: Tensor) -> None:
        """Add nothing yet."""
        self.mlp.down_proj.weight.zero_()
