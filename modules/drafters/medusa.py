"""Medusa: residual heads on the target's last state, each guessing one token further ahead (arXiv:2401.10774).

Shapes: B rows, L positions, N new positions, K heads, D hidden size, V target vocabulary, Q entries of the draft
vocabulary, R rows of a decoding state, F frontier nodes.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..compiler import Compiler
from ..config_checks import check_sizes, settings_of
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.family_card import FamilyCard
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..row_buffers import RowBuffer
from ..target.devices.compiled_layers import CompiledLayers
from ..target.loading.identity import TargetIdentity
from ..target.model import Target
from .parts.compiled_blocks import forms_of
from .parts.heads import HeadConfig, HeadDrafter


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """The shape of Medusa heads.

    Blockwise parallel decoding (arXiv:1811.03115) is a special case: heads over the frozen target's output layer
    (`output: shared`, `vocabulary_size: null`), equally weighted and trained on the text (`decay: 1`, `objective:
    hard`), verified as a chain (`tree.max_rank: 1`). Two differences remain: its feed-forward layer has two matrices
    and a ReLU where a block here has one and SiLU (`num_layers: 2` has two of each), and it trains one randomly chosen
    head in each batch, whose expectation is the mean over all heads that is trained here.
    """

    num_layers: int = 1
    """Residual blocks in each head."""
    tie_blocks: bool = False
    """Whether the blocks of a head are one block applied `num_layers` times, as in the official code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(num_layers=self.num_layers)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b) (arXiv:2401.10774, section 2.1.1), exactly the identity at the start of training.

    The official code sets only W to zero, so that it starts at x + SiLU(b); here b is zero too, and every head starts
    as the target's own output layer, as the paper says.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The next states, [..., D] like `hidden`."""
        return hidden + functional.silu(self.linear(hidden))


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

    def __init__(self, rows: int, width: int, like: Tensor) -> None:
        self.final = RowBuffer(rows, width, device=like.device, dtype=like.dtype)


class Medusa(HeadDrafter):
    """K residual heads on the target's last state: all draft steps at once, independent of each other.

    Own weights: `heads.{k}.{layer}.linear.{weight,bias}` (layer 0 alone where blocks are tied), with `output="copy"`
    also `outputs.{k}.weight` [Q, D], with `output="one_copy"` `outputs.0.weight` alone, and with a reduced vocabulary
    its ids, `token_ids` [Q]. Make a new one with `Medusa.create`.
    """

    family = "medusa"
    card = FamilyCard(
        name="Medusa", papers=("2401.10774",),
        guesses="residual heads on the target's last state, each one token further ahead",
        cost="all depths in one run: the least drafting time; the guesses do not depend on each other",
    )

    def __init__(self, config: MedusaConfig, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size)
        self.config = config
        self.heads = nn.ModuleList(Head(hidden_size, config) for _ in range(config.num_heads))
        self.outputs = self.own_outputs(config, hidden_size, vocab_size, bias=False)

    @classmethod
    def create(cls, config: MedusaConfig, target: Target, token_ids_Q: Tensor | None = None) -> Self:
        """New heads for `target`, bound to it, that all start as its output layer.

        Args:
            config: their shape.
            target: the model they draft for.
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if the ids do not agree with the configuration.
        """
        drafter = cls(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        drafter.attach(target, token_ids_Q)
        drafter.copy_output()
        return drafter

    def layer_forms(self, compiler: Compiler) -> CompiledLayers:
        """Compiled forms of the heads' blocks."""
        return forms_of(self, (ResidualBlock,), compiler)

    def describe(self) -> dict[str, Any]:
        """The configuration, JSON-ready."""
        return asdict(self.config)

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        config = MedusaConfig(**settings_of(description, MedusaConfig, "Medusa heads are"))
        return cls(config, hidden_size=identity.hidden_size, vocab_size=identity.vocab_size)

    def forward(self, features: Features) -> Drafts:
        """The states of all heads at all positions."""
        return self.drafts(self._states(features.final()))

    def _states(self, final: Tensor) -> Tensor:
        """Draft states [..., K, D] of the target's final states [..., D]."""
        self._rows()
        final = final.to(self.dtype)
        return torch.stack([head(final) for head in self.heads], dim=-2)

    def start(self, rows: int, capacity: int) -> MedusaState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.pack_linears()
        return MedusaState(rows, self.hidden_size, next(self.heads.parameters()))

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Store the final state at each row's last real position; a row without one keeps its former state."""
        held = _medusa_state(state)
        last_R = (observation.counts_B - 1).clamp(min=0)
        newest_RD = observation.final_BND[torch.arange(len(last_R), device=last_R.device), last_R]
        held.final.store(rows_R, newest_RD, observation.counts_B > 0)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of all descendants of the root, depth h by head h.

        Raises:
            ValueError: if the frontier is not the root alone, which is all that this family scores.
        """
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError(
                f"Medusa scores every depth from the root at once; pass 1 node, got {frontier.nodes_BF.shape[1]}"
            )
        final_RD = _medusa_state(state).final.values[: len(frontier.nodes_BF)]
        with self._packing.installed():
            logits_RKQ = self._logits(self._states(final_RD))
        return Scores.from_logits(logits_RKQ[:, None], self.token_ids)

    def _logits(self, hidden_RKD: Tensor) -> Tensor:
        if self.config.output != "copy":
            # One layer for all heads: its weights are read once.
            return self.project(hidden_RKD, 0)
        return torch.stack([self.project(hidden_RKD[:, step], step) for step in range(self.config.num_heads)], dim=1)

    def expand_bytes(self) -> int:
        """Bytes of the heads, and of the target's output layer when they share it."""
        own = sum(parameter.nbytes for parameter in self.parameters())
        return own if self.outputs else own + self._rows().weight_QD.nbytes

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset the states of these rows."""
        _medusa_state(state).final.clear(rows_R)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        _medusa_state(state).final.keep(rows_R)


def _medusa_state(state: DraftState) -> MedusaState:
    if not isinstance(state, MedusaState):
        raise TypeError(f"Medusa needs the state that its own start() made, got {type(state).__name__}")
    return state
