"""Trees of fixed shape whose nodes are sampled from the drafter's q, which they carry to the verification.

Shapes: B rows, N nodes, F nodes of a level, K children of one node, O nodes the drafter was asked about, Q entries of
the draft vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..interfaces.proposer import DraftState, Proposer, spread
from ..random_streams import Draws
from ..token_tree import Drawn, TokenTree, Topology
from .level_queries import LevelQueries, check_temperature, sample, tempered
from .static_tree import StaticTree, inner_nodes, span_of


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

    samples = True

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

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        if draws is None:
            return super().grow(drafter, state, roots_B)
        topology, device = self.topology, roots_B.device
        tokens_BN = roots_B[:, None].repeat(1, topology.size)
        inner_BN, real_BN = torch.zeros_like(tokens_BN), torch.ones_like(tokens_BN, dtype=torch.bool)
        log_q: list[Tensor] = []
        candidates: list[Tensor] = []
        queries = LevelQueries(drafter, state, least=topology.width)
        for depth, width in enumerate(self._widths):
            inner = inner_nodes(topology, depth, device)
            frontier = inner.frontier(tokens_BN)
            above_BF = inner.above_F.expand_as(frontier.nodes_BF) if depth else None
            log_probs_BOQ, origin_BF = queries.ask(frontier, above_BF)
            log_q_BOQ = tempered(log_probs_BOQ, self.temperature, draws)
            log_q_BFQ = spread(log_q_BOQ, origin_BF)
            drawn_BFK = sample(log_q_BFQ, frontier.nodes_BF, width, draws)
            # A child that could not be drawn, and all below it, is padding.
            possible_BFK = log_q_BFQ.gather(2, drawn_BFK) > -torch.inf
            real_BFK = possible_BFK & real_BN.gather(1, frontier.nodes_BF)[..., None]
            children = span_of(topology, depth, depth + 1, device)
            tokens_BN[:, children.children_C] = children.of(queries.tokens(drawn_BFK)[:, :, None])
            real_BN[:, children.children_C] = children.of(real_BFK[:, :, None])
            # The distribution that the children were drawn from goes to the verification with them.
            inner_BN.scatter_(1, frontier.nodes_BF, origin_BF + sum(part.shape[1] for part in log_q))
            log_q.append(log_q_BOQ)
            candidates += [] if queries.candidates_BOQ is None else [queries.candidates_BOQ]
        planted = topology.plant(tokens_BN)
        if not log_q:
            return planted
        drawn = Drawn(
            log_q_BIQ=torch.cat(log_q, dim=1), inner_BN=inner_BN,
            sampled_BN=draws.sampling_B[:, None].expand_as(real_BN), token_ids_Q=queries.token_ids_Q,
            candidates_BIQ=torch.cat(candidates, dim=1) if candidates else None)
        return replace(planted, real_BN=real_BN, drawn=drawn)
