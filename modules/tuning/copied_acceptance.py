"""Acceptance of a copied chain next to a draft's static tree, counted along held-out answers without decoding them.

Both parts are point masses, so a pass accepts the longest path of either that the text goes on with, and the next pass
starts after it: all of this follows from what the drafter and prompt lookup propose at each place of the text.

Shapes: P places where a draft starts, K draft steps, R proposals of a step, C tokens copied.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..baselines.prompt_lookup import PromptLookup, PromptLookupConfig
from ..interfaces.proposer import Frontier, Observation
from ..token_tree import Topology
from .held_out_ranks import ProposedText
from .rank_walk import pass_starts
from .sampled_lengths import FEWEST_ANSWERS, relative_errors


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Means over the passes of a walk."""

    accepted_length: float
    """Tokens emitted, the bonus included."""
    nodes: float
    """Nodes verified, the root included."""
    error: float
    """Relative standard error of the tokens, as of `relative_errors`; 0 of fewer than two answers."""
    degrees: float
    """Its degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class CopiedText:
    """Proposals of a drafter and of prompt lookup at the places of held-out answers, in the order of the text."""

    proposals_PKR: Tensor
    """Tokens that the drafter proposes for each step, best first, int64; -1 after the end of an answer."""
    copies_PC: Tensor
    """Tokens that prompt lookup copies, int64; -1 where it finds nothing."""
    following_PF: Tensor
    """The text's own tokens after the root, as many as the longest draft, int64; -2 after the end of the row."""
    left_P: Tensor
    """Tokens of the answer after the root, int64; 0 where no pass starts."""
    rows_P: Tensor
    """Row of each place, int64."""

    def count(self, topology: Topology, copied: int, extra: int) -> Counted:
        """The passes of a static tree next to a copied chain; of one that follows the other where both guess alike.

        Off the text's own path an autoregressive drafter is taken to propose what it proposes on it, which decides
        only how many guesses of the tree the copy repeats there.

        Args:
            topology: the draft's tree, best nodes first.
            copied: most tokens of the chain, at most C; 0 for the tree alone.
            extra: nodes that a pass may have beyond those of the tree.
        """
        _, steps, ranks = self.proposals_PKR.shape
        found_P = self.copies_PC[:, 0] >= 0 if copied else torch.zeros_like(self.left_P, dtype=torch.bool)
        # A copy counts up to its first wrong token, and only where something was found.
        own_PC = self.copies_PC[:, :copied] == self.following_PF[:, :copied]
        depths_P = own_PC.long().cumprod(-1).sum(-1) * found_P
        room_P = torch.where(found_P, topology.size - 1 + extra - copied, topology.size - 1)
        kept_P = torch.zeros_like(self.left_P)
        true, repeated = [torch.ones_like(found_P)], [found_P]
        for parent, rank, depth in list(zip(topology.parents, topology.ranks, topology.depths, strict=True))[1:]:
            # -1 where the drafter has no such proposal.
            token_P = (self.proposals_PKR[:, depth - 1, rank] if depth <= steps and rank < ranks
                       else torch.full_like(self.left_P, -1))
            true.append(true[parent] & (token_P == self.following_PF[:, depth - 1]))
            copy_P = self.copies_PC[:, depth - 1] if depth <= copied else torch.full_like(token_P, -3)
            repeated.append(repeated[parent] & (token_P == copy_P))
            # A node that repeats the copy is verified once, and takes no room.
            new_P = ~repeated[-1] & (kept_P < room_P)
            kept_P = kept_P + new_P
            depths_P = torch.where(true[-1] & new_P, depths_P.clamp(min=depth), depths_P)
        starts_S = pass_starts(self.left_P, depths_P)
        if not len(starts_S):
            return Counted(accepted_length=1.0, nodes=1.0, error=0.0, degrees=1.0)
        emitted_S = torch.minimum(depths_P + 1, self.left_P)[starts_S]
        nodes_S = (1 + kept_P + copied * found_P)[starts_S]
        sums_A2 = torch.zeros(int(self.rows_P.max()) + 1, 2, dtype=torch.float64)
        sums_A2.index_add_(0, self.rows_P[starts_S], torch.stack([emitted_S, torch.ones_like(emitted_S)], 1).double())
        sums_A2 = sums_A2[sums_A2[:, 1] > 0]
        error, degrees = (map(float, relative_errors(sums_A2[:, :1], sums_A2[:, 1:]))
                          if len(sums_A2) >= FEWEST_ANSWERS else (0.0, 1.0))
        return Counted(accepted_length=float(emitted_S.double().mean()), nodes=float(nodes_S.double().mean()),
                       error=error, degrees=degrees)


def copied_text(text: ProposedText, copied: int) -> CopiedText:
    """Proposals of a drafter and copies of prompt lookup along held-out answers.

    Args:
        text: of `proposed_text`, with one conversation in each row.
        copied: most tokens of a copy.
    """
    longest = max(copied, text.proposals_PKR.shape[1])
    copies_PC = torch.full((len(text.left_P), copied), -1)
    following_PF = torch.full((len(text.left_P), longest), -2)
    lookup = PromptLookup(PromptLookupConfig(copied=copied), torch.device("cpu"))
    for number, tokens in enumerate(text.texts):
        places = (text.rows_P == number).nonzero()[:, 0]
        padded_L = torch.cat([tokens, torch.full((longest + 1,), -2)])
        following_PF[places] = padded_L.unfold(0, longest, 1)[text.roots_P[places] + 1]
        copies_PC[places] = _copies(lookup, tokens, text.roots_P[places])
    return CopiedText(proposals_PKR=text.proposals_PKR, copies_PC=copies_PC, following_PF=following_PF,
                      left_P=text.left_P, rows_P=text.rows_P)


def _copies(lookup: PromptLookup, tokens_L: Tensor, roots_N: Tensor) -> Tensor:
    """The tokens that prompt lookup copies at each root of a row, [N, C]; -1 where it finds nothing."""
    # One row for each root: the tokens after it are in its row, but not in its text.
    tokens_NL, order_N = tokens_L.expand(len(roots_N), -1), torch.arange(len(roots_N))
    state, root_N1 = lookup.start(len(roots_N), len(tokens_L)), torch.zeros_like(roots_N)[:, None]
    lookup.observe(state, order_N, Observation(tokens_BN=tokens_NL, counts_B=roots_N, final_BND=tokens_NL, taps={},
                                               roots_B=tokens_L[roots_N]))
    scores = lookup.expand(state, Frontier(nodes_BF=root_N1, parents_BF=root_N1 - 1, tokens_BF=root_N1))
    assert scores.candidates_BFHQ is not None
    return torch.where(scores.log_probs_BFHQ[:, 0, :, 0] > -torch.inf, scores.candidates_BFHQ[:, 0, :, 0], -1)
