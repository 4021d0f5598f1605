"""Drafting without training by what was seen: a matrix of the latest most probable next tokens (Token Recycling,
arXiv:2408.08696), n-grams with the target distributions that followed them (ADED arXiv:2407.12021, STAND
arXiv:2506.04708), and copies from the text so far (prompt lookup, CopySpec arXiv:2503.08643).

Shapes: V target vocabulary, C candidates of a token or an entry, B rows, R rows that change, F frontier nodes, M nodes
of a pass, E all nodes of all rows, G tokens of a context or of the longest suffix compared, P entries of the memory,
W entries averaged, Q = W * C, L places of the text buffer, H tokens copied, N new tokens, S rows of a state."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores, Verified
from ..parts.causal_drafter import Text
from ..policies.lookahead_trees import likeliest_paths
from ..row_buffers import RowBuffer
from ..token_tree import Topology
from ..verification.sampling import widened

RANK_PROBABILITIES = (0.45, 0.13, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
"""Assumed probability that the candidate of each rank is the next token: it shapes the tree and orders mixed drafts."""


class TokenRecycling(Proposer[DraftState]):
    """Drafter with a matrix of the latest `candidates` most probable next tokens of every token, shared by all rows, on
    a device: `vocab_size * candidates * 8` bytes. Every verified node rewrites the line of its token, the rejected
    nodes too; of two nodes with the same token the later one is kept. As in the paper the matrix is kept across
    requests; unlike there, a token that was never verified has no guess instead of token 0, and of a prompt only the
    last token is used, since the logits of the others are not computed."""

    family = "recycling"
    reads_logits = True  # True: the matrix is filled from logits

    def __init__(self, vocab_size: int, device: torch.device, candidates: int = len(RANK_PROBABILITIES)) -> None:
        # The last line is written for padding, and never read.
        self.successors_VC = torch.full((vocab_size + 1, min(candidates, vocab_size)), -1, device=device)
        self.log_probs_C = torch.tensor(RANK_PROBABILITIES[: self.successors_VC.shape[1]], device=device).log()

    def start(self, rows: int, capacity: int) -> DraftState:
        return DraftState()

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        verified = required(observation, self.family)
        unused = self.successors_VC.shape[0] - 1
        tokens_E = torch.where(verified.real_BM, verified.tokens_BM, unused).flatten()
        order_E = torch.arange(len(tokens_E), device=tokens_E.device)
        # Which of two equal indices is written last is undefined on an accelerator.
        repeated_E = ((tokens_E[:, None] == tokens_E) & (order_E > order_E[:, None])).any(-1)
        lines_EC = verified.logits_BMV.topk(self.successors_VC.shape[1], dim=-1).indices.flatten(0, 1)
        self.successors_VC[torch.where(repeated_E, unused, tokens_E)] = lines_EC

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        candidates_BFHC = self.successors_VC[frontier.tokens_BF][:, :, None]
        scores_BFHC = torch.where(candidates_BFHC >= 0, self.log_probs_C, -torch.inf)
        return Scores(log_probs_BFHQ=scores_BFHC, candidates_BFHQ=candidates_BFHC.clamp(min=0))

    def forget(self) -> None:
        self.successors_VC.fill_(-1)


def recycling_tree(size: int, depth: int = 6) -> Topology:
    """Best tree of `size` nodes, at least 1 (ValueError), if a candidate's probability depends on its rank alone, in
    best-first order. The paper's template has 80 nodes below the root and depth 6, found by hand for an A100."""
    if size < 1:
        raise ValueError(f"a tree needs at least its root, got size {size}")
    return Topology.from_paths(path for _, path in likeliest_paths([RANK_PROBABILITIES] * depth, depth, size))


def required(observation: Observation, family: str) -> Verified:
    """The verified nodes of an observation, with their logits. Raises ValueError if it carries none."""
    if observation.verified is None:
        raise ValueError(f"{family} learns from logits, but the observation carries none; set `verified`")
    return observation.verified


