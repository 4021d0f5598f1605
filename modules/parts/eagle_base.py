"""Base of the EAGLE drafters: they read the target's states at verified positions and their own at drafted ones.

At position p the input is the target's state of x_p and the token x_{p+1}, which the target chose; the drafter's state
there predicts x_{p+2}. After the last such position it continues with its own states and drafted tokens. Verification
provides the target's states of more positions: the drafted states are discarded and the target's are read.

Shapes: B rows, L positions, N new positions, K draft steps, D hidden size, R rows of a decoding state, F frontier
nodes, M nodes of the growing tree, Q entries of the draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..row_buffers import RowBuffer
from .block_cache import BlockRows
from .decoder_block import AttentionContext
from .feature_drafter import DEPTHS, FIRST_OFFSET, FeatureDrafter
from .training_time_test import Rollout


class EagleState(DraftState):
    """The layer's cache of each row, its newest state there, and its states at the nodes of the tree.

    Args:
        own: the newest states.
        rows: the cache.
    """

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
    """Base of EAGLE-1 and EAGLE-3: alignment, steps of training, cache and tree while decoding.

    A subclass defines the number of trained steps (`trained_steps`), the input from the target's states (`fuse`), the
    layer (`step`) and, unless they are EAGLE-1's, the input of the next step (`feed`) and that of the output layer
    (`finish`).
    """

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
        return own[..., -self.block.hidden_size :].detach()

    def finish(self, own: Tensor) -> Tensor:
        """The output layer's input, [..., D]."""
        return own[..., : self.block.hidden_size]

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of the trained draft steps at each position along the true tokens; outside training of at least
        `DEPTHS` steps.

        Raises:
            UserError: if the rows are too short for the steps.
        """
        length = features.tokens_BL.shape[1]
        steps = self.trained_steps if self.training else max(self.trained_steps, DEPTHS)
        if self.training and length < steps + FIRST_OFFSET:
            raise UserError(f"{steps} draft steps need rows of at least {steps + FIRST_OFFSET} tokens, got {length}; "
                            "lower steps or raise row_length")
        own, width = self.rollout(features, steps, self.contexts(features)), self.hidden_size
        # A state of one half is estimate and input of the output layer in one: then None says that they are equal.
        halves = [state[..., -width:] for state in own if self.estimates_states and self.state_size > width]
        # Step k at position p estimates the target's state one position before its token, at p + 1 + k.
        return Drafts(hidden_BLKD=torch.stack([self.finish(state) for state in own], dim=2),
                      offsets=tuple(range(FIRST_OFFSET, FIRST_OFFSET + steps)),
                      estimates=tuple(range(1, 1 + steps)) if self.estimates_states else None,
                      estimated_BLKD=torch.stack(halves, dim=2) if halves else None)

    def contexts(self, features: Features) -> Callable[[int], AttentionContext]:
        """Attention context of each step in training."""
        return Rollout(features)

    def rollout(self, features: Features, steps: int, attentions: Callable[[int], AttentionContext]) -> list[Tensor]:
        """The layer's states of each step at all positions, [B, L, D] each.

        Args:
            attentions: attention context of each step; called in order.
        """
        read_BLD = self.fuse(features.final(), features.taps)
        states: list[Tensor] = []
        for step in range(steps):
            states.append(self.step(self.following(features, 1 + step), read_BLD, attentions(step)))
            read_BLD = self.feed(states[-1])
        return states

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> EagleState:
        """A state in which no row has been observed yet."""
        self.pack_linears()
        like = next(self.parameters())
        own = RowBuffer(rows, self.state_size, device=like.device, dtype=like.dtype)
        return EagleState(own, BlockRows(self.num_layers, rows, capacity, like.device))

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
            above_BFD = own_RMD.gather(1, columns_BF[..., None].expand(-1, -1, own_RMD.shape[-1]))
            embedded_BFD, read_BFD = self.embed(frontier.tokens_BF), self.feed(above_BFD)
            with self.packing.installed():
                own_BFD = self.step(embedded_BFD, read_BFD, state.rows.add_nodes(frontier))
            state.nodes_RM = torch.cat([state.nodes_RM[:rows], frontier.nodes_BF], dim=1)
            state.own_RMD = torch.cat([own_RMD, own_BFD], dim=1)
        finished_BFD = self.finish(own_BFD)
        with self.packing.installed():
            logits_BFQ = self.project(finished_BFD, 0)
        return Scores.from_logits(logits_BFQ[:, :, None], self.token_ids, finished_BFD[:, :, None])
