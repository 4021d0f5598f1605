"""Base of the EAGLE drafters: they read the target's states at verified positions and their own at drafted ones.

At position p the input is the target's state of x_p and the token x_{p+1}, which the target chose; the drafter's state
there predicts x_{p+2}. After the last such position it continues with its own states and drafted tokens. Verification
provides the target's states of more positions: the drafted states are discarded and the target's are read.

Shapes: B rows, L positions, N new positions, K draft steps, D hidden size, R rows of a decoding state, F frontier
nodes, M nodes of the growing tree, Q entries of the draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..row_buffers import RowBuffer
from ..target.kv_cache import RowCache
from .parts.block_cache import BlockRows
from .parts.decoder_block import AttentionContext
from .parts.feature_drafter import DEPTHS, FIRST_OFFSET, FeatureDrafter
from .parts.training_time_test import Rollout


class EagleState(DraftState):
    """The layer's cache of each row, its newest state there, and its states at the nodes of the tree."""

    rooted: bool
    """Whether the root's children have been proposed."""

    def __init__(self, own: RowBuffer, rows: BlockRows) -> None:
        self.own, self.rows = own, rows
        self.root_R1 = torch.zeros(len(own.values), 1, dtype=torch.long, device=own.values.device)
        self.drop_tree()

    @property
    def caches(self) -> tuple[RowCache, ...]:
        """The layer's."""
        return (self.rows.cache,)

    def drop_tree(self) -> None:
        """Discard the tree; the root's state is that of the newest position."""
        self.rooted = False
        self.rows.drop_tree()
        self.nodes_RM, self.own_RMD = self.root_R1, self.own.values[:, None]

    def above(self, frontier: Frontier) -> Tensor:
        """The states of the nodes' parents, [B, F, D]."""
        rows = len(frontier.nodes_BF)
        columns_BF = (frontier.parents_BF[:, :, None] == self.nodes_RM[:rows, None]).long().argmax(-1)
        return self.own_RMD[:rows].gather(1, columns_BF[..., None].expand(-1, -1, self.own_RMD.shape[-1]))

    def add_states(self, frontier: Frontier, own_BFD: Tensor) -> None:
        """Add the states of new nodes."""
        rows = len(own_BFD)
        self.nodes_RM = torch.cat([self.nodes_RM[:rows], frontier.nodes_BF], dim=1)
        self.own_RMD = torch.cat([self.own_RMD[:rows], own_BFD], dim=1)


class EagleDrafter(FeatureDrafter):
    """Base of EAGLE-1 and EAGLE-3: alignment, steps of training, cache and tree while decoding.

    A subclass defines the number of trained steps (`trained_steps`), the input from the target's states (`fuse`), the
    layer (`step`), the input of the next step (`feed`) and that of the output layer (`finish`).
    """

    # Defined by each subclass ----------------------------------------------------------------------------------------

    @abstractmethod
    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """The layer's input from the target's states, [B, N, D]."""

    @abstractmethod
    def step(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The layer's states [B, N, D] of tokens and of the fused, or fed back, states one position before them."""

    def feed(self, own: Tensor) -> Tensor:
        """The next step's input in place of the target's states."""
        return own

    def finish(self, own: Tensor) -> Tensor:
        """The output layer's input."""
        return own

    @property
    def state_size(self) -> int:
        """Width of the layer's states, which are passed from step to step; by default the block's."""
        return self.block.hidden_size

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of the trained draft steps at each position along the true tokens; outside training of at least
        `DEPTHS` steps.

        Raises:
            UserError: if the rows are too short for the steps.
        """
        return self.drafts(features, self.trained_steps if self.training else max(self.trained_steps, DEPTHS))

    def drafts(self, features: Features, steps: int) -> Drafts:
        """States of the first `steps` draft steps. Raises as `forward` does."""
        length = features.tokens_BL.shape[1]
        if self.training and length < steps + FIRST_OFFSET:
            raise UserError(f"{steps} draft steps need rows of at least {steps + FIRST_OFFSET} tokens, got {length}; "
                            "lower steps or raise row_length")
        own = self.rollout(features, steps, Rollout(features))
        return Drafts(hidden_BLKD=torch.stack([self.finish(state) for state in own], dim=2),
                      offsets=tuple(range(FIRST_OFFSET, FIRST_OFFSET + steps)), estimates=self.estimates(steps),
                      estimated_BLKD=self.estimated(own))

    def estimates(self, steps: int) -> tuple[int, ...] | None:
        """Distance in tokens to the target's final state that each step estimates; None when it estimates none."""
        return None

    def estimated(self, own: list[Tensor]) -> Tensor | None:
        """The estimates, [B, L, K, D]; None when they are the output layer's input."""
        return None

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
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.pack_linears()
        like = next(self.parameters())
        own = RowBuffer(rows, self.state_size, device=like.device, dtype=like.dtype)
        return EagleState(own, BlockRows(self.num_layers, rows, capacity, like.device))

    @torch.no_grad()
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, each with the token after it; for the last one that token is the root."""
        held, counts_R = _eagle_state(state), observation.counts_B
        held.drop_tree()
        padding_RN1 = ~observation.real_BN[..., None]
        final_RND = observation.final_BND.masked_fill(padding_RN1, 0)
        taps = {layer: states.masked_fill(padding_RN1, 0) for layer, states in observation.taps.items()}
        rows, counts = observation.on_host(rows_R)
        attention = held.rows.read(rows, observation.tokens_BN.shape[1])
        with self._packing.installed():
            own_RND = self.step(self._embed(observation.next_BN), self.fuse(final_RND, taps), attention)
        held.rows.commit(counts_R, counts)
        last_R = (counts_R - 1).clamp(min=0)
        newest_RD = own_RND[torch.arange(len(last_R), device=last_R.device), last_R]
        held.own.store(rows_R, newest_RD, counts_R > 0)

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes; `observe` has already read the root."""
        held = _eagle_state(state)
        if not held.rooted:
            held.rooted = True
            return self._scores(held.own.values[: len(frontier.nodes_BF), None])
        embedded_BFD, read_BFD = self._embed(frontier.tokens_BF), self.feed(held.above(frontier))
        with self._packing.installed():
            own_BFD = self.step(embedded_BFD, read_BFD, held.rows.add_nodes(frontier))
        held.add_states(frontier, own_BFD)
        return self._scores(own_BFD)

    def _scores(self, own_BFD: Tensor) -> Scores:
        finished_BFD = self.finish(own_BFD)
        with self._packing.installed():
            logits_BFQ = self.project(finished_BFD, 0)
        return Scores.from_logits(logits_BFQ[:, :, None], self.token_ids, finished_BFD[:, :, None])

    def observe_bytes(self) -> int:
        """Bytes of all own weights but the output layer."""
        output = {id(parameter) for parameter in self.output_parameters(0)}
        return sum(parameter.nbytes for parameter in self.parameters() if id(parameter) not in output)

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset these rows, the layer's cache included."""
        held = _eagle_state(state)
        held.own.clear(rows_R)
        held.rows.clear(rows_R.tolist())
        held.drop_tree()

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        held = _eagle_state(state)
        held.own.keep(rows_R)
        held.rows.keep(rows_R.tolist())
        held.drop_tree()


def _eagle_state(state: DraftState) -> EagleState:
    if not isinstance(state, EagleState):
        raise TypeError(f"an EAGLE drafter needs the state that its own start() made, got {type(state).__name__}")
    return state
