"""Bases of drafters that turn the target's states into states of its output layer: of all of them (Falcon, Kangaroo,
drafters of blocks), and of EAGLE's, which read the target's states at verified positions and their own at drafted ones.

At position p an EAGLE drafter reads the target's state of x_p and the token x_{p+1}, which the target chose; its state
there predicts x_{p+2}. After the last such position it continues with its own states and drafted tokens. Verification
provides the target's states of more positions: the drafted states are discarded and the target's are read.

Shapes: B rows, L positions, N new positions, K draft steps, D hidden size, R rows of a decoding state, F frontier
nodes, M nodes of the growing tree, Q entries of the draft vocabulary."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import LATER, Positive, Size
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import DrafterConfig, Drafts
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores, State, spread
from ..row_buffers import RowBuffer
from ..target.loading.model_parts import rope_by_kind
from ..target.model import Target
from .attention import carried_scaling
from .block_cache import BlockRows
from .decoder_block import OFFICIAL_ROPE_BASE, AttentionContext, BlockConfig, ResidualLayer
from .shared_embeddings import BorrowingDrafter, shifted
from .training_time_test import step_attentions

DEPTHS = 6  # Fewest draft steps that `forward` computes outside training: draft trees are fitted to them
FIRST_OFFSET = 2  # Distance in tokens from a position to the token that its first draft step predicts
_PROBE = 64  # Tokens of the target pass that measures its last norm


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(DrafterConfig):
    """Settings that all feature drafters share."""

    rope_base: Positive | None = None
    """Base of the rotary embedding, without scaling; None takes the target's, with its scaling (linear, dynamic, yarn,
    longrope, llama3). The official code's is always 10000."""
    window: Size | None = field(default=None, metadata={LATER: True})
    """Newest tokens of the text that a token sees, itself included; None for all. A draft then keeps no more of a long
    text than these and one pass."""
    qk_norm: bool | None = field(default=None, metadata={LATER: True})
    """Whether every head's query and key have an RMSNorm, as in Qwen3. None gives them to blocks, and to EAGLE-3 for a
    target that has them itself: of EAGLE-3's engines vLLM alone reads them."""
    spare: ClassVar[int] = 0  # Tokens of the text that the last token of a draft must see at least
    ahead: ClassVar[tuple[str, ...]] = ()
    """Settings whose product is the number of tokens of a draft that one of them sees: a window holds these at least.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        least = max(DEPTHS, self.spare + math.prod(getattr(self, name) for name in self.ahead))
        if self.window is not None and self.window < least:
            ahead = ", ".join(f"{name} {getattr(self, name)}" for name in self.ahead)
            raise UserError(f"window is {self.window}, and a draft of up to {least} tokens reads its own tokens too"
                            f"{f' ({ahead})' if ahead else ''}; set window to at least {least}, or leave it out")

    def carries(self, name: str, start: Any) -> bool:
        """All weights fit a window, which training then makes the best of."""
        return super().carries(name, start) or name == "window"


@dataclass(frozen=True, kw_only=True)
class TappedConfig(FeatureConfig):
    """Settings of drafters over several of the target's states."""

    taps: tuple[int, ...] | None = None
    """Layers of the target, from 0, whose outputs are read, ascending; None takes a low, a middle and a high one as in
    EAGLE-3's official code: 1, L/2 - 1 and L - 4 of L layers. Papers on blocks have five, evenly spaced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps is not None and (not self.taps or list(self.taps) != sorted(set(self.taps))):
            raise UserError(f"taps must be ascending numbers of layers, at least one, got {list(self.taps)}")


class FeatureDrafter(BorrowingDrafter[State]):
    """A drafter over the target's states whose decoder layers have the shape of the target's."""

    config: FeatureConfig
    block: BlockConfig
    has_block = True
    compiled_kinds: tuple[type[nn.Module], ...] = (ResidualLayer,)
    num_layers: int = 1  # Decoder layers that write keys
    block_size: int = 1  # Tokens drafted by one run of the layers

    @property
    def window(self) -> int | None:
        """Newest tokens of the text that its layers see; None for all."""
        return self.config.window

    @classmethod
    def fitted(cls, config: Any, target: Target) -> tuple[Any, BlockConfig]:
        """(settings, shape of the layers) for this target. Raises UserError when they do not fit it."""
        return config, block_like(target, config.rope_base, bool(config.qk_norm))

    def require_rows(self, features: Features, keys: str) -> None:
        """Refuse training rows that are too short for the trained steps, which these keys set. Raises UserError."""
        length, least = features.tokens_BL.shape[1], self.trained_steps + FIRST_OFFSET
        if self.training and length < least:
            raise UserError(f"{self.trained_steps} draft steps need rows of at least {least} tokens, got {length}; "
                            f"lower {keys} or raise row_length")


def chosen_taps(taps: Sequence[int] | None, target: Target) -> tuple[int, ...]:
    """The tapped layers of this target. Raises UserError if a tap is not a layer of the target."""
    layers, last = target.num_layers, target.num_layers - 1
    if taps is None:
        return tuple(sorted({min(1, last), max(0, layers // 2 - 1), max(0, layers - 4)}))
    for tap in taps:
        if tap == layers:
            raise UserError(f"tap {tap} would be the state after the last norm of {target.identity.name}, which is no "
                            f"layer's output; its last layer is {last}, choose from 0 to {last}")
        if not 0 <= tap < layers:
            raise UserError(f"tap {tap} is not a layer of {target.identity.name}; choose from 0 to {last}")
    return tuple(taps)


def columns_for(taps: Sequence[int], former_EF: Tensor, former_taps: Sequence[int]) -> Tensor:
    """The weight of a layer that joins tapped states, with columns of zeros for taps that are not among the former."""
    former_ETD = torch.unflatten(former_EF.detach(), 1, (len(former_taps), -1))
    columns_ETD = former_ETD.new_zeros(len(former_ETD), len(taps), former_ETD.shape[-1])
    columns_ETD[:, [taps.index(tap) for tap in former_taps]] = former_ETD
    return columns_ETD.flatten(1)


def block_like(target: Target, rope_base: float | None = None, qk_norm: bool = False) -> BlockConfig:
    """The shape of the target's own layers, with this base of the rotary embedding and no scaling, with norms of the
    heads or not. None takes the target's base and scaling, or the official code's where its configuration has none."""
    given: dict[str, Any] = target.config.to_dict()
    kinds = rope_by_kind(given.get("rope_parameters"))
    # A drafter's layers see the whole text, as the target's layers with full attention do.
    rope = kinds.get("full_attention") or next(iter(kinds.values()))
    own = rope.get("rope_theta") or given.get("rope_theta") or OFFICIAL_ROPE_BASE
    block = BlockConfig.like(target, rope_base=float(own if rope_base is None else rope_base))
    block = replace(block, qk_norm=qk_norm)
    if rope_base is not None:
        return block
    return replace(block, rope_scaling=carried_scaling(rope, block.head_dim, target.context_length))


@torch.no_grad()
def last_norm(target: Target, eps: float) -> Tensor:
    """The weight [D] with which RMSNorm of the last layer's output fits the target's final states best. It is exactly
    the target's own weight if its last norm is an RMSNorm."""
    last = target.num_layers - 1
    tokens = target.readable_tokens(min(_PROBE, target.context_length)).tolist()
    encoded = target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), (last,))
    wide = torch.promote_types(target.dtype, torch.float32)
    final_ND, last_ND = encoded.final()[0].to(wide), encoded.taps[last][0].to(wide)
    normed_ND = functional.rms_norm(last_ND, last_ND.shape[-1:], eps=eps)
    return (final_ND * normed_ND).sum(0) / normed_ND.square().sum(0)


