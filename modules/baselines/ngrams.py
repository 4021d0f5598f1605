"""N-grams with the target distributions that followed them (ADED arXiv:2407.12021, STAND arXiv:2506.04708).

Shapes: B rows, F frontier nodes, M nodes of a pass, G tokens of a context, P entries of the memory, C candidates of an
entry, W entries averaged, Q = W * C."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config_checks import CheckedSettings, Whole
from ..errors import UserError
from ..interfaces.proposer import Frontier, Observation, Proposer, Remembers, Scores
from ..parts.causal_drafter import Text
from .token_recycling import required


@dataclass(frozen=True, kw_only=True)
class NgramConfig(CheckedSettings):
    """Size of the n-gram memory and of a lookup in it."""

    longest: Whole = 4  # Largest number of tokens of a context that are compared
    candidates: Whole = 4  # Most probable next tokens stored for a context, with their log-probabilities
    averaged: Whole = 4  # Largest number of entries averaged: the latest ones with the longest match
    memory: Whole = 4096  # Contexts stored, of all rows and requests together; the oldest is overwritten

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.averaged > self.memory:
            raise UserError(f"averaged must be at most memory ({self.memory}), got {self.averaged}")


class NgramState(Text):
    """Texts of the rows, and the context of each node of the growing tree."""

    def __init__(self, rows: int, capacity: int, margin: int, device: torch.device) -> None:
        super().__init__(rows, capacity, margin, device)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Discard the nodes of the tree."""
        self.nodes_BM: Tensor | None = None
        self.contexts_BMG: Tensor | None = None


class Ngrams(Proposer[NgramState], Remembers):
    """Drafter that proposes the averaged distribution after the latest earlier contexts with the longest match.

    The memory is shared by all rows and kept across requests, so that several answers to one prompt help each other, as
    in STAND; there every n-gram has one running average and is found by a hash table, here the latest few entries are
    averaged and found by comparing tokens, on the device and for all nodes at once. Only accepted tokens are stored."""

    family = "ngrams"
    reads_logits = True  # True: the distributions come from the logits of accepted nodes

    def __init__(self, config: NgramConfig, vocab_size: int, device: torch.device) -> None:
        self.config, self.device = config, device
        entries, kept = config.memory, min(config.candidates, vocab_size)
        # The last entry is written for nodes that are not stored, and never read.
        self.contexts_PG = torch.full((entries + 1, config.longest), -1, device=device)
        self.ids_PC = torch.zeros(entries + 1, kept, dtype=torch.long, device=device)
        self.log_probs_PC = torch.full((entries + 1, kept), -torch.inf, device=device)
        self.written = torch.zeros((), dtype=torch.long, device=device)

    def start(self, rows: int, capacity: int) -> NgramState:
        """Empty texts."""
        return NgramState(rows, capacity, self.config.longest, self.device)

    def observe(self, state: NgramState, rows_R: Tensor, observation: Observation) -> None:
        """Store the context and the most probable next tokens of every accepted node."""
        held, verified = state, required(observation, self.family)
        held.drop_tree()
        places_RN = held.append(rows_R, observation)
        accepted_BM = verified.places_BM >= 0
        contexts_BMG = held.endings(rows_R, places_RN.gather(1, verified.places_BM.clamp(min=0)), self.config.longest)
        wide = verified.logits_BMV.to(torch.promote_types(verified.logits_BMV.dtype, torch.float32))
        top = wide.topk(self.ids_PC.shape[1], dim=-1)
        log_probs_BMC = top.values - wide.logsumexp(-1, keepdim=True)
        # Entries get the next places of the ring buffer, or the unread one where the node was not accepted. Only the
        # last `memory` entries of one call are stored, so that no place is written twice.
        memory, order_E = self.config.memory, accepted_BM.flatten().long().cumsum(0)
        taken_E = accepted_BM.flatten() & (order_E > order_E[-1] - memory)
        slots_E = torch.where(taken_E, (self.written + order_E - 1) % memory, memory)
        self.written += order_E[-1]
        self.contexts_PG[slots_E] = contexts_BMG.flatten(0, 1)
        self.ids_PC[slots_E] = top.indices.flatten(0, 1)
        self.log_probs_PC[slots_E] = log_probs_BMC.flatten(0, 1).float()

    def expand(self, state: NgramState, frontier: Frontier) -> Scores:
        """Averaged distributions after the context of each node."""
        contexts_BFG = self._contexts(state, frontier)
        # Tokens, counted from the end, that each stored context shares with each node's.
        same_BFP = torch.ones((), dtype=torch.bool, device=self.device)
        matched_BFP = torch.zeros((), dtype=torch.long, device=self.device)
        for back in range(1, self.config.longest + 1):
            node_BF1 = contexts_BFG[..., -back, None]
            same_BFP = same_BFP & (node_BF1 == self.contexts_PG[:-1, -back]) & (node_BF1 >= 0)
            matched_BFP = matched_BFP + same_BFP
        # Of equal matches the youngest come first.
        slots_P = torch.arange(self.config.memory, device=self.device)
        age_P = (self.written - 1 - slots_P) % self.config.memory
        ranks_BFP = (matched_BFP + 1) * self.config.memory - age_P
        chosen_BFW = ranks_BFP.topk(self.config.averaged, dim=-1).indices
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
            contexts_BFG = held.endings(rows_B, held.roots_S[: len(rows_B), None], self.config.longest)
            held.nodes_BM, held.contexts_BMG = frontier.nodes_BF, contexts_BFG
            return contexts_BFG
        above_BF = frontier.parents_among(held.nodes_BM)
        parents_BFG = held.contexts_BMG.gather(1, above_BF[..., None].expand(-1, -1, self.config.longest))
        contexts_BFG = torch.cat([parents_BFG[..., 1:], frontier.tokens_BF[..., None]], dim=-1)
        held.nodes_BM = torch.cat([held.nodes_BM, frontier.nodes_BF], dim=1)
        held.contexts_BMG = torch.cat([held.contexts_BMG, contexts_BFG], dim=1)
        return contexts_BFG

    def forget(self) -> None:
        """Clear the memory."""
        self.contexts_PG.fill_(-1)
        self.written.zero_()
