"""Drafters that let the target itself guess ahead: at virtual nodes of the verifying pass, after each of its nodes.

The final states at the virtual nodes after the last accepted node are the guesses of the next tree, one for each depth.
Virtual node k (from 0) after the token at p is at position p + 1 + k and guesses the token at p + 2 + k: the target's
own state at p predicts p + 1.

Shapes: B rows, L positions, N nodes, K steps, S slots (K times the copies), G anchors of a row, R rows of a decoding
state, Q entries of the draft vocabulary, D hidden size.
"""

from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...config_checks import check_sizes, settings_of
from ...features import Features
from ...interfaces.drafter import DrafterConfig, Drafts
from ...interfaces.proposer import AheadStates, DraftState, Frontier, Observation, Scores, VerifiedRows
from ...row_buffers import RowBuffer
from ...target.kv_cache import RowCache
from ...target.loading.identity import TargetIdentity
from ...target.model import Target
from ...target.read_text import ReadText
from ...target.target_rows import TargetRows
from ...token_tree import Injection, Lookahead, TokenTree
from .shared_embeddings import BorrowingDrafter
from .virtual_nodes import Slots, extended, sees_group

_RANKS = 10
"""Guesses of a depth whose chances are kept."""
_NODES = 768
"""Virtual nodes of a row that are read at once outside training."""


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(DrafterConfig):
    """Settings that the drafters with virtual nodes share."""

    num_tokens: int = 3
    """Tokens guessed beyond the target's own next one: steps of virtual nodes after a node."""
    insertions: int = 64
    """Positions of a row after which virtual nodes are trained in one step, chosen at random among those that have
    labels."""

    def __post_init__(self) -> None:
        check_sizes(num_tokens=self.num_tokens, insertions=self.insertions, vocabulary_size=self.vocabulary_size)


class LookaheadState(DraftState):
    """States of the newest virtual nodes, which depth each row has a guess for, and rows of its own where the target's
    passes are not to be had.

    Args:
        states: one state for each step.
        own: rows in which the drafter runs the target itself; None where verification runs the virtual nodes.
    """

    def __init__(self, states: RowBuffer, own: TargetRows | None) -> None:
        self.states, self.own = states, own
        rows, steps, _ = states.values.shape
        self.present = RowBuffer(rows, steps, blank=False, device=states.values.device, dtype=torch.bool)
        """Which steps each row has a state for."""
        self.whole = True
        """Whether every row that was observed has a guess for every depth, known on the host."""

    @property
    def caches(self) -> tuple[RowCache, ...]:
        """That of its own rows, if it has any."""
        return () if self.own is None else (self.own.cache,)


