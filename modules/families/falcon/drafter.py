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
state, M recurrent layers, R rows of a decoding state, F frontier nodes, P blocks, T tokens after a block, Q entries of
the draft vocabulary."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ...config_checks import Dropout, NotNegative, Parts
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard, Training
from ...interfaces.proposer import DraftState, Frontier, Observation, Scores, spread
from ...parts.block_cache import BlockRows
from ...parts.decoder_block import AttentionContext, BlockConfig
from ...parts.feature_drafter import DEPTHS, FIRST_OFFSET, FeatureConfig, FeatureDrafter
from ...parts.shared_embeddings import Sizes, shifted
from ...parts.training_time_test import block_attentions
from ...row_buffers import RowBuffer
from ...target.model import Target
from ..eagle.drafter import BareBlock
from .recurrence import LSTM, Memory, SegmentSteps

_RECURRENT_LAYERS = 2  # As in the paper, section 3.1


@dataclass(frozen=True, kw_only=True)
class FalconConfig(FeatureConfig):
    """The shape of a Falcon drafter."""

    training_only = frozenset({"blocks", "noise", "dropout"})
    ahead = ("block_size", "blocks")
    block_size: Parts = 2
    """Tokens drafted by one run of the decoder layer; the paper's best is 2 (its table of 2, 3 and 4)."""
    blocks: Parts = 1
    """Blocks trained at each position. 1 trains on the target's states alone; each further block reads the estimates of
    the one before it as while decoding, without a gradient through them (as HASS does for EAGLE)."""
    noise: NotNegative = 0.0
    """Uniform noise between -noise and noise on the target's states in training; the paper's is 0.1."""
    dropout: Dropout = 0.0
    """Share of components between the recurrent layers that training drops; the official code's is 0.1."""


class FalconState(DraftState):
    """The memory at each row's last committed position, the states of the positions before it, and a tree;
    `before` is the memory before any text."""

    nodes_RF: Tensor  # The nodes of the last frontier
    block_RF: Tensor  # The block above each of these nodes, a column of the fields below
    since_RFT: Tensor  # The tokens of each node's path after that block
    ends_RP: Tensor  # The node at the end of each block of the deepest level
    memory: Memory  # Memory of the recurrent layers at each block's end, [M, R, P, D] each
    estimates_RPKD: Tensor  # Each block's estimates

    def __init__(self, before: Memory, size: int, rows: BlockRows) -> None:
        layers, batch, width = before[0].shape
        self.output, self.cell, self.recent, self.estimates = self.buffers = tuple(
            RowBuffer(batch, count, width, device=before[0].device, dtype=before[0].dtype)
            for count in (layers, layers, size - 1, size))
        """Outputs and cells of the recurrent layers, states of the positions before the last one, its estimates."""
        self.rows, self.held, self.caches = rows, (*self.buffers, rows.cache), (rows.cache,)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Discard the tree; the block at the end of the text gives the root's children."""
        self.level = 0
        self.rows.drop_tree()