class EagleState(DraftState):
    """The layer's cache of each row, its newest state there, and its states at the nodes of the tree."""

    rooted: bool  # Whether the root's children have been proposed

    def __init__(self, own: RowBuffer, rows: BlockRows) -> None:
        self.own, self.rows = own, rows
        self.held, self.caches = (own, rows.cache), (rows.cache,)
        self.root_R1 = torch.zeros(len(own.values), 1, dtype=torch.long, device=own.values.device)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Discard the tree; the root's state is that of the newest position."""
        self.rooted = False
        self.rows.drop_tree()
        self.nodes_RM, self.own_RMD = self.root_R1, self.own.values[:, None]


class EagleDrafter(FeatureDrafter[EagleState]):
    """Base of EAGLE-1 and EAGLE-3: alignment, steps of training, cache and tree while decoding. A subclass defines the
    number of trained steps (`trained_steps`), the input from the target's states (`fuse`), the layer (`step`) and,
    unless they are EAGLE-1's, the input of the next step (`feed`) and that of the output layer (`finish`)."""

    estimates_states: ClassVar[bool] = True  # Whether each step estimates the target's final state

    # Defined by each subclass ----------------------------------------------------------------------------------------

    @abstractmethod
    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The layer's input from the target's states, [B, N, D]."""

    @abstractmethod
    def step(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The layer's states [B, N, D] of tokens and of the fused, or fed back, states one position before them."""

    # FSPAD's partial alignment (arXiv:2408.15562) gives a state two halves: the one for the output layer, then the
    # estimate. Otherwise both are the whole state.

    def feed(self, own: Tensor) -> Tensor:
        """The next step's input in place of the target's states: the estimate, detached as in HASS, where a pass learns
        from its input and does not train the pass before it."""
        return own[..., -self.hidden_size :].detach()

    def finish(self, own: Tensor) -> Tensor:
        """The output layer's input, [..., D]."""
        return own[..., : self.hidden_size]

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of the trained draft steps at each position along the true tokens; outside training of at least
        `DEPTHS` steps. Raises UserError if the rows are too short for the steps."""
        self.require_rows(features, "steps")
        steps = self.trained_steps if self.training else max(self.trained_steps, DEPTHS)
        own, width = self.rollout(features, steps, self.contexts(features)), self.hidden_size
        # A state of one half is estimate and input of the output layer in one: then None says that they are equal.
        halves = [state[..., -width:] for state in own if self.estimates_states and self.state_size > width]
        # Step k at position p estimates the target's state one position before its token, at p + 1 + k.
        return Drafts(hidden_BLKD=torch.stack([self.finish(state) for state in own], dim=2),
                      offsets=tuple(range(FIRST_OFFSET, FIRST_OFFSET + steps)),
                      estimates=tuple(range(1, 1 + steps)) if self.estimates_states else None,
                      estimated_BLKD=torch.stack(halves, dim=2) if halves else None)

    def contexts(self, features: Features) -> Iterator[AttentionContext]:
        """Attention contexts of successive steps in training."""
        return step_attentions(AttentionContext.training(features, self.window))

    def rollout(self, features: Features, steps: int, attentions: Iterator[AttentionContext]) -> list[Tensor]:
        """The layer's states of each step at all positions, [B, L, D] each."""
        read_BLD, embedded_BLD = self.fuse(features.final(), features.taps), self.embed(features.tokens_BL)
        states: list[Tensor] = []
        for step in range(steps):
            states.append(self.step(shifted(embedded_BLD, features, 1 + step), read_BLD, next(attentions)))
            read_BLD = self.feed(states[-1])
        return states

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> EagleState:
        """A state in which no row has been observed yet."""
        self.pack_linears()
        like = next(self.parameters())
        own = RowBuffer(rows, self.state_size, device=like.device, dtype=like.dtype)
        return EagleState(own, BlockRows(self.num_layers, rows, capacity, like.device, window=self.window))

    @torch.no_grad()
    def observe(self, state: EagleState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, each with the token after it; for the last one that token is the root."""
        state.drop_tree()
        padding_RN1 = ~observation.real_BN[..., None]
        final_RND = observation.final_BND.masked_fill(padding_RN1, 0)
        taps = {layer: states.masked_fill(padding_RN1, 0) for layer, states in observation.taps.items()}
        rows, counts = observation.on_host(rows_R)
        attention = state.rows.read(rows, observation.tokens_BN.shape[1])
        with self.packing.installed():
            own_RND = self.step(self.embed(observation.next_BN), self.fuse(final_RND, taps), attention)
        state.rows.commit(observation.counts_B, counts)
        state.own.store(rows_R, observation.newest(own_RND), observation.counts_B > 0)

    @torch.no_grad()
    def expand(self, state: EagleState, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes; `observe` has already read the root."""
        rows = len(frontier.nodes_BF)
        if not state.rooted:
            state.rooted = True
            own_BFD = state.own.values[:rows, None]
        else:
            columns_BF = frontier.parents_among(state.nodes_RM[:rows])
            own_RMD = state.own_RMD[:rows]
            embedded_BFD, read_BFD = self.embed(frontier.tokens_BF), self.feed(spread(own_RMD, columns_BF))
            with self.packing.installed():
                own_BFD = self.step(embedded_BFD, read_BFD, state.rows.add_nodes(frontier))
            state.nodes_RM = torch.cat([state.nodes_RM[:rows], frontier.nodes_BF], dim=1)
            state.own_RMD = torch.cat([own_RMD, own_BFD], dim=1)
        with self.packing.installed():
            return self.scored(self.finish(own_BFD))

    def scored(self, finished_BFD: Tensor) -> Scores:
        """Scores of the children of nodes with these inputs of the output layer."""
        return Scores.from_logits(self.project(finished_BFD, 0)[:, :, None], self.token_ids, finished_BFD[:, :, None])
