"""A proposer of stated acceptance: it knows the answers, and a drafter's own work is done all the same.

With it the speed of decoding is measured at any acceptance, without training.

Shapes: B rows, F nodes, H depths, Q entries of the draft vocabulary, S texts, T places of a text, R ranks.
"""

import torch
from draftsmith.modules import DraftState, Frontier, Observation, Proposer, Scores
from draftsmith.modules.interfaces.proposer import VerifiedRows
from draftsmith.modules.row_buffers import RowBuffer
from draftsmith.modules.target.draft_vocabulary import draft_index
from support.wrapped_drafter import Wrapped, WrappedState
from torch import Tensor

RANKS = 8  # Guesses after a node of which one may be right
_NO_GUESS = -40.0  # Log-probability of all others


class OracleState(WrappedState):
    """The drafter's own state, and the place of each row in its text."""

    def __init__(self, inner: DraftState, rows: int, device: torch.device) -> None:
        super().__init__(inner)
        self.texts, self.places = (RowBuffer(rows, device=device, dtype=torch.long) for _ in range(2))
        """Number of each row's text; tokens of it that the target has read."""
        self.texts.values.copy_(torch.arange(rows))
        self.held = (inner, self.places)
        self.asked = 0  # Depths of the growing tree that were scored

    def drop_tree(self) -> None:
        super().drop_tree()
        self.asked = 0

    def keep(self, rows_R: Tensor) -> None:
        super().keep(rows_R)
        self.texts.keep(rows_R)


class Oracle(Wrapped):
    """A drafter's work with guesses of stated acceptance: the guess of rank r is right with chance a (1 - a)^r.

    Row r decodes text r: give as many requests as rows, in the order of the texts. Trees must grow level by level."""

    def __init__(self, inner: Proposer, texts_ST: Tensor, vocab_size: int, acceptance: float) -> None:
        super().__init__(inner)
        self.texts_ST, self.vocab_size = texts_ST, vocab_size
        self._index_V: Tensor | None = None
        ranks_R = torch.arange(RANKS, device=texts_ST.device)
        self.chances_R = acceptance * (1 - acceptance) ** ranks_R
        generator = torch.Generator().manual_seed(0)
        drawn_ST = torch.rand(texts_ST.shape, generator=generator).to(texts_ST.device)
        self.ranks_ST = torch.searchsorted(self.chances_R.cumsum(0), drawn_ST)
        """Rank of the right token among the guesses at each place; RANKS where it is not among them."""

    def state_of(self, state: DraftState) -> DraftState:
        return _oracle_state(state).inner

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> OracleState:
        return OracleState(super().start(rows, capacity, verified), rows, self.texts_ST.device)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        held = _oracle_state(state)
        super().observe(state, rows_R, observation)
        held.places.values.index_add_(0, rows_R, observation.counts_B)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        held = _oracle_state(state)
        scores = super().expand(state, frontier)
        depths = scores.log_probs_BFHQ.shape[2]
        held.asked += depths
        rows = len(frontier.nodes_BF)
        ahead_H = torch.arange(held.asked - depths + 1, held.asked + 1, device=self.texts_ST.device)
        places_BH = (held.places.values[:rows, None] + ahead_H).clamp(max=self.texts_ST.shape[1] - 1)
        texts_B1 = held.texts.values[:rows, None]
        right_BH, ranks_BH = self.texts_ST[texts_B1, places_BH], self.ranks_ST[texts_B1, places_BH]
        return self._replaced(scores, right_BH, ranks_BH)

    def _replaced(self, scores: Scores, right_BH: Tensor, ranks_BH: Tensor) -> Scores:
        """The scores with the right token in its rank, and tokens after it in the others."""
        log_BFHQ = torch.full_like(scores.log_probs_BFHQ, _NO_GUESS)
        size, ids_Q = log_BFHQ.shape[-1], scores.token_ids_Q
        if ids_Q is not None:
            if self._index_V is None:
                self._index_V = draft_index(ids_Q, self.vocab_size)
            right_BH = self._index_V[right_BH]
        # A right token without an entry is in no rank.
        ranks_BH = torch.where(right_BH < 0, RANKS, ranks_BH)
        order_R = torch.arange(RANKS, device=right_BH.device)
        wrong_BHR = (right_BH.clamp(min=0)[..., None] + 1 + order_R) % size
        entries_BHR = torch.where(order_R == ranks_BH[..., None], right_BH[..., None], wrong_BHR)
        entries_BFHR = entries_BHR[:, None].expand(-1, log_BFHQ.shape[1], -1, -1)
        log_BFHQ.scatter_(3, entries_BFHR, self.chances_R.log().to(log_BFHQ.dtype).expand_as(entries_BFHR))
        return Scores(log_probs_BFHQ=log_BFHQ, token_ids_Q=ids_Q, states_BFHD=scores.states_BFHD)


def _oracle_state(state: DraftState) -> OracleState:
    if not isinstance(state, OracleState):
        raise TypeError(f"an oracle needs the state that its own start() made, got {type(state).__name__}")
    return state
