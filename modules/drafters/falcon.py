"""Falcon: a recurrent network combines token and state, and one run of a decoder layer estimates the target's next K
states (arXiv:2412.12639).

At position p the input is the target's state of x_p and the token x_{p+1}; the recurrent network makes one state of
them and of all before. A block ends at some position E: the last K positions up to it are queries, all see the keys up
to E, and the j-th query estimates the target's state at E + 1 + j, from which the output layer predicts x_{E+2+j}. The
next block reads those K estimates and the drafted tokens.

The paper divides a text into blocks once, so that each position is a query of one block end; while decoding a block may
end anywhere. Here every position is an end in training as well. Keys and values depend on the recurrent states alone,
and those on no later position: the keys of an unfinished block never change, only its queries run again.

Shapes: B rows, L positions, N new positions, K positions of a block, J = K - 1, D hidden size, Z width of token and
state, M recurrent layers, R rows of a decoding state, F frontier nodes, P blocks, Q entries of the draft vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import check_sizes
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.family_card import FamilyCard
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores, spread
from ..target.model import Target
from .eagle import BareBlock
from .falcon_state import FalconState, columns
from .parts.block_cache import BlockRows
from .parts.decoder_block import AttentionContext, BlockConfig
from .parts.feature_drafter import DEPTHS, FIRST_OFFSET, FeatureConfig, FeatureDrafter
from .parts.lstm import LSTM, Memory
from .parts.segment_steps import SegmentSteps
from .parts.training_time_test import BlockRollout

_RECURRENT_LAYERS = 2
"""As in the paper, section 3.1."""


@dataclass(frozen=True, kw_only=True)
class FalconConfig(FeatureConfig):
    """The shape of a Falcon drafter."""

    block_size: int = 2
    """Tokens drafted by one run of the decoder layer; the paper's best is 2 (its table of 2, 3 and 4)."""
    blocks: int = 1
    """Blocks trained at each position. 1 trains on the target's states alone; each further block reads the estimates of
    the one before it as while decoding, without a gradient through them (as HASS does for EAGLE)."""
    skip: bool = True
    """Whether the target's state is added to the output of the recurrent network, so that a new drafter passes the
    state on unchanged. The official code has no such addition; its network's output lies between -1 and 1."""
    noise: float = 0.0
    """Uniform noise between -noise and noise on the target's states in training; the paper's is 0.1."""
    dropout: float = 0.0
    """Share of the components between the layers of the recurrent network that training drops; the official code's is
    0.1."""

    def __post_init__(self) -> None:
        check_sizes(block_size=self.block_size, blocks=self.blocks, vocabulary_size=self.vocabulary_size)
        if not self.noise >= 0:
            raise UserError(f"noise must not be negative, got {self.noise!r}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")


