"""Kangaroo: a small adapter reads the target's first layers and drafts by the target's output layer; verification
continues from the states that drafting made (arXiv:2404.18911).

The state at position p predicts x_{p+1}, as the target's final state there does: to draft, the target's first layers
run on the newest token. Without training the adapter is the target's last norm: that is LayerSkip's draft
(arXiv:2404.16710).

Shapes: B rows, L positions, N new positions, F frontier nodes, R rows of a decoding state, D hidden size."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from ...config_checks import Chance, Parts, Positive
from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard, Training
from ...interfaces.proposer import DraftState, Frontier, Observation, Scores, SharesTargetRows, VerifiedRows
from ...parts.block_cache import BlockRows
from ...parts.decoder_block import OFFICIAL_ROPE_BASE, Attention, AttentionContext, BlockConfig, RMSNorm
from ...parts.feature_drafter import FeatureConfig, FeatureDrafter, block_like, last_norm
from ...parts.shared_embeddings import Sizes
from ...target.model import Target
from ...target.partial_passes import EarlyLayers


@dataclass(frozen=True, kw_only=True)
class KangarooConfig(FeatureConfig):
    """The shape of a Kangaroo drafter, and where its chains end."""

    training_only = frozenset({"gamma", "eta"})
    rope_base: Positive | None = OFFICIAL_ROPE_BASE
    """Base of the rotary embedding; the official code's, which its layout assumes. None takes the target's, with its
    scaling."""
    exit_layer: Parts | None = None
    """Number of the target's first layers that draft; None takes a sixteenth, at least 1: the paper's 2 of 32."""
    gamma: Parts = 6
    """Most tokens of a chain with the policy `early-exit`."""
    eta: Chance = 0.6
    """Such a chain ends after the first token whose distribution peaks below this; the paper has 0.6, for trees 0.4."""


class AttentionLayer(nn.Module):
    """x + Attention(RMSNorm(x)): a Llama layer without its MLP."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The states after the layer, [B, N, D]."""
        passed_BND: Tensor = hidden_BND + self.self_attn(self.input_layernorm(hidden_BND), attention)
        return passed_BND


class KangarooState(DraftState):
    """The target's first layers over each row, whose cache a target pass fills if `shared`, and the adapter's cache."""

    def __init__(self, early: EarlyLayers, rows: BlockRows, *, shared: bool) -> None:
        self.early, self.rows, self.shared = early, rows, shared
        self.held = self.caches = (rows.cache,) if shared else (rows.cache, early.cache)

    def drop_tree(self) -> None:
        """Discard the nodes that were read."""
        self.early.drop()
        self.rows.drop_tree()


