"""Falcon: a recurrent network joins token and state, one run of a decoder layer estimates the target's next K states
(arXiv:2412.12639).

At index p stand the target's state of x_p and the token x_{p+1}; the recurrent network makes one state of them and of
all before. A block ends at some index E: the last K indices up to it are asked, all see the keys up to E, and the j-th
of them estimates the target's state at E + 1 + j, which its output layer takes for token x_{E+2+j}. Behind it the next
block reads those K estimates and the drafted tokens.

The paper cuts a text into blocks once, so that each index is asked with one end; while decoding a block may end
anywhere. Here every index is an end in training as well. Keys and values depend on the recurrent states alone, and
these on nothing behind them: what an unfinished block has written never changes, its queries alone are asked again.

Shapes: B rows, L positions, N new positions, K indices of a block, J = K - 1, D hidden size, Z width of token and
state, M recurrent layers, R rows of a decoding state, F frontier nodes, P blocks, Q entries of the draft vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes, settings_of
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores, spread
from ..target.identity import TargetIdentity
from ..target.model import Target
from .eagle import BareBlock
from .eagle_base import DEPTHS, block_beside
from .falcon_state import FalconState, columns
from .parts.block_cache import BlockRows
from .parts.decoder_block import BlockConfig, Sight
from .parts.lstm import LSTM, Memory
from .parts.shared_embeddings import BorrowingDrafter
from .parts.training_time_test import BlockRollout

_RECURRENT_LAYERS = 2
"""As in the paper, section 3.1."""
_FIRST = 2
"""How far ahead of its end the first estimate of a block predicts."""


@dataclass(frozen=True, kw_only=True)
class FalconConfig:
    """The shape of a Falcon drafter."""

    block_size: int = 2
    """Tokens drafted by one run of the decoder layer; the paper's best is 2 (its table of 2, 3 and 4)."""
    blocks: int = 1
    """Blocks trained behind every index. 1 is the target's states alone; behind the first, a block reads the estimates
    of the one before it as it will while decoding, and no gradient goes back through them (as HASS does for EAGLE)."""
    skip: bool = True
    """Whether the target's state is added to what the recurrent network says, so that a new drafter begins with the
    state unchanged. The official code does not: what its network says lies between -1 and 1."""
    noise: float = 0.0
    """Uniform noise between -noise and noise on the target's states in training; the paper's is 0.1."""
    rope_base: float | None = None
    """Base of the rotary embedding; None takes the target's. The official code's is always 10000."""
    vocabulary_size: int | None = None
    """Entries of a reduced draft vocabulary, the most frequent tokens of the training data; None keeps them all."""

    def __post_init__(self) -> None:
        check_sizes(block_size=self.block_size, blocks=self.blocks, vocabulary_size=self.vocabulary_size)
        if not self.noise >= 0:
            raise UserError(f"noise must not be negative, got {self.noise!r}")