class Falcon(FeatureDrafter):
    """LSTM([e(x_{p+1}); f_p]) and a decoder layer estimate f_{E+1} to f_{E+K}, inputs of the target's output layer.

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
    card = FamilyCard(
        name="Falcon", papers=("2412.12639",),
        guesses="a recurrent network and one decoder layer draft a block of tokens (two by default) in one run",
        cost="one layer run for every two levels of the tree",
    )
    export_refusal = ("no serving engine runs a Falcon drafter, and its official code does not run as released: there "
                      "is no layout to write; decode the artifact with draftsmith")
    config: FalconConfig
    config_class = FalconConfig
    described_as = "a Falcon drafter is"

    def __init__(self, config: FalconConfig, block: BlockConfig, *, vocab_size: int) -> None:
        super().__init__(config, block, vocab_size=vocab_size)
        self.lstm = LSTM(2 * block.hidden_size, block.hidden_size, _RECURRENT_LAYERS, dropout=config.dropout)
        self.layers = nn.ModuleList([BareBlock(block)])

    def initialise(self, target: Target) -> None:
        """Make each estimate the state of its query, with `skip`; the official code starts with random weights."""
        if self.config.skip:
            self.lstm.zero_output()
            self._layer().zero_output()

    def _layer(self) -> BareBlock:
        return cast(BareBlock, self.layers[0])

    @property
    def block_size(self) -> int:
        """Tokens drafted by one run of the layer."""
        return self.config.block_size

    @property
    def trained_steps(self) -> int:
        """Number of tokens of all trained blocks."""
        return self.config.block_size * self.config.blocks

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """Estimates of the trained blocks that end at each position, along the true tokens; outside training at least
        `DEPTHS` of them.

        Raises:
            UserError: if the rows are too short for the blocks.
        """
        length, size, steps = features.tokens_BL.shape[1], self.config.block_size, self.trained_steps
        if self.training and length < steps + FIRST_OFFSET:
            raise UserError(f"{steps} draft steps need rows of at least {steps + FIRST_OFFSET} tokens, got {length}; "
                            "lower block_size or blocks, or raise row_length")
        blocks = self.config.blocks if self.training else max(self.config.blocks, -(-DEPTHS // size))
        estimates = self.rollout(features, blocks)
        ahead = range(1, 1 + len(estimates))
        return Drafts(hidden_BLKD=torch.stack(estimates, dim=2), estimates=tuple(ahead),
                      offsets=tuple(FIRST_OFFSET - 1 + place for place in ahead))

    def rollout(self, features: Features, blocks: int) -> list[Tensor]:
        """Estimates of the given number of blocks after every position, [B, L, D] each, nearest first."""
        attentions, size = BlockRollout(features, self.config.block_size), self.config.block_size
        final_BLD = self.with_noise(features.final().to(self.dtype), self.config.noise)
        read_BLZ = torch.cat([self.following(features, 1), final_BLD], dim=-1)
        memory = self._remembered(read_BLZ, features.segments_BL)
        states_BLD = self._layer_input(memory, final_BLD)
        queries = [_before(states_BLD, features, places) for places in reversed(range(size))]
        estimates = self._estimates(queries, attentions(0))
        for block in range(1, blocks):
            newest, first = estimates[-size:], len(estimates) + 1 - len(queries)
            memory, queries = self._read(memory, newest, features, first)
            estimates += self._estimates(queries, attentions(block))
        return estimates

    def _remembered(self, read_BLZ: Tensor, segments_BL: Tensor) -> Memory:
        """(outputs, cells) of the recurrent layers after every position of each segment, [M, B, L, D] each."""
        steps = SegmentSteps(segments_BL)
        before = self.lstm.zero_memory(steps.sizes[0])
        output_MPD, cell_MPD = self.lstm.through(steps.split(read_BLZ), before, steps.sizes)
        return steps.join(output_MPD), steps.join(cell_MPD)

    def _estimates(self, queries: list[Tensor], attention: AttentionContext) -> list[Tensor]:
        """Estimated target states for each position of a block, [B, L, D] each."""
        return list(self._layer()(torch.cat(queries, dim=1), attention).chunk(len(queries), dim=1))

    def _read(
        self, memory: Memory, estimates: list[Tensor], features: Features, first: int
    ) -> tuple[Memory, list[Tensor]]:
        """Memory and layer inputs after the estimates of a block, the first of which lies `first` positions ahead."""
        states = []
        for place, estimate_BLD in enumerate(estimates):
            read_BLD = estimate_BLD.detach()
            embedded_BLD = self.following(features, first + place + 1)
            memory = self.lstm.step(torch.cat([embedded_BLD, read_BLD], dim=-1), memory)
            states.append(self._layer_input(memory, read_BLD))
        return memory, states

    def _layer_input(self, memory: Memory, read: Tensor) -> Tensor:
        """The decoder layer's input: the output of the recurrent network, with `skip` plus the state that it read."""
        output = memory[0][-1]
        return output + read if self.config.skip else output

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> FalconState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.pack_linears()
        memory = self.lstm.zero_memory(rows)
        # Repeated queries take slots after the new positions for one pass.
        slots = capacity + self.config.block_size - 1
        return FalconState(memory, self.config.block_size, BlockRows(1, rows, slots, memory[0].device))

    @torch.no_grad()
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, each with the token after it, and estimate the block that ends at the last one."""
        held, counts_R = _falcon_state(state), observation.counts_B
        held.drop_tree()
        again, width = self.config.block_size - 1, observation.tokens_BN.shape[1]
        real_RN = observation.real_BN
        final_RND = observation.final_BND.to(self.dtype).masked_fill(~real_RN[..., None], 0)
        read_RNZ = torch.cat([self._embed(observation.next_BN), final_RND], dim=-1)
        rows, counts = observation.on_host(rows_R)
        with self._packing.installed():
            memory = self.lstm(read_RNZ, held.memory_of(rows_R))
            states_RND = torch.cat([held.recent.values[rows_R], self._layer_input(memory, final_RND)], dim=1)
            # The queries of the block's positions before the last one run again; a row without new
            # positions has none.
            queries_RJD = columns(states_RND, (counts_R - 1).clamp(min=0), again)
            attention = held.rows.reread(rows, width, counts_R, again)
            estimates_RND = self._layer()(torch.cat([states_RND[:, again:], queries_RJD], dim=1), attention)
        held.rows.commit(counts_R, counts)
        last_R1D = columns(estimates_RND, (counts_R - 1).clamp(min=0), 1)
        held.update(rows_R, counts_R, memory, states_RND, torch.cat([estimates_RND[:, width:], last_R1D], dim=1))

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of one level of the tree. The layer runs at every K-th level; the levels between have
        their estimates already, the same for all nodes below a block."""
        held = _falcon_state(state)
        place = held.next_level(frontier)
        if place == 0 and held.level > 1:
            self._start_blocks(held)
        estimates_RPD = held.estimates_RPKD[:, :, place]
        with self._packing.installed():
            logits_RPQ = self.project(estimates_RPD, place)
        scores = Scores.from_logits(logits_RPQ[:, :, None], self.token_ids, estimates_RPD[:, :, None])
        if place == 0:
            return scores
        log_probs_RFQ = spread(scores.log_probs_BFHQ[:, :, 0], held.block_RF)
        return Scores(log_probs_BFHQ=log_probs_RFQ[:, :, None], token_ids_Q=self.token_ids,
                      states_BFHD=spread(estimates_RPD, held.block_RF)[:, :, None])

    def _start_blocks(self, held: FalconState) -> None:
        """Read the K tokens of the path to each node of this level, and estimate the block after them."""
        memory, estimates_RFKD = held.blocks_above()
        rows, nodes, size, width = estimates_RFKD.shape
        states = []
        with self._packing.installed():
            for place in range(size):
                read_RFD = estimates_RFKD[:, :, place]
                embedded_RFD = self._embed(held.since_RFT[..., place])
                memory = self.lstm.step(torch.cat([embedded_RFD, read_RFD], dim=-1), memory)
                states.append(self._layer_input(memory, read_RFD))
            hidden_RND = torch.stack(states, dim=2).flatten(1, 2)
            estimates_RND = self._layer()(hidden_RND, held.rows.add_nodes(held.block_ends(), size))
        held.add_blocks(memory, estimates_RND.view(rows, nodes, size, width))

    def expand_bytes(self) -> int:
        """Bytes of the output layer, one step of the recurrent network and a K-th of the layer: an average level."""
        own = sum(weight.nbytes for weight in self.layers.parameters()) // self.config.block_size
        return own + sum(weight.nbytes for weight in self.lstm.parameters()) + self._rows().weight_QD.nbytes

    def observe_bytes(self) -> int:
        """Bytes of all own weights."""
        return sum(weight.nbytes for weight in self.parameters())

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset these rows, the layer's cache included."""
        _falcon_state(state).clear(rows_R)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        _falcon_state(state).keep(rows_R)


def _before(states_BLD: Tensor, features: Features, places: int) -> Tensor:
    """The states `places` before each position, [B, L, D]; zero before its segment."""
    segments_BL = features.segments_BL
    places = min(places, segments_BL.shape[1])
    if places == 0:
        return states_BLD
    same_BL = functional.pad(segments_BL[:, places:] == segments_BL[:, :-places], (places, 0), value=False)
    return functional.pad(states_BLD[:, :-places], (0, 0, places, 0)).masked_fill(~same_BL[..., None], 0)


def _falcon_state(state: DraftState) -> FalconState:
    if not isinstance(state, FalconState):
        raise TypeError(f"Falcon needs the state that its own start() made, got {type(state).__name__}")
    return state
