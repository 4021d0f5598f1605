"""Hydra: heads that also read the tokens guessed before them; Hydra++: deeper heads after a layer that reads the whole
text (arXiv:2402.05109).

Shapes: B rows, L positions, N new positions, K heads, D hidden size, Z width of what a head reads, Q entries of the
draft vocabulary, R rows of a decoding state, F frontier nodes.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard, Training
from ...interfaces.proposer import DraftState, Frontier, Observation, Scores
from ...parts.block_cache import BlockRows
from ...parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock
from ...parts.heads import HeadDrafter
from ...parts.shared_embeddings import Sizes
from ...row_buffers import RowBuffer
from ...target.model import Target
from ..medusa.drafter import ResidualBlock
from .heads import ConditionedBlock, HydraConfig, HydraHead, PrefixLayer

_PROBE = 64  # Tokens of the target pass that measures the size of its final states


class HydraState(DraftState):
    """The input of the heads: one state for each row, and the paths of the nodes that were expanded last.

    Args:
        context: the states.
        rows: the prefix layer's cache; None without one.
    """

    nodes_RF: Tensor  # The nodes that were expanded last
    paths_RFZ: Tensor  # The state and the embeddings of each node's path, concatenated

    def __init__(self, context: RowBuffer, rows: BlockRows | None) -> None:
        self.context, self.rows = context, rows
        self.caches = () if rows is None else (rows.cache,)
        self.held = (context, *self.caches)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Discard the tree."""
        self.level = 0