class Falcon(BorrowingDrafter):
    """LSTM([e(x_{p+1}); f_p]) and a decoder layer estimate f_{E+1} to f_{E+K}, read by the target's output layer.

    Own weights: `lstm.layers.{0,1}.{input,hidden}.{weight,bias}`, which are `lstm.{weight,bias}_{ih,hh}_l{0,1}` of the
    official code, `layers.0.self_attn.*`, `layers.0.mlp.*`, `layers.0.post_attention_layernorm.weight` as there, and
    with a reduced vocabulary its ids, `token_ids` [Q]. The target's embedding and output layer are borrowed. Make a new
    one with `Falcon.create`.

    Args:
        config: its settings.
        block: the shape of its decoder layer.
        vocab_size: the target's vocabulary.
    """

    family = "falcon"

    def __init__(self, config: FalconConfig, block: BlockConfig, *, vocab_size: int) -> None:
        super().__init__(hidden_size=block.hidden_size, vocab_size=vocab_size, vocabulary_size=config.vocabulary_size)
        self.config, self.block = config, block
        self.lstm = LSTM(2 * block.hidden_size, block.hidden_size, _RECURRENT_LAYERS)
        self.layers = nn.ModuleList([BareBlock(block)])

    @classmethod
    def create(cls, config: FalconConfig, target: Target, token_ids_Q: Tensor | None = None) -> "Falcon":
        """A new drafter beside `target`, bound to it, whose layer has the shape of the target's.

        Args:
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if the ids do not agree with the configuration.
        """
        with target.device:
            drafter = cls(config, block_beside(target, config.rope_base), vocab_size=target.vocab_size)
        if config.skip:
            # Each estimate begins as the state of its query; the official code begins at random.
            drafter.lstm.silence()
            drafter._layer().silence()
        drafter.begin(target, token_ids_Q)
        return drafter

    def _layer(self) -> BareBlock:
        layer = self.layers[0]
        assert isinstance(layer, BareBlock)
        return layer

    def describe(self) -> dict[str, Any]:
        """The configuration, JSON-ready."""
        return {**asdict(self.config), "block": asdict(self.block)}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> "Falcon":
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        given = settings_of(description, FalconConfig, "a Falcon drafter is", "block")
        block = BlockConfig.from_dict(given.pop("block"))
        return cls(FalconConfig(**given), block, vocab_size=identity.vocab_size)

    @property
    def trained_steps(self) -> int:
        """The tokens of all trained blocks."""
        return self.config.block_size * self.config.blocks

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """Every index ends a block and drafts as many as in training, outside of it at least `DEPTHS` tokens, along the
        true ones.

        Raises:
            UserError: if the rows are too short for the blocks.
        """
        length, size, steps = features.tokens_BL.shape[1], self.config.block_size, self.trained_steps
        if self.training and length < steps + _FIRST:
            raise UserError(f"{steps} draft steps need rows of at least {steps + _FIRST} tokens, got {length}; lower "
                            "block_size or blocks, or raise row_length")
        blocks = self.config.blocks if self.training else max(self.config.blocks, -(-DEPTHS // size))
        told = self.rollout(features, blocks)
        return Drafts(hidden_BLKD=torch.stack(told, dim=2), offsets=tuple(range(_FIRST, _FIRST + len(told))),
                      estimates=tuple(range(1, 1 + len(told))))

    def rollout(self, features: Features, blocks: int) -> list[Tensor]:
        """The estimates of so many blocks behind every index, [B, L, D] each, nearest first."""
        sights = BlockRollout(features, self.config.block_size)
        final_BLD = self.disturbed(features.final().to(self.dtype), self.config.noise)
        read_BLZ = torch.cat([self.following(features, 1), final_BLD], dim=-1)
        memory = self.lstm(read_BLZ, self.lstm.blank(len(final_BLD)), _going(features))
        states_BLD = self._skipped(memory, final_BLD)
        asked = [_before(states_BLD, features, places) for places in reversed(range(self.config.block_size))]
        told = self._told(asked, sights(0))
        for block in range(1, blocks):
            memory, asked = self._read(memory, told[-self.config.block_size :], features, len(told) + 1 - len(asked))
            told += self._told(asked, sights(block))
        return told

    def _told(self, asked: list[Tensor], sight: Sight) -> list[Tensor]:
        """What the layer estimates at the indices of a block, [B, L, D] each."""
        return list(self._layer()(torch.cat(asked, dim=1), sight).chunk(len(asked), dim=1))

    def _read(self, memory: Memory, told: list[Tensor], features: Features, first: int) -> tuple[Memory, list[Tensor]]:
        """Let the recurrent network go on over the estimates of a block, the first one `first` behind each index."""
        states = []
        for place, told_BLD in enumerate(told):
            read_BLD = told_BLD.detach()
            embedded_BLD = self.following(features, first + place + 1)
            memory = self.lstm.step(torch.cat([embedded_BLD, read_BLD], dim=-1), memory)
            states.append(self._skipped(memory, read_BLD))
        return memory, states

    def _skipped(self, memory: Memory, read: Tensor) -> Tensor:
        """What the layer reads: what the network says, beside the state that it read."""
        said = memory[0][-1]
        return said + read if self.config.skip else said

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of estimates [..., D] by the target's output layer, the same for every step."""
        return self._rows()(hidden)

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> FalconState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.lay_out()
        blank = self.lstm.blank(rows)
        # Indices that are asked again stand behind the new ones for a moment.
        slots = capacity + self.config.block_size - 1
        return FalconState(blank, self.config.block_size, BlockRows(1, rows, slots, blank[0].device))

    @torch.no_grad()
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, each with the token behind it, and estimate behind the last of them."""
        held, counts_R = _falcon(state), observation.counts_B
        held.uproot()
        again, width = self.config.block_size - 1, observation.tokens_BN.shape[1]
        real_RN = observation.real_BN
        final_RND = observation.final_BND.to(self.dtype).masked_fill(~real_RN[..., None], 0)
        read_RNZ = torch.cat([self._embed(observation.behind_BN), final_RND], dim=-1)
        before = held.said_MRD[:, rows_R], held.kept_MRD[:, rows_R]
        with self._packing.installed():
            memory = self.lstm(read_RNZ, before, torch.ones_like(real_RN))
            states_RND = torch.cat([held.recent_RJD[rows_R], self._skipped(memory, final_RND)], dim=1)
            # The block's indices before the last one are asked again; a row without news has none to ask.
            asked_RJD = columns(states_RND, (counts_R - 1).clamp(min=0), again)
            sight = held.rows.reread(rows_R.tolist(), width, counts_R, again)
            told_RND = self._layer()(torch.cat([states_RND[:, again:], asked_RJD], dim=1), sight)
        held.rows.commit(counts_R, counts_R.tolist())
        last_R1D = columns(told_RND, (counts_R - 1).clamp(min=0), 1)
        held.learn(rows_R, counts_R, memory, states_RND, torch.cat([told_RND[:, width:], last_R1D], dim=1))
        held.uproot()

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of one level of the tree. Every K-th level is read; those between are told already,
        and alike for all nodes below a block."""
        held = _falcon(state)
        place = held.descend(frontier)
        if place == 0 and held.level > 1:
            self._sprout(held)
        with self._packing.installed():
            logits_RPQ = self.project(held.told_RPKD[:, :, place], place)
        log_probs_RPQ = logits_RPQ.to(torch.promote_types(logits_RPQ.dtype, torch.float32)).log_softmax(-1)
        log_probs_RFQ = spread(log_probs_RPQ, held.block_RF) if place else log_probs_RPQ
        return Scores(log_probs_BFHQ=log_probs_RFQ[:, :, None], token_ids_Q=self.token_ids)

    def _sprout(self, held: FalconState) -> None:
        """Read the K tokens above each node of this level, and estimate behind them."""
        memory, told_RFKD = held.above()
        rows, nodes, size, width = told_RFKD.shape
        states = []
        with self._packing.installed():
            for place in range(size):
                read_RFD = told_RFKD[:, :, place]
                embedded_RFD = self._embed(held.since_RFT[..., place])
                memory = self.lstm.step(torch.cat([embedded_RFD, read_RFD], dim=-1), memory)
                states.append(self._skipped(memory, read_RFD))
            hidden_RND = torch.stack(states, dim=2).flatten(1, 2)
            told_RND = self._layer()(hidden_RND, held.rows.sprout(held.planted(), size))
        held.grow(memory, told_RND.view(rows, nodes, size, width))

    def expand_bytes(self) -> int:
        """The output layer, one step of the recurrent network and a share of the layer, on an average level."""
        own = sum(weight.nbytes for weight in self.layers.parameters()) // self.config.block_size
        return own + sum(weight.nbytes for weight in self.lstm.parameters()) + self._rows().weight_QD.nbytes

    def observe_bytes(self) -> int:
        """All of its own."""
        return sum(weight.nbytes for weight in self.parameters())

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget these rows, and what the layer read of them."""
        _falcon(state).clear(rows_R)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        _falcon(state).keep(rows_R)


def _going(features: Features) -> Tensor:
    """Where an index goes on with the segment of the one before it, [B, L]."""
    segments_BL = features.segments_BL
    return functional.pad(segments_BL[:, 1:] == segments_BL[:, :-1], (1, 0), value=False)


def _before(states_BLD: Tensor, features: Features, places: int) -> Tensor:
    """The states `places` before each index, [B, L, D]; zero before its segment."""
    segments_BL = features.segments_BL
    places = min(places, segments_BL.shape[1])
    if places == 0:
        return states_BLD
    same_BL = functional.pad(segments_BL[:, places:] == segments_BL[:, :-places], (places, 0), value=False)
    return functional.pad(states_BLD[:, :-places], (0, 0, places, 0)).masked_fill(~same_BL[..., None], 0)


def _falcon(state: DraftState) -> FalconState:
    if not isinstance(state, FalconState):
        raise TypeError(f"Falcon needs the state that its own start() made, got {type(state).__name__}")
    return state