class LookaheadDrafter(BorrowingDrafter):
    """A drafter whose guesses the target makes at virtual nodes.

    Args:
        config: the family's settings.
        hidden_size: the target's width.
        vocab_size: the target's vocabulary.
        copies: virtual nodes of each step, whose states are averaged.
    """

    config_class: ClassVar[type[LookaheadConfig]]
    """The family's own settings."""
    described_as: ClassVar[str]
    """Subject of the error about an unknown description: "prompt tokens are"."""

    def __init__(self, config: LookaheadConfig, *, hidden_size: int, vocab_size: int, copies: int = 1) -> None:
        super().__init__(hidden_size=hidden_size, vocab_size=vocab_size, vocabulary_size=config.vocabulary_size)
        self.config = config
        self.rank_chances_KR: Tensor
        self.register_buffer("rank_chances_KR", torch.zeros(config.num_tokens, _RANKS))
        self.slots = Slots(steps=config.num_tokens, copies=copies)

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None) -> Self:
        """A new drafter for `target`, initialised and bound to it.

        Args:
            config: the family's settings.
            target: the model it drafts for.
            token_ids_Q: ids of the reduced draft vocabulary, when `config.vocabulary_size` asks for one.

        Raises:
            UserError: if settings, target and ids do not agree.
        """
        config = cls.fitted(config, target)
        with target.device:
            drafter = cls(config, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        drafter.attach(target, token_ids_Q)
        # A target on the meta device, used for planning, has no values.
        if target.device.type != "meta":
            drafter.initialise(target)
        return drafter

    @classmethod
    def fitted(cls, config: Any, target: Target) -> Any:
        """The settings for this target. Raises UserError when they do not fit it."""
        return config

    @abstractmethod
    def initialise(self, target: Target) -> None:
        """Set the first weights of a new drafter."""

    @abstractmethod
    def entering(self, target: Target) -> tuple[Tensor, Injection | None]:
        """(embedding of each slot [S, D], states that they get at a later layer) for a pass of the target."""

    @abstractmethod
    def read_after(self, text: ReadText, features: Features, anchors_BG: Tensor) -> Tensor:
        """Final states [B, G, S, D] of the virtual nodes after positions of a text, with gradients to the weights."""

    def describe(self) -> dict[str, Any]:
        """The configuration, JSON-ready."""
        return asdict(self.config)

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        config = cls.config_class(**settings_of(description, cls.config_class, cls.described_as))
        return cls(config, hidden_size=identity.hidden_size, vocab_size=identity.vocab_size)

    @property
    def reach(self) -> int:
        """One depth for each step."""
        return self.slots.steps

    @property
    def virtual_nodes(self) -> int:
        """All slots."""
        return self.slots.count

    @property
    def offsets(self) -> tuple[int, ...]:
        """Step k at position p guesses token p + 2 + k; the target itself predicts p + 1."""
        return tuple(range(2, 2 + self.slots.steps))

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        """As `count_ranks` found them, None before; sure guesses on the meta device, which holds no values."""
        if self.rank_chances_KR.is_meta:
            return ((1.0,),) * self.slots.steps
        if not bool(self.rank_chances_KR.any()):
            return None
        return tuple(tuple(row) for row in self.rank_chances_KR.tolist())

    def count_ranks(self, table_PK: Tensor) -> None:
        """Keep how often the guess of each rank was right, for the policy `sparse`."""
        ranks_R = torch.arange(_RANKS, device=table_PK.device)
        self.rank_chances_KR = (table_PK[..., None] == ranks_R).float().mean(0).to(self.rank_chances_KR)

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of all steps: in training after some random positions, otherwise after all."""
        text = ReadText(self._rows().target, features)
        return self._after_some(text) if self.training else self._after_all(text)

    def _after_some(self, text: ReadText) -> Drafts:
        """Drafts after the insertion points; nowhere else are they valid."""
        anchors_BG, chosen_BG = self.insertions(text.features)
        states_BGKD = self.steps_after(text, anchors_BG)
        shape, rows_B1 = text.features.tokens_BL.shape, torch.arange(len(anchors_BG), device=anchors_BG.device)[:, None]
        blank_BLKD = states_BGKD.new_zeros(*shape, *states_BGKD.shape[2:])
        hidden_BLKD = blank_BLKD.index_put((rows_B1, anchors_BG), states_BGKD)
        inserted_BL = torch.zeros_like(text.features.supervised_BL).scatter(1, anchors_BG, chosen_BG)
        valid_BLK = inserted_BL[..., None].expand(-1, -1, self.slots.steps)
        return Drafts(hidden_BLKD=hidden_BLKD, offsets=self.offsets, valid_BLK=valid_BLK, estimates=self.estimates)

    def insertions(self, features: Features) -> tuple[Tensor, Tensor]:
        """(random positions of each row, which of them are before a label that some step guesses), [B, G] each."""
        labelled_BL = torch.stack([features.labels(offset)[1] for offset in self.offsets]).any(0)
        chance_BL = torch.rand(labelled_BL.shape, device=labelled_BL.device).masked_fill(~labelled_BL, -1.0)
        chosen = chance_BL.topk(min(self.config.insertions, chance_BL.shape[1]), dim=1)
        return chosen.indices, chosen.values >= 0

    def _after_all(self, text: ReadText) -> Drafts:
        """Drafts after every position."""
        batch, length = text.features.tokens_BL.shape
        order_L = torch.arange(length, device=text.features.tokens_BL.device)
        chunks = torch.split(order_L, max(1, _NODES // self.slots.count))
        states = [self.steps_after(text, chunk.expand(batch, -1)) for chunk in chunks]
        return Drafts(hidden_BLKD=torch.cat(states, dim=1), offsets=self.offsets, estimates=self.estimates)

    @property
    def estimates(self) -> tuple[int, ...]:
        """Step k estimates the target's state one position before its token."""
        return tuple(offset - 1 for offset in self.offsets)

    def steps_after(self, text: ReadText, anchors_BG: Tensor) -> Tensor:
        """One state for each step, [B, G, K, D]: the mean of its copies."""
        return self._averaged(self.read_after(text, text.features, anchors_BG))

    def _averaged(self, states: Tensor) -> Tensor:
        """States [..., K, D] of states [..., S, D]. The output layer is linear: it is the mean of the copies' logits,
        where no soft-capping follows."""
        return states.reshape(*states.shape[:-2], self.slots.steps, self.slots.copies, states.shape[-1]).mean(-2)

    def _group(self, anchors_BG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(anchor of each node [B, M], its distance from the anchor [B, M], which nodes see which [M, M])."""
        anchors_BM = anchors_BG.repeat_interleave(self.slots.count, dim=1)
        slots_M = torch.arange(self.slots.count, device=anchors_BG.device).repeat(anchors_BG.shape[1])
        ahead_BM = (self.slots.step(slots_M) + 1).expand_as(anchors_BM)
        return anchors_BM, ahead_BM, sees_group(self.slots, anchors_BG.shape[1], anchors_BG.device)

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> LookaheadState:
        """A state in which no row has been observed yet; the drafter runs the target itself, in rows of its own."""
        return self._started(rows, self._rows().target.start(rows, capacity + self.virtual_nodes, self.taps))

    def join(self, rows: VerifiedRows, count: int, capacity: int) -> LookaheadState:
        """The same where the verifying passes run the virtual nodes, if they can."""
        return self._started(count, None) if rows.reads_virtual else self.start(count, capacity)

    def _started(self, rows: int, own: TargetRows | None) -> LookaheadState:
        self.pack_linears()
        target = self._rows().target
        states = RowBuffer(rows, self.slots.steps, self.hidden_size, device=target.device, dtype=target.dtype)
        return LookaheadState(states, own)

    def extended(self, state: DraftState, tree: TokenTree) -> TokenTree:
        """The tree with virtual nodes, unless the drafter runs them itself."""
        held = _lookahead_state(state)
        if held.own is not None:
            return tree
        held.whole = held.whole and (tree.lookahead is None or tree.lookahead.whole)
        return self._with_nodes(tree)

    @torch.no_grad()
    def _with_nodes(self, tree: TokenTree) -> TokenTree:
        target = self._rows().target
        embedded_SD, injection = self.entering(target)
        return extended(tree, self.slots, embedded_SD.to(target.dtype), injection)

    @torch.no_grad()
    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Store the states after each row's last real position; a row without one keeps its former states.

        Raises:
            ValueError: if the pass had no virtual nodes though `extended` adds them.
        """
        held = _lookahead_state(state)
        ahead = observation.ahead if held.own is None else self._run(held.own, rows_R, observation)
        if ahead is None:
            raise ValueError(f"this {self.family} drafter reads virtual nodes, and the pass had none; let "
                             "Proposer.extended add them before the target runs")
        seen_R = observation.counts_B > 0
        held.states.store(rows_R, self._averaged(ahead.states_BSD), seen_R)
        held.present.store(rows_R, ahead.present_BS.view(-1, self.slots.steps, self.slots.copies).all(-1), seen_R)

    def _run(self, own: TargetRows, rows_R: Tensor, observation: Observation) -> AheadStates:
        """States at the virtual nodes after each row's last position, from a pass of the drafter's own."""
        (rows, counts), counts_B = observation.on_host(rows_R), observation.counts_B
        tree = TokenTree.prompts(observation.tokens_BN, counts_B)
        last_B1 = (counts_B - 1).clamp(min=0)[:, None]
        lookahead = Lookahead.after(tree.tokens_BN, last_B1[:, 0], self.slots.steps)
        sent = self._with_nodes(replace(tree, lookahead=lookahead))
        output = own.run(sent, rows, select_BM=last_B1)
        path_BN = torch.arange(tree.size, device=rows_R.device).expand_as(tree.tokens_BN)
        own.commit(path_BN, counts_B, counts, moved=False)
        nodes = self.slots.count
        # In the order of the slots: every row has all of them after one node.
        return AheadStates(states_BSD=output.final_BND[:, -nodes:],
                           present_BS=(counts_B > 0)[:, None].expand(-1, nodes))

    @torch.no_grad()
    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Scores of all descendants of the root, depth h by step h; none where a row has no virtual node for it.

        Raises:
            ValueError: if the frontier is not the root alone, which is all that this family scores.
        """
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError(f"{self.family} scores every depth from the root at once; pass 1 node, got "
                             f"{frontier.nodes_BF.shape[1]}")
        held, rows = _lookahead_state(state), len(frontier.nodes_BF)
        logits_RKQ = self._rows()(held.states.values[:rows])
        found = Scores.from_logits(logits_RKQ[:, None], self.token_ids)
        if held.whole:
            return found
        every_Q = torch.arange(logits_RKQ.shape[-1], device=logits_RKQ.device)
        missing_RK = ~held.present.values[:rows]
        log_probs_BFHQ = found.log_probs_BFHQ.masked_fill(missing_RK[:, None, :, None], -torch.inf)
        ids_Q = every_Q if self.token_ids is None else self.token_ids
        return Scores(log_probs_BFHQ=log_probs_BFHQ, candidates_BFHQ=ids_Q.expand_as(log_probs_BFHQ))

    def expand_bytes(self) -> int:
        """Bytes of the target's output layer."""
        return self._rows().weight_QD.nbytes

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Reset these rows."""
        held = _lookahead_state(state)
        held.states.clear(rows_R)
        held.present.clear(rows_R)
        if held.own is not None:
            for row in rows_R.tolist():
                held.own.wipe(row)

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        held = _lookahead_state(state)
        held.states.keep(rows_R)
        held.present.keep(rows_R)
        if held.own is not None:
            held.own.keep(rows_R.tolist())


def _lookahead_state(state: DraftState) -> LookaheadState:
    if not isinstance(state, LookaheadState):
        raise TypeError(f"a drafter with virtual nodes needs the state that its own start() made, got "
                        f"{type(state).__name__}")
    return state