class NgramState(Text):
    """Texts of the rows, and the context of each node of the growing tree."""

    nodes_BM: Tensor | None = None
    contexts_BMG: Tensor | None = None

    def drop_tree(self) -> None:
        self.nodes_BM = self.contexts_BMG = None


class Ngrams(Proposer[NgramState]):
    """Drafter that proposes the averaged distribution after the latest earlier contexts with the longest match. The
    memory is shared by all rows and kept across requests, so that several answers to one prompt help each other, as in
    STAND; there every n-gram has one running average and is found by a hash table, here the latest few entries are
    averaged and found by comparing tokens, on the device and for all nodes at once. Only accepted tokens are stored.

    At most `longest` tokens of a context are compared, and `averaged` entries averaged, the latest ones with the
    longest match; `memory` contexts are stored, of all rows and requests together, each with the `candidates` most
    probable next tokens."""

    family = "ngrams"
    reads_logits = True  # True: the distributions come from the logits of accepted nodes

    def __init__(self, vocab_size: int, device: torch.device, *, longest: int = 4, candidates: int = 10,
                 averaged: int = 4, memory: int = 4096) -> None:
        self.longest, self.averaged, self.memory, self.device = longest, averaged, memory, device
        kept = min(candidates, vocab_size)
        # The last entry is written for nodes that are not stored, and never read.
        self.contexts_PG = torch.full((memory + 1, longest), -1, device=device)
        self.ids_PC = torch.zeros(memory + 1, kept, dtype=torch.long, device=device)
        self.log_probs_PC = torch.full((memory + 1, kept), -torch.inf, device=device)
        self.written = torch.zeros((), dtype=torch.long, device=device)

    def start(self, rows: int, capacity: int) -> NgramState:
        return NgramState(rows, capacity, self.longest, self.device)

    def observe(self, state: NgramState, rows_R: Tensor, observation: Observation) -> None:
        """Store the context and the most probable next tokens of every accepted node."""
        verified = required(observation, self.family)
        state.drop_tree()
        places_RN = state.append(rows_R, observation)
        accepted_BM = verified.places_BM >= 0
        contexts_BMG = state.endings(rows_R, places_RN.gather(1, verified.places_BM.clamp(min=0)), self.longest)
        wide = widened(verified.logits_BMV)
        top = wide.topk(self.ids_PC.shape[1], dim=-1)
        log_probs_BMC = top.values - wide.logsumexp(-1, keepdim=True)
        # Entries get the next places of the ring buffer, or the unread one where the node was not accepted. Only the
        # last `memory` entries of one call are stored, so that no place is written twice.
        memory, order_E = self.memory, accepted_BM.flatten().long().cumsum(0)
        taken_E = accepted_BM.flatten() & (order_E > order_E[-1] - memory)
        slots_E = torch.where(taken_E, (self.written + order_E - 1) % memory, memory)
        self.written += order_E[-1]
        self.contexts_PG[slots_E] = contexts_BMG.flatten(0, 1)
        self.ids_PC[slots_E] = top.indices.flatten(0, 1)
        self.log_probs_PC[slots_E] = log_probs_BMC.flatten(0, 1).float()

    def expand(self, state: NgramState, frontier: Frontier) -> Scores:
        contexts_BFG = self._contexts(state, frontier)
        # Tokens, counted from the end, that each stored context shares with each node's.
        same_BFP = torch.ones((), dtype=torch.bool, device=self.device)
        matched_BFP = torch.zeros((), dtype=torch.long, device=self.device)
        for back in range(1, self.longest + 1):
            node_BF1 = contexts_BFG[..., -back, None]
            same_BFP = same_BFP & (node_BF1 == self.contexts_PG[:-1, -back]) & (node_BF1 >= 0)
            matched_BFP = matched_BFP + same_BFP
        # Of equal matches the youngest come first.
        slots_P = torch.arange(self.memory, device=self.device)
        age_P = (self.written - 1 - slots_P) % self.memory
        ranks_BFP = (matched_BFP + 1) * self.memory - age_P
        chosen_BFW = ranks_BFP.topk(self.averaged, dim=-1).indices
        lengths_BFW = matched_BFP.gather(-1, chosen_BFW)
        alike_BFW = (lengths_BFW == lengths_BFW[..., :1]) & (lengths_BFW > 0)
        weights_BFW = alike_BFW / alike_BFW.sum(-1, keepdim=True).clamp(min=1)
        probs_BFQ = (self.log_probs_PC[chosen_BFW].exp() * weights_BFW[..., None]).flatten(-2)
        ids_BFQ = self.ids_PC[chosen_BFW].flatten(-2)
        # Probabilities of equal ids are added up at the first one, zero at the others: siblings differ.
        equal_BFQQ = ids_BFQ[..., :, None] == ids_BFQ[..., None, :]
        total_BFQ = (equal_BFQQ * probs_BFQ[..., None, :]).sum(-1)
        order_Q = torch.arange(ids_BFQ.shape[-1], device=ids_BFQ.device)
        repeated_BFQ = (equal_BFQQ & (order_Q < order_Q[:, None])).any(-1)
        log_probs_BFQ = torch.where(repeated_BFQ, 0.0, total_BFQ).log()
        return Scores(log_probs_BFHQ=log_probs_BFQ[:, :, None], candidates_BFHQ=ids_BFQ[:, :, None])

    def _contexts(self, held: NgramState, frontier: Frontier) -> Tensor:
        """Last tokens of the path to each frontier node, stored for its children."""
        if held.nodes_BM is None or held.contexts_BMG is None:
            rows_B = torch.arange(frontier.nodes_BF.shape[0], device=self.device)
            contexts_BFG = held.endings(rows_B, held.roots_S[: len(rows_B), None], self.longest)
            held.nodes_BM, held.contexts_BMG = frontier.nodes_BF, contexts_BFG
            return contexts_BFG
        above_BF = frontier.parents_among(held.nodes_BM)
        parents_BFG = held.contexts_BMG.gather(1, above_BF[..., None].expand(-1, -1, self.longest))
        contexts_BFG = torch.cat([parents_BFG[..., 1:], frontier.tokens_BF[..., None]], dim=-1)
        held.nodes_BM = torch.cat([held.nodes_BM, frontier.nodes_BF], dim=1)
        held.contexts_BMG = torch.cat([held.contexts_BMG, contexts_BFG], dim=1)
        return contexts_BFG

    def forget(self) -> None:
        self.contexts_PG.fill_(-1)
        self.written.zero_()


