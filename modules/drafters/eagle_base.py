"""Drafters that read the target's states where there are any and their own where there are none: the EAGLE line.

At index p stand the target's state of x_p and the token x_{p+1}, which the target decided; the drafter's state there
predicts x_{p+2}. Behind the last such index it goes on with its own states and drafted tokens. After a verification
the target's states are known of more indices: what was drafted is forgotten and they are read instead.

Shapes: B rows, L positions, N new positions, K draft steps, D hidden size, R rows of a decoding state, F frontier
nodes, M nodes of the growing tree, Q entries of the draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafts
from ..interfaces.proposer import DraftState, Frontier, Observation, Scores
from ..target.model import Target
from .parts.block_cache import BlockRows
from .parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig, Sight
from .parts.shared_embeddings import BorrowingDrafter
from .parts.training_time_test import Rollout

DEPTHS = 6
"""Draft steps that `forward` gives at least outside training: trees are fitted to them."""
_FIRST = 2
"""How far ahead of its index the first draft step predicts."""


class FeedbackState(DraftState):
    """What the layer has read of each row, its newest state there, and those of the tree behind it."""

    rooted: bool
    """Whether the root's children have been asked for."""

    def __init__(self, own_RD: Tensor, rows: BlockRows) -> None:
        self.own_RD, self.rows = own_RD, rows
        self.uproot()

    def uproot(self) -> None:
        """Forget the tree; the root's state is that of the newest index."""
        self.rooted = False
        self.rows.uproot()
        self.nodes_RM = torch.zeros(len(self.own_RD), 1, dtype=torch.long, device=self.own_RD.device)
        self.own_RMD = self.own_RD[:, None]

    def above(self, frontier: Frontier) -> Tensor:
        """The states of the nodes' parents, [B, F, D]."""
        rows = len(frontier.nodes_BF)
        columns_BF = (frontier.parents_BF[:, :, None] == self.nodes_RM[:rows, None]).long().argmax(-1)
        return self.own_RMD[:rows].gather(1, columns_BF[..., None].expand(-1, -1, self.own_RMD.shape[-1]))

    def grow(self, frontier: Frontier, own_BFD: Tensor) -> None:
        """Take in the states of new nodes."""
        rows = len(own_BFD)
        self.nodes_RM = torch.cat([self.nodes_RM[:rows], frontier.nodes_BF], dim=1)
        self.own_RMD = torch.cat([self.own_RMD[:rows], own_BFD], dim=1)


