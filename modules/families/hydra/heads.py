"""The trained parts of Hydra: heads that read a state and the tokens after it, and Hydra++'s prefix layer before them
(arXiv:2402.05109).

Shapes: B rows, N positions, D hidden size, Z width of what a head reads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config_checks import Dropout, NotNegative, Parts
from ...parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock, RMSNorm
from ...parts.heads import HeadConfig
from ..medusa.drafter import ResidualBlock


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadConfig):
    """The shape of Hydra heads. Hydra++ is `prefix`, with `num_layers` 4."""

    training_only = frozenset({"dropout", "noise"})
    num_layers: Parts = 1
    """Blocks of each head: the first reads the state and the tokens guessed so far, the others read its output."""
    tie_blocks: bool = True
    """Whether the blocks after the first are one block applied repeatedly, as in the official code; its layout can hold
    nothing else."""
    prefix: bool = False
    """Whether the drafter's own decoder layer first reads the target's states of the whole text (Hydra++)."""
    dropout: Dropout = 0.0
    """Dropout of the inputs of blocks and output layers in training; the official Hydra++ has 0.2."""
    noise: NotNegative = 0.0
    """Scale of uniform noise on the states and embeddings in training (NEFTune, arXiv:2310.05914, eq. 1)."""

    def carries(self, name: str, start: Any) -> bool:
        """Further blocks pass the state on; a tied one, which stands after the first, would be applied more often."""
        further = (not self.tie_blocks or start.num_layers == 1) and start.num_layers < self.num_layers
        return super().carries(name, start) or (name == "num_layers" and further)


class ConditionedBlock(nn.Module):
    """res_connection(z) + SiLU(linear(z)): one state from the concatenation z of a state and the tokens after it.

    At first its output is the state unchanged, so that the head equals the target's own output layer. The official code
    starts with a random `res_connection`, so that its heads have to learn to pass the state on.
    """

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width * parts, width)
        self.res_connection = nn.Linear(width * parts, width)
        for layer in (self.linear, self.res_connection):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.res_connection.weight[:, :width].fill_diagonal_(1)

    def forward(self, joined: Tensor) -> Tensor:
        """States [..., D] of concatenated parts [..., Z]."""
        passed: Tensor = self.res_connection(joined) + functional.silu(self.linear(joined))
        return passed

    def split(self, parts: list[Tensor]) -> Tensor:
        """`forward` of separate parts [..., D]: all heads share them, and backward keeps them once."""
        totals, width = [], parts[0].shape[-1]
        for layer in (self.res_connection, self.linear):
            # One slice of the weight for each part.
            total = functional.linear(parts[0], layer.weight[:, :width], layer.bias)
            for place, part in enumerate(parts[1:], start=1):
                total = total + functional.linear(part, layer.weight[:, place * width : (place + 1) * width])
            totals.append(total)
        return totals[0] + functional.silu(totals[1])


class HydraHead(nn.Module):
    """One head without its output layer."""

    def __init__(self, config: HydraConfig, width: int, step: int) -> None:
        super().__init__()
        self.config = config
        self.first = ConditionedBlock(width, step + 2)
        deeper = config.num_layers - 1
        own = min(deeper, 1) if config.tie_blocks else deeper
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(own))

    def deepen(self, hidden: Tensor) -> Tensor:
        """Output [..., D] of the last block for the output of the first."""
        for layer in range(self.config.num_layers - 1):
            block = self.blocks[0 if self.config.tie_blocks else layer]
            hidden = block(functional.dropout(hidden, self.config.dropout, self.training))
        return functional.dropout(hidden, self.config.dropout, self.training)


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer over the target's final states, and a norm after it (arXiv:2402.05109, section 3)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.block = DecoderBlock(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.block.zero_output()

    def forward(self, final_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The input of the heads in place of the target's states, [B, N, D]."""
        read_BND: Tensor = self.norm(self.block(final_BND, attention))
        return read_BND
