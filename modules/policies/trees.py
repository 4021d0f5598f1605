"""Trees of a fixed shape, the same topology in every pass, of the drafter's likeliest tokens or sampled from its q; and
trees that grow where the drafter is confident: EAGLE-2's frontier and rerank, DySpec's greedy expansion, and beams.

Those that grow record more candidates than they keep. What EAGLE-2 keeps depends on the kept tokens' own probabilities,
which is harmless for point masses and biased for samples; DySpec ranks the places where a sample is to be drawn, before
the draw, and so may sample.

Shapes: B rows, N nodes (kept), C nodes read from one answer, or candidates (the root first), F nodes of a level that
was asked about, O nodes the drafter was asked about, K children of one node, H depths answered at once, R ranks used, Q
entries of the draft vocabulary."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from ..interfaces.drafter import FamilyCard
from ..interfaces.proposer import DraftState, Frontier, Proposer, spread
from ..token_tree import Drawn, TokenTree, Topology, remembered
from ..verification.sampling import Draws
from .base import LevelQueries, Policy, check_temperature, sample, tempered, trimmed


class StaticTree(Policy):
    """One tree for every pass; each node takes its parent's proposal of its rank (arXiv:2401.10774, 2.3.3). Where the
    drafter has no guess, the node and all below it are padding."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.max_size = topology, topology.size
        # Derived now: Python 3.11 derives a cached property under a lock, which no compiled graph can take.
        self._derived = topology.depth, topology.ancestors_NN, topology.most_children

    def check(self, drafter: Proposer) -> None:
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
            best_BFHR, known_BFHR = drafter.expand(state, asked).best(self.topology.width)
            until = min(depth + best_BFHR.shape[2], self.topology.depth)
            span = span_of(self.topology, depth, until, tokens_BN.device)
            tokens_BN[:, span.children_C] = span.of(best_BFHR)
            if known_BFHR is not None:
                guessed_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if guessed_BN is None else guessed_BN
                guessed_BN[:, span.children_C] = span.of(known_BFHR)
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


@remembered
def span_of(topology: Topology, depth: int, until: int, device: torch.device) -> Span:
    """The nodes more than `depth` and at most `until` deep, when the inner nodes of `depth` were asked about."""
    asked = _inner(topology, depth)
    children = [node for node in range(topology.size) if depth < topology.depths[node] <= until]
    columns = []
    for above in children:
        while topology.depths[above] > depth:
            above = topology.parents[above]
        columns.append(asked.index(above))
    levels = [topology.depths[node] - depth - 1 for node in children]
    ranks = [topology.ranks[node] for node in children]
    return Span(*(torch.tensor(numbers, device=device) for numbers in (children, columns, levels, ranks)))


@remembered
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
    """A tree of fixed shape whose children are sampled without replacement (RSD-C, arXiv:2402.14160). Rank r of the
    topology is the r-th child drawn: those of siblings must be 0, 1, … in the order of their indices, else ValueError.
    A draft's temperature of None takes each row's own. Without random numbers, when every row is greedy, it is the
    static tree of the likeliest children."""

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


@dataclass
class _Candidates:
    """All candidates so far, level by level."""

    tokens_BC: Tensor
    parents_BC: Tensor
    values_BC: Tensor
    places_BC: Tensor
    inner_BC: Tensor

    def add(self, nodes_BF: Tensor, tokens_BFK: Tensor, values_BFK: Tensor, places_BFK: Tensor) -> None:
        """Append the children of the nodes."""
        parents_BFK = nodes_BF[..., None].expand_as(tokens_BFK)
        more = (tokens_BFK, parents_BFK, values_BFK, places_BFK, torch.zeros_like(parents_BFK))
        for (name, before_BC), new_BFK in zip(list(vars(self).items()), more, strict=True):
            setattr(self, name, torch.cat([before_BC, new_BFK.flatten(1)], dim=1))


