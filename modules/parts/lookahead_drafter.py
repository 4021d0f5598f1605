"""Drafters that let the target itself guess ahead: at virtual nodes of the verifying pass, after each of its nodes.

The final states at the virtual nodes after the last accepted node are the guesses of the next tree, one for each depth.
Virtual node k (from 0) after the token at p is at position p + 1 + k and guesses the token at p + 2 + k: the target's
own state at p predicts p + 1.

Each step may have several virtual nodes, its copies, which do not see each other and whose states are averaged. Slot
k * C + c of a node is copy c (of C) of step k.

Shapes: B rows, L positions, N nodes, K steps, S slots (K times the copies), G anchors of a row, M virtual nodes, R rows
of a decoding state, Q entries of the draft vocabulary, D hidden size."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config_checks import Size
from ..features import Features
from ..interfaces.drafter import DrafterConfig, Drafts
from ..interfaces.proposer import AheadStates, DraftState, Frontier, Observation, Scores, SharesTargetRows, VerifiedRows
from ..row_buffers import RowBuffer
from ..target.model import Target
from ..target.partial_passes import ReadText
from ..target.target_rows import TargetRows
from ..token_tree import Injection, Lookahead, TokenTree, VirtualNodes
from .shared_embeddings import BorrowingDrafter, Sizes

_RANKS = 10  # Guesses of a depth whose chances are kept
_NODES = 768  # Virtual nodes of a row that are read at once outside training


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(DrafterConfig):
    """Settings that the drafters with virtual nodes share."""

    training_only = frozenset({"insertions"})
    num_tokens: Size = 3
    """Tokens guessed beyond the target's own next one: steps of virtual nodes after a node."""
    insertions: Size = 64
    """Positions of a row after which virtual nodes are trained in a step, chosen at random among those with labels."""


class LookaheadState(DraftState):
    """States of the newest virtual nodes, which depth each row has a guess for, and rows of its own where the target's
    passes are not to be had."""

    def __init__(self, states: RowBuffer, own: TargetRows | None) -> None:
        self.states, self.own = states, own
        rows, steps, _ = states.values.shape
        self.present = RowBuffer(rows, steps, blank=False, device=states.values.device, dtype=torch.bool)
        """Which steps each row has a state for."""
        self.whole = True  # Whether every row that was observed has a guess for every depth, known on the host
        self.caches = () if own is None else (own.cache,)
        self.held = (states, self.present, *self.caches)


