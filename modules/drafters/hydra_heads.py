"""The trained parts of Hydra: heads that read a state and the tokens behind it, and Hydra++'s layer in front of them
(arXiv:2402.05109).

Shapes: B rows, N positions, D hidden size, Z width of what a head reads.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes
from ..errors import UserError
from ..features import Features
from ..target.model import Target
from .medusa import ResidualBlock
from .parts.decoder_block import BlockConfig, DecoderBlock, Sight

_PROBE = 64
"""Tokens of the pass that shows how large the target's final states are."""


@dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """The shape of Hydra heads. Hydra++ is `prefix`, with `num_layers` 4."""

    num_heads: int = 4
    """Tokens guessed beyond the target's own next one; head k (from 0) at index p guesses token p + 2 + k."""
    num_layers: int = 1
    """Blocks of each head: the first reads the state and the tokens guessed so far, the others follow it."""
    tie_blocks: bool = True
    """Whether the blocks behind the first are one block, applied again and again, as in the official code; its layout
    holds no others."""
    prefix: bool = False
    """Whether a decoder layer of the drafter's own reads the target's states of the whole text first (Hydra++)."""
    dropout: float = 0.0
    """Share of what the blocks and the output layers read that is zeroed in training; the official Hydra++ has 0.2."""
    noise: float = 0.0
    """Scale of uniform noise on the states and embeddings in training (NEFTune, arXiv:2310.05914, eq. 1)."""
    output: Literal["shared", "copy"] = "shared"
    """`shared` reads the target's own output layer and adds no weights; `copy` trains an own one for every head."""
    vocabulary_size: int | None = None
    """Entries of a reduced draft vocabulary, the most frequent tokens of the training data; None keeps them all."""

    def __post_init__(self) -> None:
        check_sizes(num_heads=self.num_heads, num_layers=self.num_layers, vocabulary_size=self.vocabulary_size)
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        if not self.noise >= 0:
            raise UserError(f"noise must not be negative, got {self.noise!r}")
        if self.output not in ("shared", "copy"):
            raise UserError(f"output must be 'shared' or 'copy', got {self.output!r}")


class ConditionedBlock(nn.Module):
    """res_connection(z) + SiLU(linear(z)): from the state and the tokens behind it, side by side, to one state.

    At the start it gives the state unchanged, and the head is the target's own output layer. The official code begins
    with a random `res_connection`, so that its heads first have to find what the state says.
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
        """The states [..., D] of joined parts [..., Z]."""
        passed: Tensor = self.res_connection(joined) + functional.silu(self.linear(joined))
        return passed

    def split(self, parts: list[Tensor]) -> Tensor:
        """The same of parts [..., D] each, never joined: all heads share them, and backward keeps them once."""
        return _summed(self.res_connection, parts) + functional.silu(_summed(self.linear, parts))


class HydraHead(nn.Module):
    """One head up to its output layer."""

    def __init__(self, config: HydraConfig, width: int, step: int) -> None:
        super().__init__()
        self.config = config
        self.first = ConditionedBlock(width, step + 2)
        deeper = config.num_layers - 1
        own = min(deeper, 1) if config.tie_blocks else deeper
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(own))

    def deepen(self, hidden: Tensor) -> Tensor:
        """The states [..., D] behind all blocks, of those behind the first."""
        for layer in range(self.config.num_layers - 1):
            block = self.blocks[0 if self.config.tie_blocks else layer]
            hidden = block(functional.dropout(hidden, self.config.dropout, self.training))
        return functional.dropout(hidden, self.config.dropout, self.training)


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer over the target's final states, with a norm behind it (arXiv:2402.05109, section 3)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.block = DecoderBlock(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.block.silence()

    def forward(self, final_BND: Tensor, sight: Sight) -> Tensor:
        """What the heads read in the place of the target's states, [B, N, D]."""
        read_BND: Tensor = self.norm(self.block(final_BND, sight))
        return read_BND

    @torch.no_grad()
    def fit(self, target: Target) -> None:
        """Let the norm begin at the size of the target's final states: the layer then changes next to nothing."""
        if target.device.type == "meta":
            # A sketch of a target, to plan with, has no states.
            return
        tokens = [place % target.vocab_size for place in range(min(_PROBE, target.context_length))]
        final_BLD = target.encode(Features.from_rows([(tokens, [True] * len(tokens))])).final()
        self.norm.weight.fill_(final_BLD.float().square().mean().sqrt())


def _summed(layer: nn.Linear, parts: list[Tensor]) -> Tensor:
    """The layer's product with parts side by side, [..., D], one slice of its weight a part."""
    width = parts[0].shape[-1]
    total = functional.linear(parts[0], layer.weight[:, :width], layer.bias)
    for place, part in enumerate(parts[1:], start=1):
        total = total + functional.linear(part, layer.weight[:, place * width : (place + 1) * width])
    return total