class Eagle2Tree(Policy):
    """EAGLE-2's dynamic tree (arXiv:2406.16858, section 4): point masses only. Every level is expanded at its `width`
    likeliest paths, each of which proposes its `width` likeliest tokens; of all candidates the `nodes` - 1 likeliest
    paths are verified. It serves every family, as deep as the family reaches, at most `depth` levels below the root
    (the official code's `depth` + 1). Raises ValueError if a number is too small."""

    card: ClassVar[FamilyCard] = FamilyCard(
        name="EAGLE-2", papers=("2406.16858",), needs_export=False,
        guesses="a tree that grows where the drafter is confident, for any family: `--policy eagle2-32`",
        cost="no training; more drafting than a static tree of the same size")

    temperature: float | None = None  # Of sampled drafts, see `DySpecTree`

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
            # Above 0 no score is a log-probability; such a child would outrank its parent and lose it in the rerank.
            log_q_BOQ = (log_q_BOQ.clamp(max=0) if draws is None or not self.samples else
                         tempered(log_q_BOQ, self.temperature, draws))
            found.inner_BC = found.inner_BC.scatter(1, nodes_BF, origin_BF + sum(part.shape[1] for part in log_q))
            log_q.append(log_q_BOQ)
            candidates += [] if queries.candidates_BOQ is None else [queries.candidates_BOQ]
            values_BF = found.values_BC.gather(1, nodes_BF)
            entries_BFK, values_BFK, places_BFK = self._children(log_q_BOQ, origin_BF, nodes_BF, values_BF, draws)
            offset = found.tokens_BC.shape[1]
            found.add(nodes_BF, queries.tokens(entries_BFK), values_BFK, places_BFK)
            if level + 1 < depth:
                # Of equal values the earlier one comes first.
                order_BC = values_BFK.flatten(1).sort(descending=True, stable=True).indices
                order_BF = order_BC[:, : self.width]
                nodes_BF, above_BF = order_BF + offset, order_BF // values_BFK.shape[2]
        drawn = None
        if self.samples and draws is not None:
            sampled_BN = draws.sampling_B[:, None].expand(-1, self.nodes)
            # The rerank puts the kept nodes' own indices into q here.
            drawn = Drawn(log_q_BIQ=torch.cat(log_q, dim=1), inner_BN=sampled_BN.long(), sampled_BN=sampled_BN,
                          token_ids_Q=queries.token_ids_Q,
                          candidates_BIQ=torch.cat(candidates, dim=1) if candidates else None)
        return self._rerank(found, depth, drawn)

    def _children(self, log_q_BOQ: Tensor, origin_BF: Tensor, nodes_BF: Tensor, values_BF: Tensor,
                  draws: Draws | None) -> tuple[Tensor, Tensor, Tensor]:
        """(entries of the draft vocabulary, log of the estimated probability that the target accepts the path down to
        the child, order of the rerank, never above the parent's value nor an earlier sibling's place) of the children
        of each node in the order of their ranks, [B, F, K] each."""
        best = log_q_BOQ.topk(min(self.width, log_q_BOQ.shape[-1]), dim=-1)
        index_BFK = origin_BF[..., None].expand(-1, -1, best.values.shape[-1])
        values_BFK = values_BF[..., None] + best.values.gather(1, index_BFK)
        return best.indices.gather(1, index_BFK), values_BFK, values_BFK

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
    valid for recursive rejection. When every row is greedy the candidates are point masses and this is `Eagle2Tree`. A
    draft's temperature of None takes each row's own; the paper's is 0.6."""

    samples = True

    def __init__(self, nodes: int = 60, depth: int = 6, width: int = 10, temperature: float | None = None) -> None:
        super().__init__(nodes, depth, width)
        check_temperature(temperature)
        self.temperature = temperature

    def _children(self, log_q_BOQ: Tensor, origin_BF: Tensor, nodes_BF: Tensor, values_BF: Tensor,
                  draws: Draws | None) -> tuple[Tensor, Tensor, Tensor]:
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
        return entries_BFK, values_BFK, places_BFK


