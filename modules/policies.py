"""How a tree grows: written once, for every family, over `Drafter.expand`. Here the interface and trees of fixed shape.

Trees that follow the drafter's confidence are in `dynamic.py`, chains that stop early in `stopped.py`.

Shapes: B rows, N nodes, F frontier nodes, O nodes the drafter was asked about, H depths answered at once, Q draft
vocabulary, R ranks used.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .acceptance import Accepted
from .drafter import Drafter, DraftState, Frontier, Scores
from .errors import UserError
from .streams import Draws
from .tree import Drawn, TokenTree, Topology


class Policy(ABC):
    """Decides which guesses of a drafter are verified."""

    @property
    @abstractmethod
    def max_size(self) -> int:
        """Most nodes of a tree, the root included: cache slots a pass may need."""

    @abstractmethod
    def grow(self, drafter: Drafter, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        """Build one tree a row below its root. It may look at nothing but what the drafter knows so far.

        Args:
            drafter: asked for scores, level by level.
            state: what it knows about the rows.
            roots_B: the last token of each row.
            draws: random numbers for policies that sample; None when every row is greedy.
        """

    def check(self, drafter: Drafter) -> None:  # noqa: B027
        """Raise UserError when the policy makes no sense with a family; most serve all, recurrent or one-shot."""

    def learn(self, tree: TokenTree, accepted: Accepted) -> None:  # noqa: B027
        """What the target accepted of the last tree, for policies that adapt; nothing by default."""


class Asker:
    """Puts a level of a tree to a drafter; what a one-shot family has answered already is looked up.

    A one-shot family scores a depth whatever the path, so the nodes of a level share the scores of the node that it was
    asked about.
    """

    def __init__(self, drafter: Drafter, state: DraftState) -> None:
        self.drafter, self.state = drafter, state
        self.token_ids_Q: Tensor | None = None
        self._answered: Tensor | None = None
        self._origin_BF = torch.zeros(0)
        self._used = 0

    def ask(self, frontier: Frontier, above_BF: Tensor | None) -> tuple[Tensor, Tensor]:
        """(log-probabilities [B, O, Q], float32 or wider; for each frontier node the one that is its own, [B, F]).

        Args:
            frontier: the nodes of one level.
            above_BF: column of each node's parent in the previous level's frontier; None for the root.
        """
        answered = self._answered
        if answered is None or above_BF is None or self._used == answered.shape[2]:
            scores = self.drafter.expand(self.state, frontier)
            answered = self._answered = scores.log_probs_BFHQ
            self.token_ids_Q, self._used = scores.token_ids_Q, 0
            columns = torch.arange(frontier.nodes_BF.shape[1], device=frontier.nodes_BF.device)
            self._origin_BF = columns.expand_as(frontier.nodes_BF)
        else:
            self._origin_BF = self._origin_BF.gather(1, above_BF)
        self._used += 1
        log_probs_BOQ = answered[:, :, self._used - 1]
        return log_probs_BOQ.to(torch.promote_types(log_probs_BOQ.dtype, torch.float32)), self._origin_BF

    def tokens(self, indices: Tensor) -> Tensor:
        """Target-vocabulary ids of entries of the draft vocabulary."""
        return indices if self.token_ids_Q is None else self.token_ids_Q[indices]


def within_reach(depth: int, drafter: Drafter) -> int:
    """A depth, cut to what a one-shot family can answer."""
    return depth if drafter.reach is None else min(depth, drafter.reach)


def tempered(log_probs_BOQ: Tensor, temperature: float | None, draws: Draws) -> Tensor:
    """log q as it is drawn from, [B, O, Q]: at `temperature`, or each row's own; greedy rows as they are."""
    own_B = draws.temperature_B if temperature is None else torch.full_like(draws.temperature_B, temperature)
    divisor_B = torch.where(draws.hot_B, own_B, 1.0)
    return (log_probs_BOQ / divisor_B[:, None, None]).log_softmax(-1)


