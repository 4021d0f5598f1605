"""Trees that grow where the drafter is confident: EAGLE-2's frontier and rerank, and DySpec's greedy expansion.

Both record more candidates than they keep. What EAGLE-2 keeps depends on the kept tokens' own probabilities, which is
harmless for point masses and biased for samples; DySpec ranks the places where a sample is to be drawn, before the
draw, and so may sample.

Shapes: B rows, N nodes kept, C candidates (the root first), F frontier nodes, K children of one node, O nodes the
drafter was asked about, Q draft vocabulary."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..interfaces.drafter import FamilyCard
from ..interfaces.proposer import DraftState, Frontier, Proposer, spread
from ..random_streams import Draws
from ..token_tree import Drawn, TokenTree
from .base import Policy
from .level_queries import LevelQueries, check_temperature, sample, tempered


@dataclass(frozen=True, kw_only=True)
class _Children:
    """The candidates below one frontier, children of a node in the order of their ranks."""

    entries_BFK: Tensor  # Entries of the draft vocabulary
    values_BFK: Tensor  # log of the estimated probability that the target accepts the path down to the child
    places_BFK: Tensor  # Order of the rerank, never above the parent's value nor above an earlier sibling's place


@dataclass
class _Candidates:
    """All candidates so far, level by level."""

    tokens_BC: Tensor
    parents_BC: Tensor
    values_BC: Tensor
    places_BC: Tensor
    inner_BC: Tensor

    def add(self, nodes_BF: Tensor, tokens_BFK: Tensor, children: _Children) -> None:
        """Append the children of the nodes."""
        parents_BFK = nodes_BF[..., None].expand_as(tokens_BFK)
        self.tokens_BC = torch.cat([self.tokens_BC, tokens_BFK.flatten(1)], dim=1)
        self.parents_BC = torch.cat([self.parents_BC, parents_BFK.flatten(1)], dim=1)
        self.values_BC = torch.cat([self.values_BC, children.values_BFK.flatten(1)], dim=1)
        self.places_BC = torch.cat([self.places_BC, children.places_BFK.flatten(1)], dim=1)
        self.inner_BC = torch.cat([self.inner_BC, torch.zeros_like(parents_BFK.flatten(1))], dim=1)


class Eagle2Tree(Policy):
    """EAGLE-2's dynamic tree (arXiv:2406.16858, section 4): point masses only.

    Every level is expanded at its `width` likeliest paths, each of which proposes its `width` likeliest tokens; of all
    candidates the `nodes` - 1 likeliest paths are verified. It serves every family, as deep as the family reaches.

    Args:
        nodes: nodes of the tree, the root included.
        depth: levels below the root (the official code's `depth` + 1).
        width: nodes expanded on a level and children recorded for each.

    Raises:
        ValueError: if a number is too small.
    """

    card: ClassVar[FamilyCard] = FamilyCard(
        name="EAGLE-2", papers=("2406.16858",), needs_export=False,
        guesses="a tree that grows where the drafter is confident, for any family: `--policy eagle2-32`",
        cost="no training; more drafting than a static tree of the same size")

    def __init__(self, nodes: int = 60, depth: int = 6, width: int = 10) -> None:
        for name, value, bound in (("nodes", nodes, 2), ("depth", depth, 1), ("width", width, 1)):
            if value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}")
        self.nodes, self.depth, self.width = nodes, depth, width
        self.max_size = nodes

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        queries, depth = LevelQueries(drafter, state), min(self.depth, drafter.reach or self.depth)
        zero_B1 = torch.zeros_like(roots_B)[:, None]
        value_B1 = zero_B1.float()
        # The root is kept whatever comes: no candidate has a better place.
        found = _Candidates(roots_B[:, None], zero_B1 - 1, value_B1, value_B1 + torch.inf, zero_B1)
        log_q: list[Tensor] = []
        candidates: list[Tensor] = []
        nodes_BF, above_BF, offset = zero_B1, None, 0
        for level in range(depth):
            frontier = Frontier(nodes_BF=nodes_BF, parents_BF=found.parents_BC.gather(1, nodes_BF),
                                tokens_BF=found.tokens_BC.gather(1, nodes_BF))
            log_q_BOQ, origin_BF = queries.ask(frontier, above_BF)
            log_q_BOQ = self._tempered(log_q_BOQ, draws)
            found.inner_BC = found.inner_BC.scatter(1, nodes_BF, origin_BF + sum(part.shape[1] for part in log_q))
            log_q.append(log_q_BOQ)
            candidates += [] if queries.candidates_BOQ is None else [queries.candidates_BOQ]
            values_BF = found.values_BC.gather(1, nodes_BF)
            children = self._children(log_q_BOQ, origin_BF, nodes_BF, values_BF, draws)
            offset = found.tokens_BC.shape[1]
            found.add(nodes_BF, queries.tokens(children.entries_BFK), children)
            if level + 1 < depth:
                # Of equal values the earlier one comes first.
                order_BC = children.values_BFK.flatten(1).sort(descending=True, stable=True).indices
                order_BF = order_BC[:, : self.width]
                nodes_BF, above_BF = order_BF + offset, order_BF // children.values_BFK.shape[2]
        drawn = None
        if self.samples and draws is not None:
            sampled_BN = draws.sampling_B[:, None].expand(-1, self.nodes)
            # The rerank puts the kept nodes' own indices into q here.
            drawn = Drawn(log_q_BIQ=torch.cat(log_q, dim=1), inner_BN=sampled_BN.long(), sampled_BN=sampled_BN,
                          token_ids_Q=queries.token_ids_Q,
                          candidates_BIQ=torch.cat(candidates, dim=1) if candidates else None)
        return self._rerank(found, depth, drawn)

    def _tempered(self, log_probs_BOQ: Tensor, draws: Draws | None) -> Tensor:
        # Above 0 no score is a log-probability; such a child would outrank its parent and lose it in the rerank.
        return log_probs_BOQ.clamp(max=0)

    def _children(self, log_q_BOQ: Tensor, origin_BF: Tensor, nodes_BF: Tensor, values_BF: Tensor,
                  draws: Draws | None) -> _Children:
        best = log_q_BOQ.topk(min(self.width, log_q_BOQ.shape[-1]), dim=-1)
        index_BFK = origin_BF[..., None].expand(-1, -1, best.values.shape[-1])
        values_BFK = values_BF[..., None] + best.values.gather(1, index_BFK)
        return _Children(entries_BFK=best.indices.gather(1, index_BFK), values_BFK=values_BFK, places_BFK=values_BFK)

    def _rerank(self, found: _Candidates, depth: int, drawn: Drawn | None) -> TokenTree:
        """Keep the best places, in the order in which they were found: parents come first and are never missing."""
        order_BC = found.places_BC.sort(descending=True, stable=True).indices
        kept_BN = order_BC[:, : self.nodes].sort(-1).values
        parents_BN = torch.searchsorted(kept_BN, found.parents_BC.gather(1, kept_BN))
        parents_BN[:, 0] = -1
        places_BN = found.places_BC.gather(1, kept_BN)
        if drawn is not None:
            drawn = replace(drawn, inner_BN=found.inner_BC.gather(1, kept_BN),
                            sampled_BN=drawn.sampled_BN[:, : kept_BN.shape[1]])
        return TokenTree.grown(found.tokens_BC.gather(1, kept_BN), parents_BN, places_BN > -torch.inf, max_depth=depth,
                               most_children=min(self.width, self.nodes - 1), drawn=drawn)


class DySpecTree(Eagle2Tree):
    """DySpec's greedy expansion by estimated acceptance (arXiv:2410.11744), level by level.

    A place is the r-th draw below a node. Its value is v(node) times the chance that the r draws before it are
    rejected, prod (1 - R(y)), where R is q without them, renormalised, and stands for the acceptance probability; the
    child's value is that times R(y). The `nodes` - 1 best places are what a heap that always expands the largest value
    would fill, among the `width` paths a level that are expanded here; so the drafter is asked once a level, not once
    a node. A draw is kept or not by its place's value, which does not depend on its own token: the samples stay
    valid for recursive rejection. When every row is greedy the candidates are point masses and this is `Eagle2Tree`.

    Args:
        nodes: nodes of the tree, the root included.
        depth: levels below the root.
        width: nodes expanded on a level and children drawn for each.
        temperature: the draft's (the paper's is 0.6); None takes each row's own.

    Raises:
        ValueError: if a number is too small.
    """

    samples = True

    def __init__(self, nodes: int = 60, depth: int = 6, width: int = 10, temperature: float | None = None) -> None:
        super().__init__(nodes, depth, width)
        check_temperature(temperature)
        self.temperature = temperature

    def _tempered(self, log_probs_BOQ: Tensor, draws: Draws | None) -> Tensor:
        if draws is None:
            return super()._tempered(log_probs_BOQ, draws)
        return tempered(log_probs_BOQ, self.temperature, draws)

    def _children(self, log_q_BOQ: Tensor, origin_BF: Tensor, nodes_BF: Tensor, values_BF: Tensor,
                  draws: Draws | None) -> _Children:
        if draws is None:
            return super()._children(log_q_BOQ, origin_BF, nodes_BF, values_BF, draws)
        log_q_BFQ = spread(log_q_BOQ, origin_BF)
        entries_BFK = sample(log_q_BFQ, nodes_BF, min(self.width, log_q_BFQ.shape[-1]), draws)
        log_q_BFK = log_q_BFQ.gather(2, entries_BFK)
        q_BFK = log_q_BFK.double().exp()
        # log prod (1 - R) telescopes: what is left of q before each draw. The draw's own q must have no part in it, not
        # even by rounding: that would rank a sample by its own probability.
        left_BFK = (1 - pad(q_BFK.cumsum(-1)[..., :-1], (1, 0))).clamp(min=0).log()
        places_BFK = (values_BF[..., None] + left_BFK).to(values_BF.dtype)
        places_BFK = torch.where(log_q_BFK > -torch.inf, places_BFK, -torch.inf)
        values_BFK = torch.minimum(values_BF[..., None] + log_q_BFK, places_BFK)
        return _Children(entries_BFK=entries_BFK, values_BFK=values_BFK, places_BFK=places_BFK)