class Falcon(FeatureDrafter[FalconState]):
    """LSTM([e(x_{p+1}); f_p]) and a decoder layer estimate f_{E+1} to f_{E+K}, inputs of the target's output layer.

    The official code does not add the target's state to the recurrent network's output, which lies between -1 and 1;
    here it does, so that a new drafter passes the state on unchanged.

    Own weights: `lstm.layers.{0,1}.{input,hidden}.{weight,bias}`, which are `lstm.{weight,bias}_{ih,hh}_l{0,1}` of the
    official code, `layers.0.self_attn.*`, `layers.0.mlp.*`, `layers.0.post_attention_layernorm.weight` as there, and
    with a reduced vocabulary its ids, `token_ids` [Q]. The target's embedding and output layer are borrowed. Make a new
    one with `Falcon.create`."""

    family = "falcon"
    card = FamilyCard(
        name="Falcon", papers=("2412.12639",),
        guesses="a recurrent network and one decoder layer draft a block of tokens (two by default) in one run",
        cost="one layer run for every two levels of the tree")
    export_refusal = ("no serving engine runs a Falcon drafter, and its official code does not run as released: there "
                      "is no layout to write; decode the artifact with draftsmith")
    config: FalconConfig
    config_class = FalconConfig
    # Every position is the end of a block, whose tokens the paper weights equally. Its official code has 0.9 of `soft`,
    # with the target at temperature 0.95, and 0.1 of `hard`; its weights are 1.0 for states and 0.1 for the objective.
    # It also shows some true states a block ahead (CSGD); `blocks` above 1 lets the drafter read its own, as HASS does.
    trained_as = Training(objective="soft", feature_weight=10.0, decay=1.0, offsets=True)

    def __init__(self, config: FalconConfig, sizes: Sizes, block: BlockConfig) -> None:
        super().__init__(config, sizes, block)
        self.block_size, self.trained_steps = config.block_size, config.block_size * config.blocks
        width = block.hidden_size
        self.lstm = LSTM(2 * width, width, _RECURRENT_LAYERS, dropout=config.dropout)
        self.layers = nn.ModuleList([BareBlock(block)])

    def initialise(self, target: Target) -> None:
        """Make each estimate the state of its query; the official code starts with random weights."""
        # The last recurrent layer's output is zero through its candidate values, the third gate: gradients reach them.
        for weight in self.lstm.layers[-1].parameters():
            weight.chunk(4)[2].zero_()
        cast(BareBlock, self.layers[0]).zero_output()

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """Estimates of the trained blocks that end at each position, along the true tokens; outside training at least
        `DEPTHS` of them. Raises UserError if the rows are too short for the blocks."""
        self.require_rows(features, "block_size or blocks,")
        blocks = self.config.blocks if self.training else max(self.config.blocks, -(-DEPTHS // self.config.block_size))
        estimates = self.rollout(features, blocks)
        ahead = range(1, 1 + len(estimates))
        return Drafts(hidden_BLKD=torch.stack(estimates, dim=2), estimates=tuple(ahead),
                      offsets=tuple(FIRST_OFFSET - 1 + place for place in ahead))

    def rollout(self, features: Features, blocks: int) -> list[Tensor]:
        """Estimates of the given number of blocks after every position, [B, L, D] each, nearest first."""
        size, estimates = self.config.block_size, list[Tensor]()
        attentions = block_attentions(AttentionContext.training(features, self.window), size)
        embedded_BLD = self.embed(features.tokens_BL)
        final_BLD = self.with_noise(features.final().to(self.dtype), self.config.noise)
        # The recurrent network over every segment, whose memory after each position is [M, B, L, D].
        steps = SegmentSteps(features.segments_BL)
        read_PZ = steps.split(torch.cat([shifted(embedded_BLD, features, 1), final_BLD], dim=-1))
        output_MPD, cell_MPD = self.lstm.through(read_PZ, self.lstm.zero_memory(steps.sizes[0]), steps.sizes)
        memory: Memory = steps.join(output_MPD), steps.join(cell_MPD)
        states_BLD = memory[0][-1] + final_BLD
        queries = [shifted(states_BLD, features, place) for place in range(1 - size, 1)]
        for block in range(blocks):
            if block > 0:
                newest, queries = estimates[-size:], []
                for estimate_BLD in newest:
                    read_BLD = estimate_BLD.detach()
                    ahead = len(estimates) - size + len(queries) + 2
                    read_BLZ = torch.cat([shifted(embedded_BLD, features, ahead), read_BLD], dim=-1)
                    memory = self.lstm.through(read_BLZ, memory)
                    queries.append(memory[0][-1] + read_BLD)
            estimates += self.layers[0](torch.cat(queries, dim=1), next(attentions)).chunk(size, dim=1)
        return estimates

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> FalconState:
        """A state in which no row has been observed yet."""
        self.pack_linears()
        memory = self.lstm.zero_memory(rows)
        # Repeated queries take slots after the new positions for one pass.
        slots = capacity + self.config.block_size - 1
        held = BlockRows(1, rows, slots, memory[0].device, window=self.window)
        return FalconState(memory, self.config.block_size, held)

    @torch.no_grad()
    def observe(self, state: FalconState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, each with the token after it, and estimate the block that ends at the last one."""
        state.drop_tree()
        counts_R, again, width = observation.counts_B, self.config.block_size - 1, observation.tokens_BN.shape[1]
        last_R = (counts_R - 1).clamp(min=0)
        final_RND = observation.final_BND.to(self.dtype).masked_fill(~observation.real_BN[..., None], 0)
        read_RNZ = torch.cat([self.embed(observation.next_BN), final_RND], dim=-1)
        rows, counts = observation.on_host(rows_R)
        with self.packing.installed():
            before = state.output.values[rows_R].transpose(0, 1), state.cell.values[rows_R].transpose(0, 1)
            output_MRND, cell_MRND = self.lstm(read_RNZ, before)
            states_RND = torch.cat([state.recent.values[rows_R], output_MRND[-1] + final_RND], dim=1)
            # The queries of the block's positions before the last one run again; a row without new positions has none.
            queries_RJD = columns(states_RND, last_R, again)
            attention = state.rows.reread(rows, width, counts_R, again)
            estimates_RND = self.layers[0](torch.cat([states_RND[:, again:], queries_RJD], dim=1), attention)
        state.rows.commit(counts_R, counts)
        newest_RKD = torch.cat([estimates_RND[:, width:], columns(estimates_RND, last_R, 1)], dim=1)
        each_R = torch.arange(len(counts_R), device=counts_R.device)
        memory = (part[:, each_R, last_R].transpose(0, 1) for part in (output_MRND, cell_MRND))
        # A row without new positions keeps what it had.
        values = (*memory, columns(states_RND, counts_R, again), newest_RKD)
        for buffer, found in zip(state.buffers, values, strict=True):
            buffer.store(rows_R, found, counts_R > 0)

    @torch.no_grad()
    def expand(self, state: FalconState, frontier: Frontier) -> Scores:
        """Scores of the children of one level of the tree. The layer runs at every K-th level; the levels between have
        their estimates already, the same for all nodes below a block."""
        rows, place = len(frontier.nodes_BF), state.level % self.block_size  # Depth below the newest block
        if state.level == 0:
            state.block_RF, state.ends_RP = torch.zeros_like(frontier.nodes_BF), frontier.nodes_BF
            state.since_RFT = frontier.tokens_BF[..., None][..., :0]
            state.memory = (state.output.values[:rows].transpose(0, 1)[:, :, None],
                            state.cell.values[:rows].transpose(0, 1)[:, :, None])
            state.estimates_RPKD = state.estimates.values[:rows, None]
        else:
            above_RF = frontier.parents_among(state.nodes_RF)
            state.since_RFT = torch.cat([spread(state.since_RFT, above_RF), frontier.tokens_BF[..., None]], dim=-1)
            state.block_RF = state.block_RF.gather(1, above_RF)
        state.nodes_RF, state.level = frontier.nodes_BF, state.level + 1
        if place == 0 and state.level > 1:
            self._start_blocks(state)
        estimates_RPD = state.estimates_RPKD[:, :, place]
        with self.packing.installed():
            logits_RPQ = self.project(estimates_RPD, place)
        scores = Scores.from_logits(logits_RPQ[:, :, None], self.token_ids, estimates_RPD[:, :, None])
        if place == 0:
            return scores
        log_probs_RFQ = spread(scores.log_probs_BFHQ[:, :, 0], state.block_RF)
        return Scores(log_probs_BFHQ=log_probs_RFQ[:, :, None], token_ids_Q=self.token_ids,
                      states_BFHD=spread(estimates_RPD, state.block_RF)[:, :, None])

    def _start_blocks(self, state: FalconState) -> None:
        """Read the K tokens of the path to each node of this level, and estimate the block after them."""
        layers, width = state.memory[0].shape[0], state.memory[0].shape[-1]
        index_RFD = state.block_RF[..., None].expand(-1, -1, width)
        output, cell = (part.gather(2, index_RFD.expand(layers, -1, -1, -1)) for part in state.memory)
        index_RFKD = index_RFD[:, :, None].expand(-1, -1, self.block_size, -1)
        (memory, read_RFKD), states = ((output, cell), state.estimates_RPKD.gather(1, index_RFKD)), []
        ends = Frontier(nodes_BF=state.nodes_RF, parents_BF=state.ends_RP.gather(1, state.block_RF),
                        tokens_BF=state.since_RFT[..., -1])
        with self.packing.installed():
            for place in range(self.block_size):
                embedded_RFD, read_RFD = self.embed(state.since_RFT[..., place]), read_RFKD[:, :, place]
                memory = self.lstm.through(torch.cat([embedded_RFD, read_RFD], dim=-1), memory)
                states.append(memory[0][-1] + read_RFD)
            estimates_RND = self.layers[0](torch.stack(states, dim=2).flatten(1, 2),
                                           state.rows.add_nodes(ends, self.block_size))
        # Each node of this level is now the end of a block.
        state.memory, state.estimates_RPKD, state.ends_RP = memory, estimates_RND.view_as(read_RFKD), state.nodes_RF
        state.block_RF = torch.arange(state.nodes_RF.shape[1], device=state.nodes_RF.device).expand_as(state.nodes_RF)
        state.since_RFT = state.since_RFT[..., :0]


def columns(states_RND: Tensor, first_R: Tensor, count: int) -> Tensor:
    """`count` consecutive columns of each row from its own first column, [R, count, D]."""
    return spread(states_RND, first_R[:, None] + torch.arange(count, device=first_R.device))