def sample(log_q_BFQ: Tensor, nodes_BF: Tensor, width: int, draws: Draws) -> Tensor:
    """Entries of `width` children of each node in the order drawn, [B, F, width].

    Gumbel-top-k draws without replacement (arXiv:1903.06059); greedy rows take the likeliest instead.
    """
    noise_BFQ = draws.gumbels(nodes_BF, log_q_BFQ.shape[-1]) * draws.hot_B[:, None, None]
    return (log_q_BFQ + noise_BFQ).topk(width, dim=-1).indices


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth of a static tree that have children, and what is needed to fill those children in."""

    parents: tuple[int, ...]
    children: tuple[int, ...]
    child_parents: tuple[int, ...]
    child_ranks: tuple[int, ...]


class StaticTree(Policy):
    """The same tree in every pass; each node takes its parent's proposal of its rank (arXiv:2401.10774, 2.3.3)."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._levels = [_level(topology, depth) for depth in range(topology.depth)]

    @property
    def max_size(self) -> int:
        return self.topology.size

    def check(self, drafter: Drafter) -> None:
        """Refuse a tree deeper than a one-shot family answers."""
        if drafter.reach is not None and self.topology.depth > drafter.reach:
            raise UserError(
                f"the tree is {self.topology.depth} tokens deep, but this {drafter.family} drafter answers "
                f"{drafter.reach}; choose a tree of at most that depth"
            )

    def grow(self, drafter: Drafter, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        tokens_BN = roots_B[:, None].repeat(1, self.topology.size)
        # Where each node's scores stand: the column of its ancestor in the frontier that was expanded last.
        columns = [0] * self.topology.size
        answered_BFHR = tokens_BN[:, None, :0, None]
        used = 0
        for level in self._levels:
            if used == answered_BFHR.shape[2]:
                answered_BFHR = self._ask(drafter, state, level, tokens_BN)
                used = 0
                for column, node in enumerate(level.parents):
                    columns[node] = column
            source = [columns[parent] for parent in level.child_parents]
            tokens_BN[:, level.children] = answered_BFHR[:, source, used, list(level.child_ranks)]
            for child, parent in zip(level.children, level.child_parents, strict=True):
                columns[child] = columns[parent]
            used += 1
        return self.topology.plant(tokens_BN)

    def _ask(self, drafter: Drafter, state: DraftState, level: _Level, tokens_BN: Tensor) -> Tensor:
        """Proposals of the level's inner nodes by rank, [B, F, H, R]."""
        return ranked(drafter.expand(state, self._frontier(level, tokens_BN)), self.topology.width)

    def _frontier(self, level: _Level, tokens_BN: Tensor) -> Frontier:
        batch = tokens_BN.shape[0]
        nodes_BF = _row(level.parents, tokens_BN).expand(batch, -1)
        above = [self.topology.parents[node] for node in level.parents]
        parents_BF = _row(above, tokens_BN).expand(batch, -1)
        return Frontier(nodes_BF=nodes_BF, parents_BF=parents_BF, tokens_BF=tokens_BN.gather(1, nodes_BF))


class Chain(StaticTree):
    """A fixed number of tokens in a row, each the drafter's likeliest."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a chain needs at least 1 drafted token, got {length}")
        super().__init__(Topology.chain(length))


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
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.temperature = temperature

    @classmethod
    def branching(cls, *widths: int, temperature: float | None = None) -> "SampledTree":
        """The tree in which every node of depth d has `widths[d]` children."""
        paths: list[tuple[int, ...]] = [()]
        for depth, width in enumerate(widths):
            paths += [(*path, rank) for path in paths if len(path) == depth for rank in range(width)]
        return cls(Topology.from_paths(paths), temperature)

    def grow(self, drafter: Drafter, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        if draws is None:
            return super().grow(drafter, state, roots_B)
        size, batch = self.topology.size, roots_B.shape[0]
        tokens_BN, inner_BN = roots_B[:, None].repeat(1, size), torch.zeros_like(roots_B)[:, None].repeat(1, size)
        real_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        asker, probs, offset = Asker(drafter, state), [], 0
        above: list[int] | None = None
        for depth, level in enumerate(self._levels):
            frontier = self._frontier(level, tokens_BN)
            above_BF = None if above is None else _row(above, tokens_BN).expand(batch, -1)
            log_probs_BOQ, origin_BF = asker.ask(frontier, above_BF)
            log_q_BOQ = tempered(log_probs_BOQ, self.temperature, draws)
            log_q_BFQ = log_q_BOQ.gather(1, origin_BF[..., None].expand(-1, -1, log_q_BOQ.shape[-1]))
            width = max(level.child_ranks) + 1
            drawn_BFK = sample(log_q_BFQ, frontier.nodes_BF, width, draws)
            columns = [level.parents.index(parent) for parent in level.child_parents]
            ranks = list(level.child_ranks)
            tokens_BN[:, level.children] = asker.tokens(drawn_BFK)[:, columns, ranks]
            possible_BFK = log_q_BFQ.gather(2, drawn_BFK) > -torch.inf
            real_BN[:, level.children] = possible_BFK[:, columns, ranks] & real_BN[:, level.child_parents]
            inner_BN[:, level.parents] = origin_BF + offset
            probs.append(log_q_BOQ.exp())
            offset += log_q_BOQ.shape[1]
            if depth + 1 < len(self._levels):
                following = self._levels[depth + 1].parents
                above = [level.parents.index(self.topology.parents[node]) for node in following]
        sampled_BN = draws.hot_B[:, None].expand_as(real_BN)
        return replace(
            self.topology.plant(tokens_BN),
            real_BN=real_BN,
            drawn=Drawn(
                probs_BIQ=torch.cat(probs, dim=1), inner_BN=inner_BN, sampled_BN=sampled_BN,
                token_ids_Q=asker.token_ids_Q,
            ),
        )


def ranked(scores: Scores, width: int) -> Tensor:
    """Target-vocabulary ids of the `width` likeliest children, best first, [B, F, H, width].

    Raises:
        ValueError: if the draft vocabulary is smaller than `width`.
    """
    vocabulary = scores.log_probs_BFHQ.shape[-1]
    if width > vocabulary:
        raise ValueError(f"the tree uses the {width} best proposals of a node, the draft vocabulary has {vocabulary}")
    indices = scores.log_probs_BFHQ.topk(width, dim=-1).indices
    return indices if scores.token_ids_Q is None else scores.token_ids_Q[indices]


def _row(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _level(topology: Topology, depth: int) -> _Level:
    children = tuple(node for node in range(topology.size) if topology.depths[node] == depth + 1)
    child_parents = tuple(topology.parents[node] for node in children)
    return _Level(
        parents=tuple(sorted(set(child_parents))),
        children=children,
        child_parents=child_parents,
        child_ranks=tuple(topology.ranks[node] for node in children),
    )