class Kangaroo(FeatureDrafter[KangarooState], SharesTargetRows):
    """RMSNorm(x + Attention(RMSNorm(x))) of the output x of the target's first layers, read by its output layer. Own
    weights, named as in the official code: `layers.0.input_layernorm.weight`, `layers.0.self_attn.*`, `norm.weight`,
    and with a reduced vocabulary its ids, `token_ids` [Q]. First layers, embedding and output layer are the target's.
    Make a new one with `Kangaroo.create`."""

    family = "kangaroo"
    card = FamilyCard(
        name="Kangaroo", papers=("2404.18911", "2404.16710"),
        guesses="one attention layer after the target's first layers, whose states verification continues from; "
                "untrained it is LayerSkip's draft",
        cost="few trained weights; the target's first layers run for each level of the tree, and not again")
    config: KangarooConfig
    config_class = KangarooConfig
    # Positions and labels are those of the text. In the official code the states move one position to the left and the
    # mask of labels does not: the first token is never read there, and the first two of each answer are no labels.
    trained_as = Training(objective="soft", offsets=True)
    compiled_kinds = (AttentionLayer,)
    unrolls = 0

    def __init__(self, config: KangarooConfig, sizes: Sizes, block: BlockConfig) -> None:
        super().__init__(config, sizes, block)
        if config.exit_layer is None:
            raise UserError("exit_layer of a Kangaroo drafter must be set; use Kangaroo.create, which chooses it")
        self.exit_layer, self.taps = config.exit_layer, (config.exit_layer - 1,)
        self.chain_limits = replace(self.chain_limits, gamma=config.gamma, eta=config.eta)
        self.layers = nn.ModuleList([AttentionLayer(block)])
        self.norm = RMSNorm(block.hidden_size, eps=block.norm_eps)

    @classmethod
    def fitted(cls, config: KangarooConfig, target: Target) -> tuple[KangarooConfig, BlockConfig]:
        """(settings with the exit chosen, shape of the attention). Raises UserError when the exit does not fit."""
        target.require_plain_layers("kangaroo")
        layers = target.num_layers
        chosen = max(1, layers // 16) if config.exit_layer is None else config.exit_layer
        if chosen >= layers:
            raise UserError(f"exit_layer must be below the {layers} layers of {target.identity.name}, got {chosen}; "
                            "verification needs at least one layer after it")
        return replace(config, exit_layer=chosen), block_like(target, config.rope_base, bool(config.qk_norm))

    def initialise(self, target: Target) -> None:
        """Set weights that read the first layers as the target reads its last one; the official code's are random."""
        cast(AttentionLayer, self.layers[0]).self_attn.o_proj.weight.zero_()
        self.norm.weight.copy_(last_norm(target, self.block.norm_eps))

    def adapt(self, exits_BND: Tensor, attention: AttentionContext) -> Tensor:
        """States [B, N, D] for the output layer from the first layers' outputs."""
        return cast(Tensor, self.norm(self.layers[0](exits_BND.to(self.dtype), attention)))

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States that predict the token after each position, as the target's own do."""
        self.output_rows()  # An unbound drafter refuses to run even if it would read nothing of the target.
        attention = AttentionContext.training(features, self.window)
        adapted_BLD = self.adapt(self.tapped(features.taps)[0], attention)
        return Drafts(hidden_BLKD=adapted_BLD[:, :, None], offsets=(1,))

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> KangarooState:
        """A state in which no row has been observed yet. The target's first layers run in the cache of the rows that
        are verified, where the verifying pass takes over what ran, or else in one of their own."""
        self.pack_linears()
        own = BlockRows(self.num_layers, rows, capacity, next(self.parameters()).device, window=self.window)
        if verified is not None and (early := verified.early(self.exit_layer)) is not None:
            return KangarooState(early, own, shared=True)
        early = EarlyLayers.alone(self.output_rows().target, rows, capacity, self.exit_layer)
        return KangarooState(early, own, shared=False)

    @torch.no_grad()
    def observe(self, state: KangarooState, rows_R: Tensor, observation: Observation) -> None:
        """Read the first layers' outputs at the new positions; those of the root are still to be computed."""
        rows, counts = observation.on_host(rows_R)
        state.early.drop()
        if not state.shared:
            state.early.read(rows, observation.tokens_BN, observation.counts_B, counts)
        exits_RND = self.tapped(observation.taps)[0].masked_fill(~observation.real_BN[..., None], 0)
        attention = state.rows.read(rows, exits_RND.shape[1])
        with self.packing.installed():
            self.adapt(exits_RND, attention)
        state.rows.commit(observation.counts_B, counts)

    @torch.no_grad()
    def expand(self, state: KangarooState, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes, on which the target's first layers run now."""
        exits_BFD = state.early.run(frontier.nodes_BF, frontier.parents_BF, frontier.tokens_BF)
        with self.packing.installed():
            adapted_BFD = self.adapt(exits_BFD, state.rows.add_nodes(frontier))
            logits_BFQ = self.project(adapted_BFD, 0)
        return Scores.from_logits(logits_BFQ[:, :, None], self.token_ids, adapted_BFD[:, :, None])
