"""Acceptance head: the estimated probability that the target accepts a drafted token (SpecDec++, arXiv:2405.19715).

It reads the drafter's hidden state at the token, whatever the family. The drafter and the target stay as they are.

Shapes: N states, D width of the drafter's states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import CheckedSettings, Parts
from ..errors import UserError
from .medusa.drafter import ResidualBlock

REJECTED, ACCEPTED = 0, 1  # The two classes, in the order of the official code


@dataclass(frozen=True, kw_only=True)
class AcceptanceHeadConfig(CheckedSettings):
    """The shape of an acceptance head."""

    num_layers: Parts = 3
    """Residual blocks; the official code applies one block as often, by mistake."""


class AcceptanceHead(nn.Module):
    """Linear(D, 2) on residual blocks x + SiLU(W x + b); the softmax's second entry is the acceptance (section 3.1).

    Own weights, in float32: `blocks.{layer}.linear.{weight,bias}` and `output.{weight,bias}`. New blocks are the
    identity; the official code starts with random ones.

    Args:
        config: its settings.
        width: of the drafter's states.
    """

    def __init__(self, config: AcceptanceHeadConfig, width: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(config.num_layers))
        self.output = nn.Linear(width, 2)

    def forward(self, states_ND: Tensor) -> Tensor:
        """Logits of rejection and acceptance, [N, 2] (any leading shape), in float32.

        Raises:
            UserError: if the states have another width.
        """
        if states_ND.shape[-1] != self.width:
            raise UserError(f"this acceptance head reads states of width {self.width}, the drafter's have "
                            f"{states_ND.shape[-1]}; train a head for this drafter with draftsmith specdec")
        hidden_ND = states_ND.to(self.output.weight.dtype)
        for block in self.blocks:
            hidden_ND = block(hidden_ND)
        logits_N2: Tensor = self.output(hidden_ND)
        return logits_N2

    @torch.no_grad()
    def log_acceptance(self, states_ND: Tensor) -> Tensor:
        """log P(accepted), [N]."""
        return log_accepted(self(states_ND))


def log_accepted(logits_N2: Tensor) -> Tensor:
    """log P(accepted) of a head's logits, [N]."""
    return functional.logsigmoid(logits_N2[..., ACCEPTED] - logits_N2[..., REJECTED])


def log_rejected(logits_N2: Tensor) -> Tensor:
    """log P(rejected) of a head's logits, [N]."""
    return functional.logsigmoid(logits_N2[..., REJECTED] - logits_N2[..., ACCEPTED])
