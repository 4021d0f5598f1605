"""Medusa: residual heads on the target's last state, each guessing one token further ahead (arXiv:2401.10774).

Shapes: B rows, L positions, N new positions, K heads, D hidden size, V target vocabulary, Q entries of the draft
vocabulary, R rows of a decoding state, F frontier nodes.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes, settings_of
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..target.draft_vocabulary import OwnOutput
from ..target.identity import TargetIdentity
from ..target.model import Target
from .parts.shared_embeddings import BorrowingDrafter


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The shape of Medusa heads.

    Blockwise parallel decoding (arXiv:1811.03115) is a setting of it: heads over the frozen target's shared output
    layer (`output: shared`, `vocabulary_size: null`), all weighed alike and learning the text (`decay: 1`, `objective:
    hard`), verified as a chain (`tree.max_rank: 1`). Two differences stay: its feed-forward layer has two matrices
    and a ReLU where a block here has one and SiLU (`num_layers: 2` has two of each), and it trains one head
    drawn at random in each batch, whose expectation is the mean over all heads that is trained here.
    """

    num_heads: int = 4
    """Tokens guessed beyond the target's own next one; head k (from 0) at index p guesses token p + 2 + k."""
    num_layers: int = 1
    """Residual blocks in each head."""
    tie_blocks: bool = False
    """Let the blocks of a head be one block that a state goes through `num_layers` times, as in the official code."""
    output: Literal["shared", "copy"] = "shared"
    """`shared` reads the target's own output layer and adds no weights; `copy` trains an own one for every head."""
    vocabulary_size: int | None = None
    """Entries of a reduced draft vocabulary, the most frequent tokens of the training data; None keeps them all."""

    def __post_init__(self) -> None:
        check_sizes(num_heads=self.num_heads, num_layers=self.num_layers, vocabulary_size=self.vocabulary_size)
        if self.output not in ("shared", "copy"):
            raise UserError(f"output must be 'shared' or 'copy', got {self.output!r}")


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b) (arXiv:2401.10774, section 2.1.1), exactly the identity at the start.

    The official code zeroes W only, so that it begins at x + SiLU(b); here b is zero too, and every head begins as the
    target's own output layer, as the paper says.
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
    """The residual blocks of one head; tied blocks are one block, kept once and passed through several times."""

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
    """What the heads read next: the target's final state at the last token that went through it, one a row."""

    def __init__(self, final_RD: Tensor) -> None:
        self.final_RD = final_RD