class PromptLookup(Proposer[Text]):
    """Drafter that copies the continuation of the latest of the longest earlier matches of the text's last tokens. With
    a short suffix this is prompt lookup decoding, with a long one CopySpec; both originals take the first occurrence,
    and prompt lookup only where a whole continuation follows. Here a copy that reaches the end of the text continues
    with the tokens it has copied, as LZ77 does, so that a short cycle is continued to any length. Tokens are compared
    directly, not by a hash.

    A suffix of `shortest` to `longest` tokens must have occurred before, after which `copied` are copied."""

    family = "lookup"

    def __init__(self, device: torch.device, *, shortest: int = 1, longest: int = 3, copied: int = 7) -> None:
        self.device, self.shortest, self.longest = device, shortest, longest
        self.copied = self.reach = copied

    def start(self, rows: int, capacity: int) -> Text:
        return Text(rows, capacity, self.longest, self.device)

    def observe(self, state: Text, rows_R: Tensor, observation: Observation) -> None:
        state.append(rows_R, observation)

    def expand(self, state: Text, frontier: Frontier) -> Scores:
        """Scores of the copied tokens, one for each depth, each the only child; no guess in rows without a match.
        Raises ValueError if the frontier is not the root alone."""
        matched_BL, places_L, roots_B1 = self.matches(state, frontier)
        # The longest match first, among equals the latest place: its last token is copied from after.
        best = torch.where(matched_BL >= self.shortest, matched_BL * len(places_L) + places_L, -1).max(-1)
        found_B1 = best.values[:, None] >= 0
        ends_B1 = torch.where(found_B1, places_L[best.indices, None], self.longest)
        tokens_BH = copies(state.tokens_SL[: len(ends_B1)], ends_B1, roots_B1, self.copied)
        return only_children(tokens_BH, found_B1.expand_as(tokens_BH))

    def matches(self, state: Text, frontier: Frontier) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens up to each place that are those up to the root, at most `longest` and 0 from the root on, [B, L];
        these places of the buffer; the roots', [B, 1])."""
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError("prompt lookup drafts from the root only: a frontier must have 1 node, "
                             f"got {frontier.nodes_BF.shape[1]}")
        tokens_BL, roots_B1 = (part[: len(frontier.nodes_BF)] for part in (state.tokens_SL, state.roots_S[:, None]))
        tail_B1G = state.endings(torch.arange(len(roots_B1), device=self.device), roots_B1, self.longest)
        # Places before the text must not equal each other.
        tail_B1G = torch.where(tail_B1G < 0, -2, tail_B1G)
        equal_BLG = tokens_BL.unfold(1, self.longest, 1)[:, 1:] == tail_B1G
        places_L = torch.arange(self.longest, tokens_BL.shape[1], device=self.device)
        return equal_BLG.flip(-1).long().cumprod(-1).sum(-1) * (places_L < roots_B1), places_L, roots_B1


