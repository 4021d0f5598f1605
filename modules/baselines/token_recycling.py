"""Token Recycling: drafts from a matrix of earlier most probable next tokens (arXiv:2408.08696).

Shapes: V target vocabulary, C candidates of a token, B rows, F frontier nodes, M nodes of a pass, E all nodes of all
rows."""

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Observation, Proposer, Remembers, Scores, Verified
from ..policies.lookahead_trees import likeliest_paths
from ..token_tree import Topology

RANK_PROBABILITIES = (0.45, 0.13, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
"""Assumed probability that the candidate of each rank is the next token: it shapes the tree and orders mixed drafts."""


class TokenRecycling(Proposer[DraftState], Remembers):
    """Drafter with a matrix of the latest `candidates` most probable next tokens of every token, shared by all rows, on
    a device: `vocab_size * candidates * 8` bytes.

    Every verified node rewrites the line of its token, the rejected nodes too; of two nodes with the same token the
    later one is kept. As in the paper the matrix is kept across requests; unlike there, a token that was never verified
    has no guess instead of token 0, and of a prompt only the last token is used, since the logits of the others are not
    computed."""

    family = "recycling"
    reads_logits = True  # True: the matrix is filled from logits

    def __init__(self, vocab_size: int, device: torch.device, candidates: int = len(RANK_PROBABILITIES)) -> None:
        if not 1 <= candidates <= len(RANK_PROBABILITIES):
            raise UserError(f"candidates must be between 1 and {len(RANK_PROBABILITIES)}, got {candidates}")
        # The last line is written for padding, and never read.
        self.successors_VC = torch.full((vocab_size + 1, min(candidates, vocab_size)), -1, device=device)
        self.log_probs_C = torch.tensor(RANK_PROBABILITIES[: self.successors_VC.shape[1]], device=device).log()

    def start(self, rows: int, capacity: int) -> DraftState:
        """An empty state: nothing belongs to a row."""
        return DraftState()

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Rewrite the lines of all verified tokens."""
        verified = required(observation, self.family)
        unused = self.successors_VC.shape[0] - 1
        tokens_E = torch.where(verified.real_BM, verified.tokens_BM, unused).flatten()
        order_E = torch.arange(len(tokens_E), device=tokens_E.device)
        # Which of two equal indices is written last is undefined on an accelerator.
        repeated_E = ((tokens_E[:, None] == tokens_E) & (order_E > order_E[:, None])).any(-1)
        lines_EC = verified.logits_BMV.topk(self.successors_VC.shape[1], dim=-1).indices.flatten(0, 1)
        self.successors_VC[torch.where(repeated_E, unused, tokens_E)] = lines_EC

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """The stored next tokens of each node's token, by rank."""
        candidates_BFHC = self.successors_VC[frontier.tokens_BF][:, :, None]
        scores_BFHC = torch.where(candidates_BFHC >= 0, self.log_probs_C, -torch.inf)
        return Scores(log_probs_BFHQ=scores_BFHC, candidates_BFHQ=candidates_BFHC.clamp(min=0))

    def forget(self) -> None:
        """Clear the memory."""
        self.successors_VC.fill_(-1)


def recycling_tree(size: int, depth: int = 6) -> Topology:
    """Best tree of `size` nodes if a candidate's probability depends on its rank alone, in best-first order.

    The paper's template has 80 nodes below the root and depth 6, found by hand for an A100. Raises ValueError if `size`
    is below 1."""
    if size < 1:
        raise ValueError(f"a tree needs at least its root, got size {size}")
    return Topology.from_paths(path for _, path in likeliest_paths([RANK_PROBABILITIES] * depth, depth, size))


def required(observation: Observation, family: str) -> Verified:
    """The verified nodes of an observation, with their logits. Raises ValueError if it carries none."""
    if observation.verified is None:
        raise ValueError(f"{family} learns from logits, but the observation carries none; set `verified`")
    return observation.verified