class Medusa(BorrowingDrafter):
    """K heads on one state of the target: all draft steps at once, none aware of what the others chose.

    Own weights: `heads.{k}.{layer}.linear.{weight,bias}` (layer 0 alone where blocks are tied), with `output="copy"`
    also `outputs.{k}.weight` [Q, D], and with a reduced vocabulary its ids, `token_ids` [Q]. Make a new one with
    `Medusa.create`.
    """

    family = "medusa"

    def __init__(self, config: MedusaConfig, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size=hidden_size, vocab_size=vocab_size, vocabulary_size=config.vocabulary_size)
        self.config = config
        self.heads = nn.ModuleList(Head(hidden_size, config) for _ in range(config.num_heads))
        copies, entries = config.num_heads if config.output == "copy" else 0, config.vocabulary_size or vocab_size
        self.outputs = nn.ModuleList(OwnOutput(hidden_size, entries) for _ in range(copies))

    @classmethod
    def create(cls, config: MedusaConfig, target: Target, token_ids_Q: Tensor | None = None) -> "Medusa":
        """New heads beside `target`, bound to it, that all begin as its output layer.

        Args:
            config: their shape.
            target: the model they draft for.
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if the ids do not agree with the configuration.
        """
        drafter = cls(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        drafter.begin(target, token_ids_Q)
        drafter._copy_output()
        return drafter

    @torch.no_grad()
    def _copy_output(self) -> None:
        for step in range(len(self.outputs)):
            self.output_parameters(step)[0].copy_(self._rows().weight_QD)

    def describe(self) -> dict[str, Any]:
        """The configuration, JSON-ready."""
        return asdict(self.config)

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> "Medusa":
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        config = MedusaConfig(**settings_of(description, MedusaConfig, "Medusa heads are"))
        return cls(config, hidden_size=identity.hidden_size, vocab_size=identity.vocab_size)

    @property
    def reach(self) -> int:
        """One depth a head."""
        return self.config.num_heads

    @property
    def offsets(self) -> tuple[int, ...]:
        """Head k at index p guesses token p + 2 + k: the target's own output layer guesses p + 1."""
        return tuple(range(2, 2 + self.config.num_heads))

    def forward(self, features: Features) -> Drafts:
        """All heads at all positions."""
        estimates = tuple(offset - 1 for offset in self.offsets)
        return Drafts(hidden_BLKD=self._states(features.final()), offsets=self.offsets, estimates=estimates)

    def _states(self, final: Tensor) -> Tensor:
        """Draft states [..., K, D] of the target's final states [..., D]."""
        self._rows()
        final = final.to(self.dtype)
        return torch.stack([head(final) for head in self.heads], dim=-2)

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of head `step` for its states [..., D]."""
        if self.outputs:
            return self._rows().through(hidden, self._outputs()[step])
        return self._rows()(hidden)

    def _outputs(self) -> list[OwnOutput]:
        return [layer for layer in self.outputs if isinstance(layer, OwnOutput)]

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` reads for head `step`; none when the output layer is shared."""
        return tuple(self.outputs[step].parameters()) if self.outputs else ()

    def start(self, rows: int, capacity: int) -> MedusaState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.lay_out()
        return MedusaState(next(self.heads.parameters()).new_zeros(rows, self.hidden_size))

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Keep the final state of each row's last real position; a row without one keeps what it had."""
        held = _medusa(state)
        last_R = (observation.counts_B - 1).clamp(min=0)
        newest_RD = observation.final_BND[torch.arange(len(last_R), device=last_R.device), last_R]
        seen_R1 = (observation.counts_B > 0)[:, None]
        newest_RD = torch.where(seen_R1, newest_RD.to(held.final_RD.dtype), held.final_RD[rows_R])
        # Not in place: the state may have been made inside torch.inference_mode and written outside it.
        held.final_RD = held.final_RD.index_copy(0, rows_R, newest_RD)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of all descendants of the root, depth h by head h.

        Raises:
            ValueError: if the frontier is not the root alone: this family has no more to say about other nodes.
        """
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError(
                f"Medusa answers every depth from the root at once; ask for 1 node, got {frontier.nodes_BF.shape[1]}"
            )
        with self._packing.installed():
            logits_RKQ = self._logits(self._states(_medusa(state).final_RD))
        wide = torch.promote_types(logits_RKQ.dtype, torch.float32)
        return Scores(log_probs_BFHQ=logits_RKQ.to(wide).log_softmax(-1)[:, None], token_ids_Q=self.token_ids)

    def _logits(self, hidden_RKD: Tensor) -> Tensor:
        if not self.outputs:
            return self._rows()(hidden_RKD)
        return torch.stack([self.project(hidden_RKD[:, step], step) for step in range(self.config.num_heads)], dim=1)

    def expand_bytes(self) -> int:
        """The heads, and the target's output layer where they have none of their own."""
        own = sum(parameter.nbytes for parameter in self.parameters())
        return own if self.outputs else own + self._rows().weight_QD.nbytes

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget the states of these rows."""
        held = _medusa(state)
        held.final_RD = held.final_RD.index_fill(0, rows_R, 0)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        held = _medusa(state)
        held.final_RD = held.final_RD[rows_R]


def _medusa(state: DraftState) -> MedusaState:
    if not isinstance(state, MedusaState):
        raise TypeError(f"Medusa needs the state that its own start() made, got {type(state).__name__}")
    return state
