"""Trees of a fixed shape, the same topology in every pass: of the drafter's likeliest tokens, or sampled from its q,
which they carry to the verification.

Shapes: B rows, N nodes, F nodes of a level that was asked about, O nodes the drafter was asked about, K children of one
node, C nodes read from one answer, H depths answered at once, R ranks used, Q entries of the draft vocabulary."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Proposer, spread
from ..random_streams import Draws
from ..token_tree import Drawn, TokenTree, Topology
from .base import Policy, trimmed
from .level_queries import LevelQueries, check_temperature, sample, tempered


class StaticTree(Policy):
    """One tree for every pass; each node takes its parent's proposal of its rank (arXiv:2401.10774, 2.3.3).

    Where the drafter has no guess, the node and all below it are padding."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.max_size = topology, topology.size
        # Derived now: Python 3.11 derives a cached property under a lock, which no compiled graph can take.
        self._derived = topology.depth, topology.ancestors_NN, topology.most_children

    def check(self, drafter: Proposer) -> None:
        """Refuse a tree deeper than a one-shot family answers."""
        if drafter.reach is not None and self.topology.depth > drafter.reach:
            raise UserError(f"the tree is {self.topology.depth} tokens deep, but this {drafter.family} drafter answers "
                            f"{drafter.reach}; choose a tree of at most that depth")

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        tokens_BN = roots_B[:, None].repeat(1, self.topology.size)
        guessed_BN: Tensor | None = None
        depth = 0
        while depth < self.topology.depth:
            asked = inner_nodes(self.topology, depth, tokens_BN.device).frontier(tokens_BN)
            # A one-shot family answers several depths at once, whatever the path between.
            answered = drafter.expand(state, asked).best(self.topology.width)
            until = min(depth + answered.tokens_BFHR.shape[2], self.topology.depth)
            span = span_of(self.topology, depth, until, tokens_BN.device)
            tokens_BN[:, span.children_C] = span.of(answered.tokens_BFHR)
            if answered.guessed_BFHR is not None:
                guessed_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if guessed_BN is None else guessed_BN
                guessed_BN[:, span.children_C] = span.of(answered.guessed_BFHR)
            depth = until
        tree = self.topology.plant(tokens_BN)
        if guessed_BN is None:
            return tree
        real_BN = ~(tree.ancestors_BNN & ~guessed_BN[:, None]).any(-1)
        return trimmed(replace(tree, real_BN=real_BN))


@dataclass(frozen=True)
class InnerNodes:
    """The nodes of one depth that have children: the same in every pass."""

    nodes_F: Tensor
    parents_F: Tensor
    above_F: Tensor  # Column of the parent among the inner nodes of the depth above; 0 for the root

    def frontier(self, tokens_BN: Tensor) -> Frontier:
        """These nodes in every row."""
        batch = len(tokens_BN)
        return Frontier(nodes_BF=self.nodes_F.expand(batch, -1), parents_BF=self.parents_F.expand(batch, -1),
                        tokens_BF=tokens_BN[:, self.nodes_F])


@dataclass(frozen=True)
class Span:
    """Places of the nodes of some levels in one answer of the drafter: the same in every pass."""

    children_C: Tensor  # The nodes
    columns_C: Tensor  # Column of the node's ancestor in the frontier that was asked about
    levels_C: Tensor  # Number of the depth among those answered
    ranks_C: Tensor  # Rank among the proposals

    def of(self, answers_BFHR: Tensor) -> Tensor:
        """The nodes' entries of an answer, [B, C]."""
        return answers_BFHR[:, self.columns_C, self.levels_C, self.ranks_C]


@lru_cache(maxsize=256)
def span_of(topology: Topology, depth: int, until: int, device: torch.device) -> Span:
    """The nodes more than `depth` and at most `until` deep, when the inner nodes of `depth` were asked about."""
    asked = _inner(topology, depth)
    children = [node for node in range(topology.size) if depth < topology.depths[node] <= until]
    columns = [asked.index(topology.ancestor(node, depth)) for node in children]
    levels = [topology.depths[node] - depth - 1 for node in children]
    ranks = [topology.ranks[node] for node in children]
    return Span(*(torch.tensor(numbers, device=device) for numbers in (children, columns, levels, ranks)))


@lru_cache(maxsize=256)
def inner_nodes(topology: Topology, depth: int, device: torch.device) -> InnerNodes:
    """The inner nodes of a depth, on the device."""
    nodes = _inner(topology, depth)
    parents = [topology.parents[node] for node in nodes]
    above = [_inner(topology, depth - 1).index(parent) for parent in parents] if depth else [0]
    return InnerNodes(*(torch.tensor(numbers, device=device) for numbers in (nodes, parents, above)))


def _inner(topology: Topology, depth: int) -> list[int]:
    """The nodes of a depth that have children."""
    return sorted({parent for parent in topology.parents[1:] if topology.depths[parent] == depth})


class Chain(StaticTree):
    """A fixed number of tokens in a row, each the drafter's likeliest."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a chain needs at least 1 drafted token, got {length}")
        super().__init__(Topology.chain(length))


class SampledTree(StaticTree):
    """A tree of fixed shape whose children are sampled without replacement (RSD-C, arXiv:2402.14160).

    Rank r of the topology is the r-th child drawn: those of siblings must be 0, 1, … in the order of their indices,
    else ValueError. A draft's temperature of None takes each row's own. Without random numbers, when every row is
    greedy, it is the static tree of the likeliest children."""

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
                        for below in range(1, topology.depth + 1)]  # Children of a node, at most, depth by depth

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
        drawn = Drawn(log_q_BIQ=torch.cat(log_q, dim=1), inner_BN=inner_BN,
                      sampled_BN=draws.sampling_B[:, None].expand_as(real_BN), token_ids_Q=queries.token_ids_Q,
                      candidates_BIQ=torch.cat(candidates, dim=1) if candidates else None)
        return replace(planted, real_BN=real_BN, drawn=drawn)
