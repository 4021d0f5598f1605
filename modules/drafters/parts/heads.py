"""Shared parts of drafters with one head for each draft step (Medusa, Hydra).

Shapes: B rows, L positions, K heads, D hidden size, Q entries of the draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ...config_checks import check_sizes
from ...errors import UserError
from ...interfaces.drafter import DrafterConfig, Drafts
from ...target.draft_vocabulary import OwnOutput
from .shared_embeddings import BorrowingDrafter


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """Settings that all families of heads share."""

    num_heads: int = 4
    """Tokens guessed beyond the target's own next one; head k (from 0) at position p guesses token p + 2 + k."""
    output: Literal["shared", "copy", "one_copy"] = "shared"
    """`shared` reads the target's output layer and adds no weights; `copy` trains a copy of it for each head,
    `one_copy` a single copy for all heads."""

    def __post_init__(self) -> None:
        check_sizes(num_heads=self.num_heads, vocabulary_size=self.vocabulary_size)
        if self.output not in ("shared", "copy", "one_copy"):
            raise UserError(f"output must be 'shared', 'copy' or 'one_copy', got {self.output!r}")


class HeadDrafter(BorrowingDrafter):
    """A drafter with one head for each draft step; subclasses register `heads` and `outputs`.

    Args:
        config: the family's settings.
        hidden_size: the target's width.
        vocab_size: the target's vocabulary.
    """

    heads: nn.ModuleList
    outputs: nn.ModuleList

    def __init__(self, config: HeadConfig, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size=hidden_size, vocab_size=vocab_size, vocabulary_size=config.vocabulary_size)
        self.num_heads = config.num_heads

    @staticmethod
    def own_outputs(config: HeadConfig, width: int, vocab_size: int, *, bias: bool) -> nn.ModuleList:
        """The heads' own output layers: one for each, one for all, or none when they share the target's."""
        copies = {"shared": 0, "copy": config.num_heads, "one_copy": 1}[config.output]
        entries = config.vocabulary_size or vocab_size
        return nn.ModuleList(OwnOutput(width, entries, bias=bias) for _ in range(copies))

    @property
    def reach(self) -> int:
        """One depth for each head."""
        return self.num_heads

    @property
    def offsets(self) -> tuple[int, ...]:
        """Head k at position p guesses token p + 2 + k; the target's own output layer predicts p + 1."""
        return tuple(range(2, 2 + self.num_heads))

    def drafts(self, hidden_BLKD: Tensor) -> Drafts:
        """The heads' states as drafts; head k estimates the target's state one position before its token."""
        estimates = tuple(offset - 1 for offset in self.offsets)
        return Drafts(hidden_BLKD=hidden_BLKD, offsets=self.offsets, estimates=estimates)

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of head `step` for its states [..., D]."""
        if not self.outputs:
            return super().project(hidden, step)
        return self._rows().through(hidden, cast(OwnOutput, self.outputs[self._output_of(step)]))

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` reads for head `step`; empty when the output layer is shared."""
        return tuple(self.outputs[self._output_of(step)].parameters()) if self.outputs else ()

    def _output_of(self, step: int) -> int:
        """Index in `outputs` of the layer that head `step` reads."""
        return 0 if len(self.outputs) == 1 else step

    @torch.no_grad()
    def copy_output(self) -> None:
        """Initialise the heads' own output layers with the target's."""
        borrowed = self._rows()
        for step in range(len(self.outputs)):
            weight_QD, *biases = self.output_parameters(step)
            weight_QD.copy_(borrowed.weight_QD)
            for bias_Q in biases:
                bias_Q.copy_(torch.zeros_like(bias_Q) if borrowed.bias_Q is None else borrowed.bias_Q)
