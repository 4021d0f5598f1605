"""Medusa: residual heads on the target's last state, each guessing one token further ahead (arXiv:2401.10774).

Shapes: B rows, L positions, N new positions, K heads, D hidden size, V target vocabulary, Q entries of the draft
vocabulary, R rows of a decoding state, F frontier nodes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...config_checks import Parts
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard
from ...interfaces.proposer import DraftState, Frontier, Observation, Scores
from ...parts.heads import HeadConfig, HeadDrafter, ResidualBlock
from ...parts.shared_embeddings import Sizes
from ...row_buffers import RowBuffer


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """The shape of Medusa heads. Blockwise parallel decoding (arXiv:1811.03115) is a special case: heads over the
    frozen target's output layer (`output: shared`, `vocabulary_size: null`), equally weighted and trained on the text
    (`decay: 1`, `objective: hard`), verified as a chain. Two differences remain: its feed-forward layer has two
    matrices and a ReLU where a block here has one and SiLU (`num_layers: 2` has two of each), and it trains one
    randomly chosen head in each batch, whose expectation is the mean over all heads that is trained here."""

    num_layers: Parts = 1
    """Residual blocks in each head."""
    tie_blocks: bool = False
    """Whether the blocks of a head are one block applied `num_layers` times, as in the official code."""

    def carries(self, name: str, start: Any) -> bool:
        """Further blocks pass the state on; a tied one would be applied more often."""
        further = name == "num_layers" and not self.tie_blocks and start.num_layers < self.num_layers
        return super().carries(name, start) or further


class Head(nn.Sequential):
    """The residual blocks of one head; tied blocks are one block, stored once and applied several times."""

    def __init__(self, width: int, config: MedusaConfig) -> None:
        blocks, rounds = (1, config.num_layers) if config.tie_blocks else (config.num_layers, 1)
        super().__init__(*(ResidualBlock(width) for _ in range(blocks)))
        self.rounds = rounds

    def forward(self, hidden: Tensor) -> Tensor:
        """Draft states, [..., D] like `hidden`."""
        for _ in range(self.rounds):
            for block in self:
                hidden = block(hidden)
        return hidden


class MedusaState(DraftState):
    """The target's final state at the last token it has processed, one for each row: the input of the heads."""

    def __init__(self, final: RowBuffer) -> None:
        self.final, self.held = final, (final,)


class Medusa(HeadDrafter[MedusaState]):
    """K residual heads on the target's last state: all draft steps at once, independent of each other. Own weights:
    `heads.{k}.{layer}.linear.{weight,bias}` (layer 0 alone where blocks are tied), with `output="copy"` also
    `outputs.{k}.weight` [Q, D], with `output="one_copy"` `outputs.0.weight` alone, and with a reduced vocabulary its
    ids, `token_ids` [Q]. Make a new one with `Medusa.create`."""

    family = "medusa"
    card = FamilyCard(name="Medusa", papers=("2401.10774",),
                      guesses="residual heads on the target's last state, each one token further ahead",
                      cost="all depths in one run: the least drafting time; the guesses do not depend on each other")
    config: MedusaConfig
    config_class = MedusaConfig
    compiled_kinds = (ResidualBlock,)

    def __init__(self, config: MedusaConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.heads = nn.ModuleList(Head(self.hidden_size, config) for _ in range(config.num_heads))

    def forward(self, features: Features) -> Drafts:
        """The states of all heads at all positions."""
        return self.drafts(self._states(features.final()))

    def _states(self, final: Tensor) -> Tensor:
        """Draft states [..., K, D] of the target's final states [..., D]."""
        self.output_rows()  # An unbound drafter refuses to run even if it would read nothing of the target.
        final = final.to(self.dtype)
        return torch.stack([head(final) for head in self.heads], dim=-2)

    def start(self, rows: int, capacity: int) -> MedusaState:
        """A state in which no row has been observed yet."""
        self.pack_linears()
        like = next(self.heads.parameters())
        return MedusaState(RowBuffer(rows, self.hidden_size, device=like.device, dtype=like.dtype))

    def observe(self, state: MedusaState, rows_R: Tensor, observation: Observation) -> None:
        """Store the final state at each row's last real position; a row without one keeps its former state."""
        state.final.store(rows_R, observation.newest(observation.final_BND), observation.counts_B > 0)

    def expand(self, state: MedusaState, frontier: Frontier) -> Scores:
        """Scores of all descendants of the root, depth h by head h. Raises ValueError if the frontier is not the root
        alone, which is all that this family scores."""
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError(
                f"Medusa scores every depth from the root at once; pass 1 node, got {frontier.nodes_BF.shape[1]}")
        with self.packing.installed():
            hidden_RKD = self._states(state.final.values[: len(frontier.nodes_BF)])
            if self.config.output == "copy":
                logits_RKQ = torch.stack([self.project(hidden_RKD[:, step], step)
                                          for step in range(self.config.num_heads)], dim=1)
            else:
                # One layer for all heads: its weights are read once.
                logits_RKQ = self.project(hidden_RKD, 0)
        return Scores.from_logits(logits_RKQ[:, None], self.token_ids)
