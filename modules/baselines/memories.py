"""Drafting without training by what was seen: a matrix of the latest most probable next tokens (Token Recycling,
arXiv:2408.08696), n-grams with the target distributions that followed them (ADED arXiv:2407.12021, STAND
arXiv:2506.04708), and copies from the text so far (prompt lookup, CopySpec arXiv:2503.08643).

Shapes: V target vocabulary, C candidates of a token or an entry, B rows, R rows that change, F frontier nodes, M nodes
of a pass, E all nodes of all rows, G tokens of a context or of the longest suffix compared, P entries of the memory,
W entries averaged, Q = W * C, L places of the text buffer, H tokens copied."""

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores, Verified
from ..parts.causal_drafter import Text
from ..policies.lookahead_trees import likeliest_paths
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
        if not 1 <= candidates <= len(RANK_PROBABILITIES):
            raise UserError(f"candidates must be between 1 and {len(RANK_PROBABILITIES)}, got {candidates}")
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
    probable next tokens. UserError if one is below 1, or more are averaged than stored."""

    family = "ngrams"
    reads_logits = True  # True: the distributions come from the logits of accepted nodes

    def __init__(self, vocab_size: int, device: torch.device, *, longest: int = 4, candidates: int = 10,
                 averaged: int = 4, memory: int = 4096) -> None:
        if min(longest, candidates) < 1 or not 1 <= averaged <= memory:
            raise UserError("longest and candidates must be at least 1, averaged from 1 to memory, got "
                            f"{longest}, {candidates}, {averaged} and {memory}")
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

    A suffix of `shortest` to `longest` tokens must have occurred before, after which `copied` are copied. UserError if
    one is below 1, or the shortest is longer than the longest."""

    family = "lookup"

    def __init__(self, device: torch.device, *, shortest: int = 1, longest: int = 3, copied: int = 7) -> None:
        if not 1 <= shortest <= longest or copied < 1:
            raise UserError("shortest must be from 1 to longest, copied at least 1, got "
                            f"{shortest}, {longest} and {copied}")
        self.device, self.shortest, self.longest = device, shortest, longest
        self.copied = self.reach = copied

    def start(self, rows: int, capacity: int) -> Text:
        return Text(rows, capacity, self.longest, self.device)

    def observe(self, state: Text, rows_R: Tensor, observation: Observation) -> None:
        state.append(rows_R, observation)

    def expand(self, state: Text, frontier: Frontier) -> Scores:
        """Scores of the copied tokens, one for each depth, each the only child; no guess in rows without a match.
        Raises ValueError if the frontier is not the root alone."""
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError("prompt lookup drafts from the root only: a frontier must have 1 node, "
                             f"got {frontier.nodes_BF.shape[1]}")
        tokens_BL, roots_B = state.tokens_SL[: len(frontier.nodes_BF)], state.roots_S[: len(frontier.nodes_BF)]
        length, roots_B1 = self.longest, roots_B[:, None]
        tail_B1G = state.endings(torch.arange(len(roots_B), device=self.device), roots_B1, length)
        # Places before the text must not equal each other.
        tail_B1G = torch.where(tail_B1G < 0, -2, tail_B1G)
        equal_BLG = tokens_BL.unfold(1, length, 1)[:, 1:] == tail_B1G
        matched_BL = equal_BLG.flip(-1).long().cumprod(-1).sum(-1)
        places_L = torch.arange(length, tokens_BL.shape[1], device=self.device)
        allowed_BL = (matched_BL >= self.shortest) & (places_L < roots_B1)
        # The longest match first, among equals the latest place: its last token is copied from after.
        best = torch.where(allowed_BL, matched_BL * tokens_BL.shape[1] + places_L, -1).max(-1)
        found_B = best.values >= 0
        ends_B = torch.where(found_B, places_L[best.indices], length)
        distance_B1 = (roots_B - ends_B)[:, None].clamp(min=1)
        copied_H = torch.arange(self.copied, device=self.device)
        tokens_BH = tokens_BL.gather(1, ends_B[:, None] + 1 + copied_H % distance_B1)
        scores_BH = torch.where(found_B[:, None], 0.0, -torch.inf).expand_as(tokens_BH)
        candidates_BH = tokens_BH.clamp(min=0)
        return Scores(log_probs_BFHQ=scores_BH[:, None, :, None], candidates_BFHQ=candidates_BH[:, None, :, None])