class FeedbackDrafter(BorrowingDrafter):
    """What the members of the line share: alignment, the steps of training, cache and tree while decoding.

    A member says how many steps it trains (`trained_steps`), what it reads of the target (`fuse`), what its layer does
    (`step`), what the next step reads of that (`feed`) and what the output layer reads (`finish`).

    Args:
        block: the shape of its layer.
        vocab_size: the target's vocabulary.
        vocabulary_size: entries of a reduced draft vocabulary; None for the whole.
        target_width: of the target's states; None where it is the layer's.
    """

    def __init__(
        self, block: BlockConfig, *, vocab_size: int, vocabulary_size: int | None, target_width: int | None = None
    ) -> None:
        super().__init__(hidden_size=target_width or block.hidden_size, vocab_size=vocab_size,
                         vocabulary_size=vocabulary_size)
        self.block = block

    # What a member says ----------------------------------------------------------------------------------------------

    @abstractmethod
    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """What the layer reads of the target's states, [B, N, D]."""

    @abstractmethod
    def step(self, embedded_BND: Tensor, read_BND: Tensor, sight: Sight) -> Tensor:
        """The layer's states [B, N, D] of tokens and of the states fused, or fed back, one index before them."""

    def feed(self, own: Tensor) -> Tensor:
        """What the next step reads in the place of the target's states."""
        return own

    def finish(self, own: Tensor) -> Tensor:
        """What the output layer reads."""
        return own

    @property
    def state_size(self) -> int:
        """Width of the layer's states, which go on from step to step; the block's unless a member says otherwise."""
        return self.block.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers that write keys; one unless a member says otherwise."""
        return 1

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """Every index drafts as deep as in training, outside of it at least `DEPTHS`, along the true tokens.

        Raises:
            UserError: if the rows are too short for the steps.
        """
        length, steps = features.tokens_BL.shape[1], self.trained_steps
        steps = steps if self.training else max(steps, DEPTHS)
        if self.training and length < steps + _FIRST:
            raise UserError(f"{steps} draft steps need rows of at least {steps + _FIRST} tokens, got {length}; lower "
                            "steps or raise row_length")
        own = self.rollout(features, steps, Rollout(features))
        return Drafts(hidden_BLKD=torch.stack([self.finish(state) for state in own], dim=2),
                      offsets=tuple(range(_FIRST, _FIRST + steps)), estimates=self.estimates(steps),
                      estimated_BLKD=self.estimated(own))

    def estimates(self, steps: int) -> tuple[int, ...] | None:
        """Which of the target's final states each step estimates; none unless a member says so."""
        return None

    def estimated(self, own: list[Tensor]) -> Tensor | None:
        """The estimates themselves, [B, L, K, D]; None where they are what the output layer reads."""
        return None

    def rollout(self, features: Features, steps: int, sights: Callable[[int], Sight]) -> list[Tensor]:
        """The layer's states of each step at all indices, [B, L, D] each.

        Args:
            sights: what a step sees; asked in order.
        """
        read_BLD = self.fuse(features.final(), features.taps)
        states: list[Tensor] = []
        for step in range(steps):
            states.append(self.step(self.following(features, 1 + step), read_BLD, sights(step)))
            read_BLD = self.feed(states[-1])
        return states

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of finished states [..., D] by the target's output layer, the same for every step."""
        return self._rows()(hidden)

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> FeedbackState:
        """A state in which no row has been observed yet; the linear layers are packed if they have changed."""
        self.lay_out()
        own_RD = next(self.parameters()).new_zeros(rows, self.state_size)
        return FeedbackState(own_RD, BlockRows(self.num_layers, rows, capacity, own_RD.device))

    @torch.no_grad()
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, each with the token behind it; the last one's is the root, decided already."""
        held, counts_R = _feedback(state), observation.counts_B
        held.uproot()
        padding_RN1 = ~observation.real_BN[..., None]
        final_RND = observation.final_BND.masked_fill(padding_RN1, 0)
        taps = {layer: states.masked_fill(padding_RN1, 0) for layer, states in observation.taps.items()}
        sight = held.rows.read(rows_R.tolist(), observation.tokens_BN.shape[1])
        with self._packing.installed():
            own_RND = self.step(self._embed(observation.behind_BN), self.fuse(final_RND, taps), sight)
        held.rows.commit(counts_R, counts_R.tolist())
        last_R = (counts_R - 1).clamp(min=0)
        newest_RD = own_RND[torch.arange(len(last_R), device=last_R.device), last_R]
        newest_RD = torch.where((counts_R > 0)[:, None], newest_RD, held.own_RD[rows_R])
        # Not in place: the state may have been made inside torch.inference_mode and written outside it.
        held.own_RD = held.own_RD.index_copy(0, rows_R, newest_RD)
        held.uproot()

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of the children of the frontier nodes. The root was read with the last observation."""
        held = _feedback(state)
        if not held.rooted:
            held.rooted = True
            return self._scores(held.own_RD[: len(frontier.nodes_BF), None])
        embedded_BFD, read_BFD = self._embed(frontier.tokens_BF), self.feed(held.above(frontier))
        with self._packing.installed():
            own_BFD = self.step(embedded_BFD, read_BFD, held.rows.sprout(frontier))
        held.grow(frontier, own_BFD)
        return self._scores(own_BFD)

    def _scores(self, own_BFD: Tensor) -> Scores:
        with self._packing.installed():
            logits_BFQ = self.project(self.finish(own_BFD), 0)
        wide = torch.promote_types(logits_BFQ.dtype, torch.float32)
        return Scores(log_probs_BFHQ=logits_BFQ.to(wide).log_softmax(-1)[:, :, None], token_ids_Q=self.token_ids)

    def observe_bytes(self) -> int:
        """Everything but the output layer."""
        output = {id(parameter) for parameter in self.output_parameters(0)}
        return sum(parameter.nbytes for parameter in self.parameters() if id(parameter) not in output)

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget these rows, and what the layer read of them."""
        held = _feedback(state)
        held.own_RD = held.own_RD.index_fill(0, rows_R, 0)
        held.rows.clear(rows_R.tolist())
        held.uproot()

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        held = _feedback(state)
        held.own_RD = held.own_RD[rows_R]
        held.rows.keep(rows_R.tolist())
        held.uproot()


def block_beside(target: Target, rope_base: float | None = None) -> BlockConfig:
    """The shape of the target's own layers.

    Args:
        rope_base: base of the rotary embedding; None takes the target's, or where its configuration names none the
            official code's.
    """
    said: dict[str, Any] = target.config.to_dict()
    own = (said.get("rope_parameters") or {}).get("rope_theta") or said.get("rope_theta")
    return BlockConfig.like(target, rope_base=float(rope_base or own or OFFICIAL_ROPE_BASE))


def _feedback(state: DraftState) -> FeedbackState:
    if not isinstance(state, FeedbackState):
        raise TypeError(f"the EAGLE line needs the state that its own start() made, got {type(state).__name__}")
    return state
