"""Trees of fixed shape whose nodes are sampled from the drafter's q, which they carry to the verification.

Shapes: B rows, N nodes, F nodes of a level, K children of one node, O nodes the drafter was asked about, Q entries of
the draft vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..interfaces.proposer import DraftState, Frontier, Proposer, spread
from ..random_streams import Draws
from ..token_tree import Drawn, TokenTree, Topology
from .level_queries import LevelQueries, check_temperature, sample, tempered
from .static_tree import Span, StaticTree, inner_nodes, span_of


class SampledTree(StaticTree):
    """A tree of fixed shape whose children are sampled without replacement (RSD-C, arXiv:2402.14160).

    Rank r of the topology is the r-th child drawn. Without random numbers, when every row is greedy, it is the static
    tree of the likeliest children.

    Args:
        topology: its shape; the ranks of siblings must be 0, 1, … in the order of their indices.
        temperature: the draft's; None takes each row's own.

    Raises:
        ValueError: if ranks are missing or out of order, or the temperature is not above 0.
    """

    def __init__(self, topology: Topology, temperature: float | None = None) -> None:
        super().__init__(topology)
        for node in range(topology.size):
            ranks = [rank for parent, rank in zip(topology.parents, topology.ranks, strict=True) if parent == node]
            if ranks != list(range(len(ranks))):
                raise ValueError(f"the children of node {node} must have the ranks 0, 1, … in order, got {ranks}")
        check_temperature(temperature)
        self.temperature = temperature
        places = list(zip(topology.depths, topology.ranks, strict=True))
        self._widths = [1 + max(rank for depth, rank in places if depth == below)
                        for below in range(1, topology.depth + 1)]
        """Children of a node, at most, depth by depth."""

    @property
    def samples(self) -> bool:
        return True

    @classmethod
    def branching(cls, *widths: int, temperature: float | None = None) -> "SampledTree":
        """The tree in which every node of depth d has `widths[d]` children."""
        paths: list[tuple[int, ...]] = [()]
        for depth, width in enumerate(widths):
            paths += [(*path, rank) for path in paths if len(path) == depth for rank in range(width)]
        return cls(Topology.from_paths(paths), temperature)

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        if draws is None:
            return super().grow(drafter, state, roots_B)
        growing = _Growing(self.topology, roots_B)
        queries = LevelQueries(drafter, state, least=self.topology.width)
        for depth, width in enumerate(self._widths):
            inner = inner_nodes(self.topology, depth, roots_B.device)
            frontier = inner.frontier(growing.tokens_BN)
            above_BF = inner.above_F.expand_as(frontier.nodes_BF) if depth else None
            log_probs_BOQ, origin_BF = queries.ask(frontier, above_BF)
            log_q_BOQ = tempered(log_probs_BOQ, self.temperature, draws)
            log_q_BFQ = spread(log_q_BOQ, origin_BF)
            drawn_BFK = sample(log_q_BFQ, frontier.nodes_BF, width, draws)
            children = span_of(self.topology, depth, depth + 1, roots_B.device)
            growing.fill(frontier, children, queries.tokens(drawn_BFK), log_q_BFQ.gather(2, drawn_BFK) > -torch.inf)
            growing.carry(frontier, log_q_BOQ, origin_BF, queries.candidates_BOQ)
        return growing.tree(queries, draws)


class _Growing:
    """A tree of known shape that is filled in level by level."""

    def __init__(self, topology: Topology, roots_B: Tensor) -> None:
        self.topology = topology
        self.tokens_BN = roots_B[:, None].repeat(1, topology.size)
        self.inner_BN = torch.zeros_like(self.tokens_BN)
        self.real_BN = torch.ones_like(self.tokens_BN, dtype=torch.bool)
        self.log_q: list[Tensor] = []
        self.candidates: list[Tensor] = []

    def fill(self, frontier: Frontier, children: Span, tokens_BFK: Tensor, possible_BFK: Tensor) -> None:
        """Set the children of the frontier; one that could not be drawn, and all below it, is padding."""
        real_BFK = possible_BFK & self.real_BN.gather(1, frontier.nodes_BF)[..., None]
        self.tokens_BN[:, children.children_C] = children.of(tokens_BFK[:, :, None])
        self.real_BN[:, children.children_C] = children.of(real_BFK[:, :, None])

    def carry(
        self, frontier: Frontier, log_q_BOQ: Tensor, origin_BF: Tensor, candidates_BOQ: Tensor | None
    ) -> None:
        """Remember what the children of the frontier were drawn from."""
        self.inner_BN.scatter_(1, frontier.nodes_BF, origin_BF + sum(part.shape[1] for part in self.log_q))
        self.log_q.append(log_q_BOQ)
        if candidates_BOQ is not None:
            self.candidates.append(candidates_BOQ)

    def tree(self, queries: LevelQueries, draws: Draws) -> TokenTree:
        """The finished tree."""
        planted = self.topology.plant(self.tokens_BN)
        if not self.log_q:
            return planted
        drawn = Drawn(
            log_q_BIQ=torch.cat(self.log_q, dim=1),
            inner_BN=self.inner_BN,
            sampled_BN=draws.sampling_B[:, None].expand_as(self.real_BN),
            token_ids_Q=queries.token_ids_Q,
            candidates_BIQ=torch.cat(self.candidates, dim=1) if self.candidates else None,
        )
        return replace(planted, real_BN=self.real_BN, drawn=drawn)