def copies(tokens_BL: Tensor, ends_B1: Tensor, roots_B1: Tensor, count: int) -> Tensor:
    """The `count` tokens after a place of each text, [B, H]; after the root, which is the last one, come those again
    that were copied so far."""
    order_H = torch.arange(count, device=ends_B1.device)
    return tokens_BL.gather(1, ends_B1 + 1 + order_H % (roots_B1 - ends_B1).clamp(min=1))


def only_children(tokens_BH: Tensor, known_BH: Tensor) -> Scores:
    """Scores of a token for each depth, where it is known the only child."""
    scores_BH = torch.where(known_BH, 0.0, -torch.inf)
    return Scores(log_probs_BFHQ=scores_BH[:, None, :, None], candidates_BFHQ=tokens_BH.clamp(min=0)[:, None, :, None])


class ReferenceText(Text):
    """The reference of each row, empty places that no copy crosses, and its text; how well the copies went so far."""

    def __init__(self, rows: int, capacity: int, longest: int, first: int, device: torch.device) -> None:
        super().__init__(rows, capacity, capacity + 2 * longest, device)
        self.first, self.text = longest, capacity + 2 * longest  # First places of the references and of the texts
        # Place of the reference's last token that the answer has; drafts in a row that were wrong at once; most tokens
        # of the next copy; of the last copy the place before its first token, and how many tokens it had.
        blanks = (longest - 1, 0, first, 0, 0)
        held = [RowBuffer(rows, blank=blank, device=device, dtype=torch.long) for blank in blanks]
        self.cursors_S, self.misses_S, self.lengths_S, self.ends_S, self.counts_S = (one.values for one in held)
        self.held = (*self.held, *held)