class LookaheadDrafter(BorrowingDrafter[LookaheadState], SharesTargetRows):
    """A drafter whose guesses the target makes at virtual nodes, several copies of each step."""

    config: LookaheadConfig

    def __init__(self, config: LookaheadConfig, sizes: Sizes, copies: int = 1) -> None:
        super().__init__(config, sizes)
        self.copies, self.virtual_nodes = copies, copies * config.num_tokens
        self.rank_chances_KR: Tensor
        self.register_buffer("rank_chances_KR", torch.zeros(config.num_tokens, _RANKS))
        self.reach = self.trained_steps = config.num_tokens
        # The target itself predicts p + 1. Step k estimates the target's state one position before its token.
        self.estimates = tuple(range(1, 1 + config.num_tokens))
        self.offsets = tuple(range(2, 2 + config.num_tokens))

    @abstractmethod
    def entering(self, target: Target) -> tuple[Tensor, Injection | None]:
        """(embedding of each slot [S, D], states that they get at a later layer) for a pass of the target."""

    @abstractmethod
    def read_after(self, text: ReadText, anchors_BG: Tensor) -> Tensor:
        """Final states [B, G, S, D] of the virtual nodes after positions of a text, with gradients to the weights."""

    @property
    def rank_chances(self) -> tuple[tuple[float, ...], ...] | None:
        """As `count_ranks` found them, None before; sure guesses on the meta device, which holds no values."""
        if self.rank_chances_KR.is_meta:
            return ((1.0,),) * self.config.num_tokens
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
        text = ReadText(self.output_rows().target, features)
        batch, length = features.tokens_BL.shape
        if not self.training:
            order_L = torch.arange(length, device=features.tokens_BL.device)
            chunks = torch.split(order_L, max(1, _NODES // self.virtual_nodes))
            states = [self.averaged(self.read_after(text, chunk.expand(batch, -1))) for chunk in chunks]
            return Drafts(hidden_BLKD=torch.cat(states, dim=1), offsets=self.offsets, estimates=self.estimates)
        # Random positions, of those before a label that some step guesses.
        labelled_BL = torch.stack([features.labels(offset)[1] for offset in self.offsets]).any(0)
        chance_BL = torch.rand(labelled_BL.shape, device=labelled_BL.device).masked_fill(~labelled_BL, -1.0)
        chances_BG, anchors_BG = chance_BL.topk(min(self.config.insertions, length), dim=1)
        # A row with too few labels gets others too, at -1, which are not counted.
        chosen_BG = chances_BG >= 0
        states_BGKD = self.averaged(self.read_after(text, anchors_BG))
        rows_B1 = torch.arange(batch, device=anchors_BG.device)[:, None]
        blank_BLKD = states_BGKD.new_zeros(batch, length, *states_BGKD.shape[2:])
        inserted_BL = torch.zeros_like(features.supervised_BL).scatter(1, anchors_BG, chosen_BG)
        return Drafts(hidden_BLKD=blank_BLKD.index_put((rows_B1, anchors_BG), states_BGKD), offsets=self.offsets,
                      valid_BLK=inserted_BL[..., None].expand(-1, -1, self.config.num_tokens), estimates=self.estimates)

    def averaged(self, states: Tensor) -> Tensor:
        """States [..., K, D] of states [..., S, D]. The output layer is linear: it is the mean of the copies' logits,
        where no soft-capping follows."""
        return torch.unflatten(states, -2, (-1, self.copies)).mean(-2)

    def group(self, anchors_BG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(anchor of each node [B, M], its distance from the anchor [B, M], which nodes see which [M, M])."""
        slots, anchors = self.virtual_nodes, anchors_BG.shape[1]
        slots_M = torch.arange(slots, device=anchors_BG.device).repeat(anchors)
        group_M = torch.arange(anchors, device=anchors_BG.device).repeat_interleave(slots)
        # Each sees the nodes of its own anchor alone.
        sees_MM = (group_M[:, None] == group_M) & _sees(slots_M[:, None], slots_M, self.copies)
        anchors_BM = anchors_BG.repeat_interleave(slots, dim=1)
        return anchors_BM, (1 + slots_M // self.copies).expand_as(anchors_BM), sees_MM

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> LookaheadState:
        """A state in which no row has been observed yet. The verifying passes run the virtual nodes, if they can;
        otherwise the drafter runs the target itself, in rows of its own."""
        self.pack_linears()
        target = self.output_rows().target
        own = None
        if verified is None or not verified.reads_virtual:
            own = target.start(rows, capacity + self.virtual_nodes, self.taps)
        states = RowBuffer(rows, self.config.num_tokens, self.hidden_size, device=target.device, dtype=target.dtype)
        return LookaheadState(states, own)

    def extended(self, state: LookaheadState, tree: TokenTree) -> TokenTree:
        """The tree with virtual nodes, unless the drafter runs them itself."""
        if state.own is not None:
            return tree
        state.whole = state.whole and (tree.lookahead is None or tree.lookahead.whole)
        return self._with_nodes(tree)

    @torch.no_grad()
    def _with_nodes(self, tree: TokenTree) -> TokenTree:
        target = self.output_rows().target
        embedded_SD, injection = self.entering(target)
        return with_virtual_nodes(tree, embedded_SD.to(target.dtype), injection, copies=self.copies)

    @torch.no_grad()
    def observe(self, state: LookaheadState, rows_R: Tensor, observation: Observation) -> None:
        """Store the states after each row's last real position; a row without one keeps its former states. Raises
        ValueError if the pass had no virtual nodes though `extended` adds them."""
        ahead, counts_B = observation.ahead, observation.counts_B
        if state.own is not None:
            # A pass of the drafter's own over the new tokens, with virtual nodes after each row's last one.
            rows, counts = observation.on_host(rows_R)
            tree = TokenTree.prompts(observation.tokens_BN, counts_B)
            last_B1 = (counts_B - 1).clamp(min=0)[:, None]
            lookahead = Lookahead.after(tree.tokens_BN, last_B1[:, 0], self.config.num_tokens)
            output = state.own.run(self._with_nodes(replace(tree, lookahead=lookahead)), rows, select_BM=last_B1)
            path_BN = torch.arange(tree.size, device=rows_R.device).expand_as(tree.tokens_BN)
            state.own.commit(path_BN, counts_B, counts, moved=False)
            # In the order of the slots: every row has all of them after one node.
            ahead = AheadStates(states_BSD=output.final_BND[:, -self.virtual_nodes :],
                                present_BS=(counts_B > 0)[:, None].expand(-1, self.virtual_nodes))
        if ahead is None:
            raise ValueError(f"this {self.family} drafter reads virtual nodes, and the pass had none; let "
                             "`extended` add them before the target runs")
        seen_R = counts_B > 0
        state.states.store(rows_R, self.averaged(ahead.states_BSD), seen_R)
        state.present.store(rows_R, torch.unflatten(ahead.present_BS, 1, (-1, self.copies)).all(-1), seen_R)

    @torch.no_grad()
    def expand(self, state: LookaheadState, frontier: Frontier) -> Scores:
        """Scores of all descendants of the root, depth h by step h; none where a row has no virtual node for it. Raises
        ValueError if the frontier is not the root alone, which is all that this family scores."""
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError(f"{self.family} scores every depth from the root at once; pass 1 node, got "
                             f"{frontier.nodes_BF.shape[1]}")
        rows = len(frontier.nodes_BF)
        logits_RKQ = self.output_rows()(state.states.values[:rows])
        found = Scores.from_logits(logits_RKQ[:, None], self.token_ids)
        if state.whole:
            return found
        every_Q = torch.arange(logits_RKQ.shape[-1], device=logits_RKQ.device)
        missing_RK = ~state.present.values[:rows]
        log_probs_BFHQ = found.log_probs_BFHQ.masked_fill(missing_RK[:, None, :, None], -torch.inf)
        ids_Q = every_Q if self.token_ids is None else self.token_ids
        # Only a drafter that names its candidates may have no guess.
        return Scores(log_probs_BFHQ=log_probs_BFHQ, candidates_BFHQ=ids_Q.expand_as(log_probs_BFHQ))


def _sees(slots: Tensor, others: Tensor, copies: int) -> Tensor:
    """True where the other slot of an anchor is the same copy of this step or an earlier one."""
    return (slots % copies == others % copies) & (others // copies <= slots // copies)


def with_virtual_nodes(tree: TokenTree, embedded_SD: Tensor, injection: Injection | None = None, *,
                       copies: int = 1) -> TokenTree:
    """The tree with virtual nodes after its real nodes, as many as `tree.lookahead` wants, else all. ValueError if it
    has those of another drafter. A virtual node sees what its anchor sees and the same copy of that anchor's earlier
    steps (arXiv:2405.18628, section 3.1). Each slot has its embedding, of `copies` slots a step; step k is one position
    further on than step k - 1. An injection is the states that they get at a later layer."""
    if tree.virtual is not None:
        raise ValueError("the tree has the virtual nodes of another drafter; only one drafter may add any")
    slots, wanted, device = len(embedded_SD), tree.lookahead, tree.tokens_BN.device
    # The places, by anchor and slot: those that a node wants come first, in their order.
    limit_BN = torch.full_like(tree.tokens_BN, slots) if wanted is None else wanted.counts_BN
    steps_S = torch.arange(slots, device=device) // copies
    here_BX = ((steps_S < limit_BN[..., None]) & tree.real_BN[..., None]).flatten(1)
    count = here_BX.shape[1]
    if wanted is not None:
        # One padding node where no row wants any.
        count = max(1, min(wanted.most * copies, wanted.nodes * slots, count))
    chosen_BM = torch.sort((~here_BX).byte(), dim=1, stable=True).indices[:, :count]
    used_BM, slots_BM = here_BX.gather(1, chosen_BM), chosen_BM % slots
    anchors_BM = torch.where(used_BM, chosen_BM // slots, -1)
    above_BM = anchors_BM.clamp(min=0)
    # What they see: the path of their anchor, its earlier slots, and at least themselves.
    same_BMM = (anchors_BM[:, :, None] == anchors_BM[:, None]) & used_BM[:, :, None]
    same_BMM &= _sees(slots_BM[:, :, None], slots_BM[:, None], copies)
    same_BMM |= torch.eye(count, dtype=torch.bool, device=device)
    path_BMN = tree.ancestors_BNN.gather(1, above_BM[..., None].expand(-1, -1, tree.size)) & used_BM[..., None]
    depths_BM = torch.where(used_BM, tree.depths_BN.gather(1, above_BM) + slots_BM // copies + 1, 0)
    virtual = VirtualNodes(embedded_BMD=embedded_SD[slots_BM], anchors_BM=anchors_BM, slots_BM=slots_BM,
                           slots=slots, injection=injection)
    return replace(
        tree,
        # Any token of the row will do.
        tokens_BN=torch.cat([tree.tokens_BN, tree.tokens_BN[:, :1].expand(-1, count)], dim=1),
        parents_BN=torch.cat([tree.parents_BN, above_BM], dim=1),
        depths_BN=torch.cat([tree.depths_BN, depths_BM], dim=1),
        ancestors_BNN=torch.cat([pad(tree.ancestors_BNN, (0, count)), torch.cat([path_BMN, same_BMM], dim=2)], dim=1),
        real_BN=pad(tree.real_BN, (0, count)),
        drawn=None, virtual=virtual, lookahead=None)