class BeamTree(Policy):
    """The `width` best sequences of each level by stochastic beam search (RSD-S, arXiv:2402.14160, algorithm 5), all of
    them verified.

    A path has its log-probability and a value, the Gumbel noise of all that it leads to. The values of its children are
    their noisy log-probabilities, shifted so that the largest equals the path's own (arXiv:1903.06059, section 4.1). Of
    all children of a level the largest values stay, siblings in descending order: given the values, the token of the
    next one is distributed as q without those before it, so that the samples are valid for recursive rejection. Greedy
    rows keep their likeliest paths. Raises ValueError if a number is too small."""

    samples = True

    def __init__(self, width: int, depth: int) -> None:
        if min(width, depth) < 1:
            raise ValueError(f"width and depth must be at least 1, got {width} and {depth}")
        self.width, self.depth = width, depth
        self.max_size = 1 + width * depth

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        queries, depth = LevelQueries(drafter, state), min(self.depth, drafter.reach or self.depth)
        log_q, candidates, inner = list[Tensor](), list[Tensor](), list[Tensor]()
        tokens_BF, nodes_BF = roots_B[:, None], torch.zeros_like(roots_B)[:, None]
        parents_BF, above_BF = nodes_BF - 1, None
        paths_BF = values_BF = nodes_BF.double()
        levels = [(tokens_BF, parents_BF, values_BF)]
        for _ in range(depth):
            log_q_BOQ, origin_BF = queries.ask(Frontier(nodes_BF=nodes_BF, parents_BF=parents_BF, tokens_BF=tokens_BF),
                                               above_BF)
            log_q_BOQ = log_q_BOQ.clamp(max=0) if draws is None else tempered(log_q_BOQ, None, draws)
            inner.append(origin_BF + sum(part.shape[1] for part in log_q))
            log_q.append(log_q_BOQ)
            candidates += [] if queries.candidates_BOQ is None else [queries.candidates_BOQ]
            entries_BFK, paths_BFK, values_BFK = self._children(spread(log_q_BOQ, origin_BF), nodes_BF, paths_BF,
                                                                values_BF, draws)
            # Equal values stay in the order of the noise.
            order_BC = values_BFK.flatten(1).sort(descending=True, stable=True).indices[:, : self.width]
            above_BF = order_BC // values_BFK.shape[2]
            parents_BF = nodes_BF.gather(1, above_BF)
            tokens_BF, paths_BF, values_BF = (of_BFK.flatten(1).gather(1, order_BC) for of_BFK in (
                queries.tokens(entries_BFK), paths_BFK, values_BFK))
            first = sum(tokens.shape[1] for tokens, *_ in levels)
            nodes_BF = torch.arange(first, first + tokens_BF.shape[1], device=roots_B.device).expand_as(tokens_BF)
            levels.append((tokens_BF, parents_BF, values_BF))
        tokens_BN, parents_BN, values_BN = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        drawn = None
        if draws is not None:
            # Nodes of the last level have no children.
            inner_BN = pad(torch.cat(inner, dim=1), (0, tokens_BF.shape[1]))
            drawn = Drawn(log_q_BIQ=torch.cat(log_q, dim=1), inner_BN=inner_BN,
                          sampled_BN=draws.sampling_B[:, None].expand_as(tokens_BN), token_ids_Q=queries.token_ids_Q,
                          candidates_BIQ=torch.cat(candidates, dim=1) if candidates else None)
        return TokenTree.grown(tokens_BN, parents_BN, values_BN > -torch.inf, max_depth=depth,
                               most_children=self.width, drawn=drawn)

    def _children(self, log_q_BFQ: Tensor, nodes_BF: Tensor, paths_BF: Tensor, values_BF: Tensor,
                  draws: Draws | None) -> tuple[Tensor, Tensor, Tensor]:
        """(entries, log-probabilities of the paths, values) of each node's children of the greatest noise, [B, F, K]
        each, float64."""
        noisy_BFQ = log_q_BFQ.double()
        if draws is not None:
            noisy_BFQ = noisy_BFQ + draws.gumbels(nodes_BF, log_q_BFQ.shape[-1]) * draws.sampling_B[:, None, None]
        best = noisy_BFQ.topk(min(self.width, log_q_BFQ.shape[-1]), dim=-1)
        paths_BFK = paths_BF[..., None] + log_q_BFQ.gather(2, best.indices)
        noisy_BFK, above_BF1 = paths_BF[..., None] + best.values, values_BF[..., None]
        shift_BFK = above_BF1 - noisy_BFK + torch.log1p(-(noisy_BFK - noisy_BFK[..., :1]).exp())
        values_BFK = above_BF1 - shift_BFK.clamp(min=0) - torch.log1p((-shift_BFK.abs()).exp())
        sampling = torch.zeros_like(paths_BFK, dtype=torch.bool) if draws is None else draws.sampling_B[:, None, None]
        values_BFK = torch.where(sampling, values_BFK, paths_BFK)
        return best.indices, paths_BFK, values_BFK.masked_fill(paths_BFK == -torch.inf, -torch.inf)
