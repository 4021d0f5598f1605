"""Hydra: heads that also read the tokens guessed before them; Hydra++: deeper heads after a layer that reads the whole
text (arXiv:2402.05109).

Shapes: B rows, L positions, N new positions, K heads, D hidden size, Z width of what a head reads, Q entries of the
draft vocabulary, R rows of a decoding state, F frontier nodes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config_checks import LATER, Dropout, NotNegative, Parts, Size
from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard, Training
from ...interfaces.proposer import DraftState, Frontier, Observation, Scores, spread
from ...parts.block_cache import BlockRows
from ...parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock, RMSNorm
from ...parts.heads import HeadConfig, HeadDrafter, ResidualBlock
from ...parts.shared_embeddings import Sizes, shifted
from ...row_buffers import RowBuffer
from ...target.model import Target


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadConfig):
    """The shape of Hydra heads. Hydra++ is `prefix`, with `num_layers` 4."""

    training_only = frozenset({"dropout", "noise"})
    num_layers: Parts = 1
    """Blocks of each head: the first reads the state and the tokens guessed so far, the others read its output."""
    tie_blocks: bool = True
    """Whether the blocks after the first are one block applied repeatedly, as in the official code; its layout can hold
    nothing else."""
    prefix: bool = False
    """Whether the drafter's own decoder layer first reads the target's states of the whole text (Hydra++)."""
    window: Size | None = field(default=None, metadata={LATER: True})
    """Newest tokens of the text that the prefix layer reads at a token, itself included; None for all."""
    dropout: Dropout = 0.0
    """Dropout of the inputs of blocks and output layers in training; the official Hydra++ has 0.2."""
    noise: NotNegative = 0.0
    """Scale of uniform noise on the states and embeddings in training (NEFTune, arXiv:2310.05914, eq. 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and not self.prefix:
            raise UserError(f"window is {self.window}, that of the prefix layer, and prefix is false; set prefix to "
                            "true, or leave window out")

    def carries(self, name: str, start: Any) -> bool:
        """Further blocks pass the state on; a tied one, which stands after the first, would be applied more often. All
        weights fit a window."""
        further = (not self.tie_blocks or start.num_layers == 1) and start.num_layers < self.num_layers
        return super().carries(name, start) or name == "window" or (name == "num_layers" and further)


class ConditionedBlock(nn.Module):
    """res_connection(z) + SiLU(linear(z)): one state from the concatenation z of a state and the tokens after it. At
    first its output is the state unchanged, so that the head equals the target's own output layer. The official code
    starts with a random `res_connection`, so that its heads have to learn to pass the state on."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width * parts, width)
        self.res_connection = nn.Linear(width * parts, width)
        for layer in (self.linear, self.res_connection):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.res_connection.weight[:, :width].fill_diagonal_(1)

    def forward(self, joined: Tensor) -> Tensor:
        """States [..., D] of concatenated parts [..., Z]."""
        passed: Tensor = self.res_connection(joined) + functional.silu(self.linear(joined))
        return passed

    def split(self, parts: list[Tensor]) -> Tensor:
        """`forward` of separate parts [..., D]: all heads share them, and backward keeps them once."""
        totals, width = [], parts[0].shape[-1]
        for layer in (self.res_connection, self.linear):
            # One slice of the weight for each part.
            total = functional.linear(parts[0], layer.weight[:, :width], layer.bias)
            for place, part in enumerate(parts[1:], start=1):
                total = total + functional.linear(part, layer.weight[:, place * width : (place + 1) * width])
            totals.append(total)
        return totals[0] + functional.silu(totals[1])


class HydraHead(nn.Module):
    """One head without its output layer."""

    def __init__(self, config: HydraConfig, width: int, step: int) -> None:
        super().__init__()
        self.config = config
        self.first = ConditionedBlock(width, step + 2)
        own = min(config.num_layers, 2) if config.tie_blocks else config.num_layers
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(own - 1))

    def deepen(self, hidden: Tensor) -> Tensor:
        """Output [..., D] of the last block for the output of the first."""
        for layer in range(self.config.num_layers - 1):
            block = self.blocks[0 if self.config.tie_blocks else layer]
            hidden = block(functional.dropout(hidden, self.config.dropout, self.training))
        return functional.dropout(hidden, self.config.dropout, self.training)


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer over the target's final states, and a norm after it (arXiv:2402.05109, section 3)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.block = DecoderBlock(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.block.zero_output()

    def forward(self, final_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The input of the heads in place of the target's states, [B, N, D]."""
        return cast(Tensor, self.norm(self.block(final_BND, attention)))


class HydraState(DraftState):
    """The input of the heads: one state for each row, and the paths of the nodes that were expanded last."""

    nodes_RF: Tensor  # The nodes that were expanded last
    paths_RFZ: Tensor  # The state and the embeddings of each node's path, concatenated

    def __init__(self, context: RowBuffer, rows: BlockRows | None) -> None:
        self.context, self.rows = context, rows  # With the prefix layer's cache
        self.caches = () if rows is None else (rows.cache,)
        self.held = (context, *self.caches)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Discard the tree."""
        self.level = 0


class Hydra(HeadDrafter[HydraState]):
    """K heads that draft one after another: head k reads the state and the k + 1 tokens after it. Own weights:
    `heads.{k}.first.{linear,res_connection}.{weight,bias}`, `heads.{k}.blocks.{layer}.linear.*`, with `output="copy"`
    also `outputs.{k}.{weight,bias}`, with `output="one_copy"` those of layer 0 alone, with `prefix` also
    `prefix.block.*` and `prefix.norm.weight`, and with a reduced vocabulary its ids, `token_ids` [Q]. The target's
    embedding and output layer are borrowed. Make a new one with `Hydra.create`."""

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
            # A pass over a few tokens measures the size of the target's final states.
            tokens = target.readable_tokens(min(64, target.context_length)).tolist()
            final_BLD = target.encode(Features.from_rows([(tokens, [True] * len(tokens))])).final()
            self.prefix.norm.weight.fill_(final_BLD.float().square().mean().sqrt())

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """The states of all heads at all positions, each head on the true tokens before the one that it guesses."""
        context_BLD, embedded_BLD = self.context(features), self._noisy(self.embed(features.tokens_BL))
        # The 1st, 2nd, ... K-th token after each position; zero beyond its segment.
        following = [shifted(embedded_BLD, features, ahead) for ahead in range(1, 1 + self.config.num_heads)]
        return self.drafts(self._states(context_BLD, following))

    def context(self, features: Features) -> Tensor:
        """The states that the heads read, [B, L, D]: the target's final ones, or the prefix layer's."""
        final_BLD = self._noisy(features.final().to(self.dtype))
        return final_BLD if self.prefix is None else self.prefix(
            final_BLD, AttentionContext.training(features, self.config.window))

    def _states(self, context_BLD: Tensor, following: list[Tensor]) -> Tensor:
        """Draft states [B, L, K, D]. All heads share one dropout mask; separate ones would each keep a copy."""
        share = self.config.dropout
        parts = [functional.dropout(part, share, self.training) for part in (context_BLD, *following)]
        heads = cast(Sequence[HydraHead], self.heads)
        return torch.stack([head.deepen(head.first.split(parts[: step + 2])) for step, head in enumerate(heads)], -2)

    def _noisy(self, states_BLD: Tensor) -> Tensor:
        """The states with noise in training (NEFTune, arXiv:2310.05914, eq. 1)."""
        _, length, width = states_BLD.shape
        return self.with_noise(states_BLD, self.config.noise / math.sqrt(length * width))

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> HydraState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.pack_linears()
        like = next(self.heads.parameters())
        read = None if self.prefix is None else BlockRows(1, rows, capacity, like.device, window=self.config.window)
        return HydraState(RowBuffer(rows, self.hidden_size, device=like.device, dtype=like.dtype), read)

    @torch.no_grad()
    def observe(self, state: HydraState, rows_R: Tensor, observation: Observation) -> None:
        """Store the heads' input at each row's last real position; a row without one keeps its former input. The prefix
        layer reads accepted positions only, so that its cache never has to be rewound."""
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
        """Scores of the children of one level of the tree, by the head of that level. ValueError if it has none."""
        if (step := state.level) == self.config.num_heads:
            raise ValueError(f"level {step} of the tree needs a head, but there are {step} heads, one for each level")
        embedded_RFD = self.embed(frontier.tokens_BF)
        rows, width, _ = embedded_RFD.shape
        above_RFZ = spread(state.paths_RFZ, frontier.parents_among(state.nodes_RF)) if step else \
            state.context.values[:rows, None].expand(-1, width, -1)
        state.level, state.nodes_RF = step + 1, frontier.nodes_BF
        state.paths_RFZ = torch.cat([above_RFZ, embedded_RFD], dim=-1)
        head = cast(HydraHead, self.heads[step])
        # The whole path of a node is read at once. Storing partial products for each node would save arithmetic, but
        # not the reading of weights, which takes most of the time for a few nodes.
        with self.packing.installed():
            logits_RFQ = self.project(head.deepen(head.first(state.paths_RFZ)), step)
        return Scores.from_logits(logits_RFQ[:, :, None], self.token_ids)
