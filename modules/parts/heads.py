"""Heads on a drafter's or the target's states: what drafters with one head for each draft step share (Medusa, Hydra),
the acceptance head of SpecDec++ (arXiv:2405.19715), for any family, and the candidate head of EAGLE-4.

Shapes: B rows, L positions, K heads, D hidden size, Q entries of the draft vocabulary, N states, R rank, C
candidates."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import CheckedSettings, Parts
from ..errors import UserError
from ..interfaces.drafter import DrafterConfig, Drafts
from ..interfaces.proposer import State
from ..target.draft_vocabulary import OutputRows, OwnOutput
from ..target.model import Target
from .decoder_block import BlockConfig
from .shared_embeddings import BorrowingDrafter, Sizes


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b) (arXiv:2401.10774, section 2.1.1), exactly the identity at the start of training. The official
    code sets only W to zero, so that it starts at x + SiLU(b); here b is zero too, and every head starts as the
    target's own output layer, as the paper says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The next states, [..., D] like `hidden`."""
        return hidden + functional.silu(self.linear(hidden))


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
    """A drafter with one head for each draft step; subclasses register `heads`, and may have a decoder layer before."""

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


@dataclass(frozen=True, kw_only=True)
class AcceptanceHeadConfig(CheckedSettings):
    """The shape of an acceptance head, which reads the drafter's state at a drafted token."""

    num_layers: Parts = 3
    """Residual blocks; the official code applies one block as often, by mistake."""


class AcceptanceHead(nn.Module):
    """Linear(D, 2) on residual blocks x + SiLU(W x + b) over drafters' states of this width; the softmax's second entry
    is the acceptance (section 3.1). Own weights, in float32: `blocks.{layer}.linear.{weight,bias}` and
    `output.{weight,bias}`. New blocks are the identity; the official code starts with random ones."""

    def __init__(self, config: AcceptanceHeadConfig, width: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(config.num_layers))
        self.output = nn.Linear(width, 2)

    def forward(self, states_ND: Tensor) -> Tensor:
        """Logits of rejection and acceptance, [N, 2] (any leading shape), in float32. UserError for another width."""
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
        logits_N2: Tensor = self(states_ND)
        return functional.logsigmoid(logits_N2[..., 1] - logits_N2[..., 0])


class CandidateHead(nn.Module):
    """Two factors of an output layer, whose product is cheap and finds the few entries that the layer itself then
    scores (EAGLE-4). Own weights, NaN until made or loaded: `down.weight` [R, D] and `up.weight` [Q, R]."""

    def __init__(self, width: int, entries: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.candidates = candidates
        self.down, self.up = OwnOutput(width, rank, bias=False), OwnOutput(rank, entries, bias=False)

    @torch.no_grad()
    def factorise(self, weight_QD: Tensor, counts_Q: Tensor | None = None) -> None:
        """Take the factors of the nearest product of this rank, by the truncated SVD of the layer's rows; with counts
        of tokens a row's error counts as often as its token."""
        rows_QD = weight_QD.to(torch.promote_types(weight_QD.dtype, torch.float32))
        weighed_QD = rows_QD if counts_Q is None else rows_QD * counts_Q.to(rows_QD)[:, None].sqrt()
        # Rows are fitted one by one once the axes are chosen, so that weights decide the axes alone.
        down_RD = principal(weighed_QD, self.down.out_features).mT
        self.down.weight.copy_(down_RD)
        self.up.weight.copy_(rows_QD @ down_RD.mT)

    def logits(self, states: Tensor, rows: OutputRows) -> Tensor:
        """Logits [..., Q] of the product for states [..., D]; `rows` add the target's bias, scaling and capping."""
        return rows.through(self.down(states.to(self.down.weight.dtype)), self.up)

    def rescored(self, states: Tensor, rows: OutputRows, weight_QD: Tensor) -> tuple[Tensor, Tensor]:
        """(the best entries by the product, their logits by the layer's own rows), [..., C] each."""
        entries_C = self.logits(states, rows).topk(self.candidates, dim=-1, sorted=False).indices
        logits_C = (weight_QD[entries_C] @ states.to(weight_QD.dtype)[..., None])[..., 0]
        if rows.bias_Q is not None:
            logits_C = logits_C + rows.bias_Q[entries_C].to(logits_C.dtype)
        return entries_C, rows.target.post_process(logits_C)


def principal(rows_ND: Tensor, size: int) -> Tensor:
    """The first principal components [D, size] of the rows, not centred; zero beyond D of them."""
    axes_DD = torch.linalg.eigh(rows_ND.mT @ rows_ND).eigenvectors.flip(-1)[:, :size]
    return functional.pad(axes_DD, (0, size - axes_DD.shape[1]))