class ReferenceCopy(PromptLookup):
    """Drafter that copies from a reference, which the answer is expected to resemble, and from the text so far.

    Where the original starts anew after an edit with a suffix that occurs once in the reference, here the longest match
    is taken, of equal ones the nearest after the last token that was copied, else the latest. Without any match a token
    is taken to replace one of the reference. A copy has `first` tokens, twice as many after one that was right as a
    whole, up to `copied`. Each draft that is wrong at once makes the shortest match that counts a token longer, up to
    `longest`, so that a reference that the answer does not resemble costs next to nothing."""

    family = "reference"
    reads_references = True  # True: this is what it is for

    def __init__(self, device: torch.device, *, longest: int = 8, copied: int = 32, first: int = 8) -> None:
        super().__init__(device, longest=longest, copied=copied)
        self.start_length = min(first, copied)

    def start(self, rows: int, capacity: int) -> ReferenceText:
        return ReferenceText(rows, capacity, self.longest, self.start_length, self.device)

    def open(self, state: Text, row_R: Tensor, *, reference: Sequence[int], own_text: Sequence[int]) -> None:
        super().open(state, row_R, reference=reference, own_text=own_text)
        assert isinstance(state, ReferenceText)
        state.tokens_SL[row_R, state.first : state.first + len(reference)] = row_R.new_tensor(reference)

    def observe(self, state: Text, rows_R: Tensor, observation: Observation) -> None:
        """Store the new tokens, and count how many of them the last draft had."""
        assert isinstance(state, ReferenceText)
        ends_R, counts_R = state.ends_S[rows_R], state.counts_S[rows_R]
        following_RN = observation.next_BN
        copied_RN = copies(state.tokens_SL[rows_R], ends_R[:, None], state.roots_S[rows_R, None], following_RN.shape[1])
        order_N = torch.arange(following_RN.shape[1], device=rows_R.device)
        within_RN = order_N < torch.minimum(observation.counts_B, counts_R)[:, None]
        right_R = ((following_RN == copied_RN) & within_RN).long().cumprod(-1).sum(-1)
        super().observe(state, rows_R, observation)
        drafted_R, hit_R = counts_R > 0, right_R > 0
        cursors_R, misses_R, lengths_R = (one[rows_R] for one in (state.cursors_S, state.misses_S, state.lengths_S))
        state.cursors_S[rows_R] = torch.where(hit_R & (ends_R < state.text), ends_R + right_R, cursors_R)
        misses_R = torch.where(hit_R, 0, (misses_R + 1).clamp(max=self.longest))
        state.misses_S[rows_R] = torch.where(drafted_R, misses_R, state.misses_S[rows_R])
        lengths_R = torch.where(right_R == counts_R, 2 * lengths_R, self.start_length).clamp(max=self.copied)
        state.lengths_S[rows_R] = torch.where(drafted_R, lengths_R, state.lengths_S[rows_R])
        state.counts_S[rows_R] = 0

    def expand(self, state: Text, frontier: Frontier) -> Scores:
        assert isinstance(state, ReferenceText)
        matched_BL, places_L, roots_B1 = self.matches(state, frontier)
        rows, size = len(roots_B1), state.tokens_SL.shape[1]
        tokens_BL, cursors_B1, misses_B1 = (one[:rows] for one in (
            state.tokens_SL, state.cursors_S[:, None], state.misses_S[:, None]))
        ahead_BL = places_L - cursors_B1
        near_BL = (ahead_BL > 0) & (places_L < state.text)
        order_BL = torch.where(near_BL, 2 * size - ahead_BL, places_L)
        expected_BL = (ahead_BL == 1) & (misses_B1 == 0) & (places_L < state.text)
        # What nothing follows, as the reference's last token, is no place to copy from.
        allowed_BL = (matched_BL > misses_B1.clamp(max=self.longest - 1)) | expected_BL
        allowed_BL &= nn.functional.pad(tokens_BL[:, self.longest + 1 :], (0, 1), value=-1) >= 0
        best = torch.where(allowed_BL, matched_BL * 2 * size + order_BL, -1).max(-1)
        found_B1 = best.values[:, None] >= 0
        ends_B1 = torch.where(found_B1, places_L[best.indices, None], self.longest)
        # The root is the reference's next token, whether or not the tokens after it go on.
        sure_B1 = found_B1 & (best.values[:, None] >= 2 * size) & (ends_B1 == cursors_B1 + 1) & (ends_B1 < state.text)
        state.cursors_S[:rows] = torch.where(sure_B1, ends_B1, cursors_B1)[:, 0]
        tokens_BH = copies(tokens_BL, ends_B1, roots_B1, self.copied)
        short_BH = torch.arange(self.copied, device=self.device) < state.lengths_S[:rows, None]
        known_BH = found_B1 & short_BH & (tokens_BH >= 0).cumprod(-1).bool()
        state.ends_S[:rows], state.counts_S[:rows] = ends_B1[:, 0], known_BH.sum(-1)
        return only_children(tokens_BH, known_BH)
