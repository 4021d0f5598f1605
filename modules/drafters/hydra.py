"""Hydra: heads that also read the tokens guessed before them; Hydra++: deeper heads after a layer that reads the whole
text (arXiv:2402.05109).

Shapes: B rows, L positions, N new positions, K heads, D hidden size, Z width of what a head reads, Q entries of the
draft vocabulary, R rows of a decoding state, F frontier nodes.
"""

import math
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..compiler import Compiler
from ..config_checks import settings_of
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.family_card import FamilyCard
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..row_buffers import RowBuffer
from ..target.devices.compiled_layers import CompiledLayers
from ..target.kv_cache import RowCache
from ..target.loading.identity import TargetIdentity
from ..target.model import Target
from .hydra_heads import ConditionedBlock, HydraConfig, HydraHead, PrefixLayer
from .medusa import ResidualBlock
from .parts.block_cache import BlockRows
from .parts.compiled_blocks import forms_of
from .parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock
from .parts.heads import HeadDrafter


class HydraState(DraftState):
    """The input of the heads: one state for each row, and the paths of the nodes that were expanded last."""

    def __init__(self, context: RowBuffer, rows: BlockRows | None) -> None:
        self.context, self.rows = context, rows
        self.drop_tree()

    @property
    def caches(self) -> tuple[RowCache, ...]:
        """The prefix layer's, if there is one."""
        return () if self.rows is None else (self.rows.cache,)

    def drop_tree(self) -> None:
        """Discard the tree."""
        self.level = 0
        self.nodes_RF = torch.empty(0)
        self.paths_RFZ = torch.empty(0)

    def extend_paths(self, frontier: Frontier, embedded_RFD: Tensor) -> Tensor:
        """Add the next level; returns the state and the embeddings of each node's path, concatenated, [R, F, Z]."""
        rows, width, _ = embedded_RFD.shape
        if self.level == 0:
            above_RFZ = self.context.values[:rows, None].expand(-1, width, -1)
        else:
            columns_RF = (frontier.parents_BF[:, :, None] == self.nodes_RF[:, None]).long().argmax(-1)
            above_RFZ = self.paths_RFZ.gather(1, columns_RF[..., None].expand(-1, -1, self.paths_RFZ.shape[-1]))
        self.level += 1
        self.nodes_RF, self.paths_RFZ = frontier.nodes_BF, torch.cat([above_RFZ, embedded_RFD], dim=-1)
        return self.paths_RFZ


