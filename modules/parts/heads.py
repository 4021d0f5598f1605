"""Shared parts of drafters with one head for each draft step (Medusa, Hydra).

Shapes: B rows, L positions, K heads, D hidden size, Q entries of the draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..config_checks import Parts
from ..interfaces.drafter import DrafterConfig, Drafts
from ..interfaces.proposer import State
from ..target.draft_vocabulary import OwnOutput
from ..target.model import Target
from .decoder_block import BlockConfig
from .shared_embeddings import BorrowingDrafter, Sizes


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """Settings that all families of heads share."""

    num_heads: Parts = 4
    """Tokens guessed beyond the target's own next one; head k (from 0) at position p guesses token p + 2 + k."""
    output: Literal["shared", "copy", "one_copy"] = "shared"
    """`shared` reads the target's output layer and adds no weights; `copy` trains a copy of it for each head,
    `one_copy` a single copy for all heads."""

    def carries(self, name: str, start: Any) -> bool:
        """Further heads start as those of a new drafter."""
        return super().carries(name, start) or (name == "num_heads" and start.num_heads < self.num_heads)


class HeadDrafter(BorrowingDrafter[State]):
    """A drafter with one head for each draft step; subclasses register `heads`.

    Args:
        config: the family's settings.
        sizes: of the target.
        block: the shape of a decoder layer before the heads; None without one.
    """

    heads: nn.ModuleList
    output_bias: ClassVar[bool] = False  # Whether the heads' own output layers have a bias

    def __init__(self, config: HeadConfig, sizes: Sizes, block: BlockConfig | None = None) -> None:
        super().__init__(config, sizes, block)
        self.reach = self.trained_steps = config.num_heads
        # The target's own output layer predicts p + 1, so that head k at position p guesses token p + 2 + k.
        self.offsets = tuple(range(2, 2 + config.num_heads))
        copies = {"shared": 0, "copy": config.num_heads, "one_copy": 1}[config.output]
        entries = config.vocabulary_size or sizes.vocab_size
        self.outputs = nn.ModuleList(OwnOutput(sizes.hidden_size, entries, bias=self.output_bias)
                                     for _ in range(copies))

    def initialise(self, target: Target) -> None:
        """Let every head start as the target's output layer, of which its own one becomes a copy."""
        borrowed = self.output_rows()
        for step in range(len(self.outputs)):
            weight_QD, *biases = self.output_parameters(step)
            weight_QD.copy_(borrowed.weight_QD)
            for bias_Q in biases:
                bias_Q.copy_(torch.zeros_like(bias_Q) if borrowed.bias_Q is None else borrowed.bias_Q)

    def drafts(self, hidden_BLKD: Tensor) -> Drafts:
        """The heads' states as drafts; head k estimates the target's state one position before its token."""
        estimates = tuple(offset - 1 for offset in self.offsets)
        return Drafts(hidden_BLKD=hidden_BLKD, offsets=self.offsets, estimates=estimates)