class Hydra(HeadDrafter[HydraState]):
    """K heads that draft one after another: head k reads the state and the k + 1 tokens after it.

    Own weights: `heads.{k}.first.{linear,res_connection}.{weight,bias}`, `heads.{k}.blocks.{layer}.linear.*`, with
    `output="copy"` also `outputs.{k}.{weight,bias}`, with `output="one_copy"` those of layer 0 alone, with `prefix`
    also `prefix.block.*` and `prefix.norm.weight`, and with a reduced vocabulary its ids, `token_ids` [Q]. The target's
    embedding and output layer are borrowed. Make a new one with `Hydra.create`.

    Args:
        config: the shape of the heads.
        sizes: of the target.
        block: the shape of the prefix layer; None without one.
    """

    family = "hydra"
    card = FamilyCard(
        name="Hydra, Hydra++", papers=("2402.05109",),
        guesses="heads that also read the tokens guessed before them; Hydra++ adds a decoder layer before the heads",
        cost="one head run for each level of the tree: more drafting time than Medusa, more accepted")

    config: HydraConfig
    config_class = HydraConfig
    # The official code weights all heads equally; the paper's objective is `soft` for Hydra++.
    trained_as = Training(decay=1.0)
    has_block = True
    compiled_kinds = (ConditionedBlock, ResidualBlock, DecoderBlock)
    output_bias = True  # As in the official code.

    def __init__(self, config: HydraConfig, sizes: Sizes, block: BlockConfig | None = None) -> None:
        if config.prefix != (block is not None):
            raise UserError(f"prefix is {config.prefix}, so the shape of its layer must be "
                            f"{'given' if config.prefix else 'left out'}")
        super().__init__(config, sizes, block)
        self.prefix = None if block is None else PrefixLayer(block)
        self.heads = nn.ModuleList(HydraHead(config, self.hidden_size, step) for step in range(config.num_heads))

    @classmethod
    def fitted(cls, config: HydraConfig, target: Target) -> tuple[HydraConfig, BlockConfig | None]:
        """(settings, shape of the prefix layer, which is that of the target's layers)."""
        return config, BlockConfig.like(target) if config.prefix else None

    def initialise(self, target: Target) -> None:
        """Let all heads start as the target's output layer, after a prefix layer that changes its states little."""
        super().initialise(target)
        if self.prefix is not None:
            tokens = target.readable_tokens(min(_PROBE, target.context_length)).tolist()
            final_BLD = target.encode(Features.from_rows([(tokens, [True] * len(tokens))])).final()
            self.prefix.norm.weight.fill_(final_BLD.float().square().mean().sqrt())

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """The states of all heads at all positions, each head on the true tokens before the one that it guesses."""
        return self.drafts(self._states(self.context(features), self.next_embeddings(features)))

    def context(self, features: Features) -> Tensor:
        """The states that the heads read, [B, L, D]: the target's final ones, or the prefix layer's."""
        final_BLD = self._noisy(features.final().to(self.dtype))
        return final_BLD if self.prefix is None else self.prefix(final_BLD, AttentionContext.training(features))

    def next_embeddings(self, features: Features) -> list[Tensor]:
        """Embeddings of the 1st, 2nd, ... K-th token after each position, [B, L, D] each; zero beyond its segment."""
        embedded_BLD = self._noisy(self.embed(features.tokens_BL))
        segments_BL, length = features.segments_BL, features.tokens_BL.shape[1]
        following = []
        for ahead in range(1, 1 + self.config.num_heads):
            shifted_BLD = torch.zeros_like(embedded_BLD)
            if ahead < length:
                inside_BL = (segments_BL[:, :-ahead] == segments_BL[:, ahead:]) & (segments_BL[:, ahead:] >= 0)
                shifted_BLD[:, :-ahead] = embedded_BLD[:, ahead:].masked_fill(~inside_BL[..., None], 0)
            following.append(shifted_BLD)
        return following

    def _states(self, context_BLD: Tensor, following: list[Tensor]) -> Tensor:
        """Draft states [B, L, K, D]. All heads share one dropout mask; separate ones would each keep a copy."""
        share = self.config.dropout
        parts = [functional.dropout(part, share, self.training) for part in (context_BLD, *following)]
        return torch.stack([head.deepen(head.first.split(parts[: step + 2])) for step, head in self.steps()], dim=-2)

    def steps(self) -> list[tuple[int, HydraHead]]:
        """The heads with their numbers."""
        return [(step, head) for step, head in enumerate(self.heads) if isinstance(head, HydraHead)]

    def _noisy(self, states_BLD: Tensor) -> Tensor:
        """The states with noise in training (NEFTune, arXiv:2310.05914, eq. 1)."""
        _, length, width = states_BLD.shape
        return self.with_noise(states_BLD, self.config.noise / math.sqrt(length * width))

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> HydraState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.pack_linears()
        like = next(self.heads.parameters())
        read = None if self.prefix is None else BlockRows(1, rows, capacity, like.device)
        return HydraState(RowBuffer(rows, self.hidden_size, device=like.device, dtype=like.dtype), read)

    @torch.no_grad()
    def observe(self, state: HydraState, rows_R: Tensor, observation: Observation) -> None:
        """Store the heads' input at each row's last real position; a row without one keeps its former input.

        The prefix layer reads accepted positions only, so that its cache never has to be rewound.
        """
        state.drop_tree()
        states_RND = observation.final_BND.to(self.dtype).masked_fill(~observation.real_BN[..., None], 0)
        if self.prefix is not None and state.rows is not None:
            rows, counts = observation.on_host(rows_R)
            attention = state.rows.read(rows, states_RND.shape[1])
            with self.packing.installed():
                states_RND = self.prefix(states_RND, attention)
            state.rows.commit(observation.counts_B, counts)
        state.context.store(rows_R, observation.newest(states_RND), observation.counts_B > 0)

    @torch.no_grad()
    def expand(self, state: HydraState, frontier: Frontier) -> Scores:
        """Scores of the children of one level of the tree, by the head of that level.

        Raises:
            ValueError: if the level has no head.
        """
        if (step := state.level) == self.config.num_heads:
            raise ValueError(f"level {step} of the tree needs a head, but there are {step} heads, one for each level")
        embedded_RFD = self.embed(frontier.tokens_BF)
        rows, width, _ = embedded_RFD.shape
        if step == 0:
            above_RFZ = state.context.values[:rows, None].expand(-1, width, -1)
        else:
            columns_RF = frontier.parents_among(state.nodes_RF)
            above_RFZ = state.paths_RFZ.gather(1, columns_RF[..., None].expand(-1, -1, state.paths_RFZ.shape[-1]))
        state.level, state.nodes_RF = step + 1, frontier.nodes_BF
        state.paths_RFZ = torch.cat([above_RFZ, embedded_RFD], dim=-1)
        _, head = self.steps()[step]
        # The whole path of a node is read at once. Storing partial products for each node would save arithmetic, but
        # not the reading of weights, which takes most of the time for a few nodes.
        with self.packing.installed():
            logits_RFQ = self.project(head.deepen(head.first(state.paths_RFZ)), step)
        return Scores.from_logits(logits_RFQ[:, :, None], self.token_ids)