class Hydra(HeadDrafter):
    """K heads that draft one after another: head k reads the state and the k + 1 tokens after it.

    Own weights: `heads.{k}.first.{linear,res_connection}.{weight,bias}`, `heads.{k}.blocks.{layer}.linear.*`, with
    `output="copy"` also `outputs.{k}.{weight,bias}`, with `output="one_copy"` those of layer 0 alone, with `prefix`
    also `prefix.block.*` and `prefix.norm.weight`, and with a reduced vocabulary its ids, `token_ids` [Q]. The target's
    embedding and output layer are borrowed. Make a new one with `Hydra.create`.

    Args:
        config: the shape of the heads.
        hidden_size: the target's width.
        vocab_size: the target's vocabulary.
        block: the shape of the prefix layer; None without one.
    """

    family = "hydra"
    card = FamilyCard(
        name="Hydra, Hydra++", papers=("2402.05109",),
        guesses="heads that also read the tokens guessed before them; Hydra++ adds a decoder layer before the heads",
        cost="one head run for each level of the tree: more drafting time than Medusa, more accepted",
    )

    def __init__(
        self, config: HydraConfig, *, hidden_size: int, vocab_size: int, block: BlockConfig | None = None
    ) -> None:
        if config.prefix != (block is not None):
            raise UserError(f"prefix is {config.prefix}, so the shape of its layer must be "
                            f"{'given' if config.prefix else 'left out'}")
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size)
        self.config, self.block = config, block
        self.prefix = None if block is None else PrefixLayer(block)
        self.heads = nn.ModuleList(HydraHead(config, hidden_size, step) for step in range(config.num_heads))
        # With a bias, as in the official code.
        self.outputs = self.own_outputs(config, hidden_size, vocab_size, bias=True)

    @classmethod
    def create(cls, config: HydraConfig, target: Target, token_ids_Q: Tensor | None = None) -> Self:
        """New heads for `target`, bound to it, that all start as its output layer.

        Args:
            config: their shape; the prefix layer has that of the target's layers.
            target: the model they draft for.
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if the ids do not agree with the configuration.
        """
        block = BlockConfig.like(target) if config.prefix else None
        with target.device:
            drafter = cls(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size, block=block)
        if drafter.prefix is not None:
            drafter.prefix.fit(target)
        drafter.attach(target, token_ids_Q)
        drafter.copy_output()
        return drafter

    def layer_forms(self, compiler: Compiler) -> CompiledLayers:
        """Compiled forms of the heads' blocks and of the prefix layer."""
        return forms_of(self, (ConditionedBlock, ResidualBlock, DecoderBlock), compiler)

    def describe(self) -> dict[str, Any]:
        """The configuration, JSON-ready."""
        return {**asdict(self.config), "block": None if self.block is None else asdict(self.block)}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        shape = settings_of(description, HydraConfig, "Hydra heads are", "block")
        block = shape.pop("block")
        return cls(
            HydraConfig(**shape),
            hidden_size=identity.hidden_size,
            vocab_size=identity.vocab_size,
            block=None if block is None else BlockConfig.from_dict(block),
        )

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
        embedded_BLD = self._noisy(self._embed(features.tokens_BL))
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
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Store the heads' input at each row's last real position; a row without one keeps its former input.

        The prefix layer reads accepted positions only, so that its cache never has to be rewound.
        """
        held, counts_R = _hydra_state(state), observation.counts_B
        held.drop_tree()
        order_N = torch.arange(observation.final_BND.shape[1], device=counts_R.device)
        padding_RN = order_N >= counts_R[:, None]
        states_RND = observation.final_BND.to(self.dtype).masked_fill(padding_RN[..., None], 0)
        if self.prefix is not None and held.rows is not None:
            rows, counts = observation.on_host(rows_R)
            attention = held.rows.read(rows, states_RND.shape[1])
            with self._packing.installed():
                states_RND = self.prefix(states_RND, attention)
            held.rows.commit(counts_R, counts)
        last_R = (counts_R - 1).clamp(min=0)
        newest_RD = states_RND[torch.arange(len(last_R), device=last_R.device), last_R]
        held.context.store(rows_R, newest_RD, counts_R > 0)

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of one level of the tree, by the head of that level.

        The whole path of a node is read at once: storing partial products for each node would save arithmetic, but not
        the reading of weights, which takes most of the time for a few nodes.

        Raises:
            ValueError: if the level has no head.
        """
        held = _hydra_state(state)
        if (step := held.level) == self.config.num_heads:
            raise ValueError(f"level {step} of the tree needs a head, but there are {step} heads, one for each level")
        _, head = self.steps()[step]
        joined_RFZ = held.extend_paths(frontier, self._embed(frontier.tokens_BF))
        with self._packing.installed():
            logits_RFQ = self.project(head.deepen(head.first(joined_RFZ)), step)
        return Scores.from_logits(logits_RFQ[:, :, None], self.token_ids)

    def expand_bytes(self) -> int:
        """Bytes of one head of average size with its output layer: each level of a tree runs one head."""
        heads = sum(weight.nbytes for weight in self.heads.parameters())
        output = sum(weight.nbytes for weight in self.output_parameters(0)) or self._rows().weight_QD.nbytes
        return heads // self.config.num_heads + output

    def observe_bytes(self) -> int:
        """Bytes of the prefix layer."""
        return 0 if self.prefix is None else sum(weight.nbytes for weight in self.prefix.parameters())

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset these rows, the prefix layer's cache included."""
        held = _hydra_state(state)
        held.drop_tree()
        held.context.clear(rows_R)
        if held.rows is not None:
            held.rows.clear(rows_R.tolist())

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        held = _hydra_state(state)
        held.drop_tree()
        held.context.keep(rows_R)
        if held.rows is not None:
            held.rows.keep(rows_R.tolist())


def _hydra_state(state: DraftState) -> HydraState:
    if not isinstance(state, HydraState):
        raise TypeError(f"Hydra needs the state that its own start() made, got {type(state).__name__}")
    return state

