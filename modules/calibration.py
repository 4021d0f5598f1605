"""How good a drafter is on held-out text: ranks of the true tokens, the best static tree, the decoded accepted length.

Shapes: B rows, L positions, K draft steps, P places where a draft starts, Q draft vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor
from torch.nn import functional

from .decode import decode
from .drafter import Drafter
from .features import Features
from .policies import StaticTree
from .replay import Replay
from .requests import DecodeResult, DecodeSettings
from .target import Target
from .tree import Topology

MAX_RANK = 10
"""Proposals of one node that a tree may use."""
_SHRINKAGE = 20.0
"""Observations that the independent estimate of a path is worth beside the counted ones."""
UNROLLED = 8
"""Depths of a tree that is fitted to a drafter which can draft as deep as anyone likes."""
_CHUNK = 512
"""Positions whose draft logits are formed at once."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What decoding held-out text gave."""

    accepted_length: float
    """Tokens emitted per pass, the bonus included."""
    by_position: tuple[float, ...]
    """Share of passes that accepted at least 1, 2, … drafted tokens."""
    tokens: int
    """Tokens decoded."""
    passes: int
    """Passes made."""


@torch.no_grad()
def rank_table(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> Tensor:
    """Rank of the true token among each step's proposals, [P, K], int64; `max_rank` stands for "not among the first".

    A place is counted when its first step has a label; where a later step has none, the rank is `max_rank`: such a
    guess falls behind the end of the answer. A drafter that asks itself again answers step k of a place at the k-th
    index behind it: while the guesses before were right, that is what it has read when it drafts.
    """
    tables = []
    for batch in features:
        table = _step_ranks if drafter.unrolls is None else _unrolled_ranks
        tables.append(table(drafter, batch, max_rank).cpu())
    return torch.cat(tables) if tables else torch.zeros(0, 1, dtype=torch.long)


def _step_ranks(drafter: Drafter, batch: Features, max_rank: int) -> Tensor:
    """Ranks of K draft steps that were trained as such, [P, K]."""
    drafts = drafter(batch)
    steps = [batch.labels(offset) for offset in drafts.offsets]
    here_BL = steps[0][1]
    columns = []
    for step, (labels_BL, valid_BL) in enumerate(steps):
        hidden_PD = drafts.hidden_BLKD[:, :, step][here_BL]
        ranks_P = _ranks(drafter, hidden_PD, labels_BL[here_BL], step, max_rank)
        columns.append(torch.where(valid_BL[here_BL], ranks_P, max_rank))
    return torch.stack(columns, dim=1)


def _unrolled_ranks(drafter: Drafter, batch: Features, max_rank: int) -> Tensor:
    """Ranks of one step at `UNROLLED` successive indices, [P, K]."""
    drafts, step = drafter(batch), drafter.unrolls or 0
    labels_BL, valid_BL = batch.labels(drafts.offsets[step])
    ranks_BL = torch.full_like(labels_BL, max_rank)
    ranks_BL[valid_BL] = _ranks(drafter, drafts.hidden_BLKD[:, :, step][valid_BL], labels_BL[valid_BL], step, max_rank)
    behind_BL = functional.pad(ranks_BL, (0, UNROLLED - 1), value=max_rank)
    segments_BL = functional.pad(batch.segments_BL, (0, UNROLLED - 1), value=-1)
    columns = []
    for later in range(UNROLLED):
        places = slice(later, later + labels_BL.shape[1])
        same_BL = segments_BL[:, places] == batch.segments_BL
        columns.append(torch.where(same_BL, behind_BL[:, places], max_rank)[valid_BL])
    return torch.stack(columns, dim=1)


def _ranks(drafter: Drafter, hidden_PD: Tensor, labels_P: Tensor, step: int, max_rank: int) -> Tensor:
    ids_Q = drafter.token_ids_Q
    found = []
    for start in range(0, len(labels_P), _CHUNK):
        hidden, labels = hidden_PD[start : start + _CHUNK], labels_P[start : start + _CHUNK]
        logits = drafter.project(hidden, step)
        indices = logits.topk(min(max_rank, logits.shape[-1]), dim=-1).indices
        hits = (indices if ids_Q is None else ids_Q[indices]) == labels[:, None]
        found.append(torch.where(hits.any(-1), hits.long().argmax(-1), max_rank))
    return torch.cat(found) if found else labels_P.new_zeros(0)


class PathEstimate:
    """How often the true continuation takes a path of ranks, estimated on held-out text.

    Counted jointly, which sees that easy passages are easy for all heads, and shrunk towards the product of exactly-
    rank-i accuracies (arXiv:2401.10774, 2.3.3) where a path was seen rarely: P(path) = P(parent) (n(path) + s
    a_k(rank)) / (n(parent) + s).
    """

    def __init__(self, table_PK: Tensor, max_rank: int = MAX_RANK) -> None:
        self.steps = table_PK.shape[1]
        self.max_rank = max_rank
        total = max(1, table_PK.shape[0])
        self.accuracy = [
            [float((table_PK[:, step] == rank).sum()) / total for rank in range(max_rank)] for step in range(self.steps)
        ]
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.counts[()] = table_PK.shape[0]
        for ranks in table_PK.tolist():
            for step, rank in enumerate(ranks):
                if rank >= max_rank:
                    break
                self.counts[tuple(ranks[: step + 1])] += 1

    def step(self, path: tuple[int, ...]) -> float:
        """Probability of the last rank of a path, given the ranks before it."""
        own = self.accuracy[len(path) - 1][path[-1]]
        return (self.counts[path] + _SHRINKAGE * own) / (self.counts[path[:-1]] + _SHRINKAGE)

    def __call__(self, path: tuple[int, ...]) -> float:
        """Probability of the whole path."""
        probability = 1.0
        for length in range(1, len(path) + 1):
            probability *= self.step(path[:length])
        return probability


def search_tree(table_PK: Tensor, max_nodes: int, max_rank: int = MAX_RANK) -> tuple[Topology, tuple[float, ...]]:
    """The static tree that maximises the expected accepted length, nodes in best-first order.

    A node's probability is never above its parent's, so taking the likeliest remaining node each time is optimal and
    every prefix of the tree is the best tree of its size.

    Returns:
        The tree of at most `max_nodes` nodes, and for each size from 1 the expected accepted length, the bonus
        included.

    Raises:
        ValueError: if `max_nodes` is below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    probability = PathEstimate(table_PK, max_rank)
    paths: list[tuple[int, ...]] = []
    expected = [1.0]
    heap: list[tuple[float, tuple[int, ...]]] = []

    def offer(parent: tuple[int, ...], value: float) -> None:
        if len(parent) < probability.steps:
            for rank in range(max_rank):
                path = (*parent, rank)
                chance = value * probability.step(path)
                if chance > 0:
                    heappush(heap, (-chance, path))

    offer((), 1.0)
    while heap and len(paths) + 1 < max_nodes:
        chance, path = heappop(heap)
        paths.append(path)
        expected.append(expected[-1] - chance)
        offer(path, -chance)
    return Topology.from_paths(paths), tuple(expected)


def replay(
    drafter: Drafter,
    target: Target,
    features: Sequence[Features],
    topology: Topology,
    *,
    batch_size: int = 8,
    max_answers: int | None = None,
) -> Acceptance:
    """Decode stored greedy answers through a drafter: the exact accepted length, no pass of the target needed.

    Args:
        drafter: bound to the target, on the features' device.
        target: the target that wrote the answers.
        features: encoded rows, one conversation each.
        topology: the static tree.
        batch_size: rows at a time; does not change the result.
        max_answers: at most so many answers; all by default.
    """
    source = Replay(target, features, max_answers)
    result = decode(
        source, source.requests, DecodeSettings(batch_size=batch_size), drafter=drafter, policy=StaticTree(topology)
    )
    return acceptance_of(result, topology.depth)


def acceptance_of(result: DecodeResult, depth: int) -> Acceptance:
    """How much was accepted of drafts of at most `depth` tokens."""
    emitted = [count for generation in result.generations for count in generation.emitted]
    passes = len(emitted)
    reached = tuple(sum(count > least for count in emitted) / passes if passes else 0.0
                    for least in range(1, depth + 1))
    return Acceptance(
        accepted_length=sum(emitted) / passes if passes else 0.0,
        by_position=reached,
        tokens=sum(emitted),
        passes=passes,
    )


def decoded_acceptance(drafter: Drafter, target: Target, features: Sequence[Features], nodes: int) -> Acceptance:
    """Accepted length of the best static tree of `nodes` nodes on held-out greedy answers.

    The tree is searched on every second row and measured on the others (with a single row, on the same), so that it
    is not judged by the text it was fitted to.
    """
    rows = [row for batch in features for row in _unbatch(batch)]
    fitted, measured = (rows[0::2], rows[1::2]) if len(rows) > 1 else (rows, rows)
    topology, _ = search_tree(rank_table(drafter, fitted), nodes)
    if topology.size == 1:
        topology = Topology.chain(1)
    return replay(drafter, target, measured, topology)


def _unbatch(batch: Features) -> list[Features]:
    return [
        Features(
            tokens_BL=batch.tokens_BL[row : row + 1],
            supervised_BL=batch.supervised_BL[row : row + 1],
            segments_BL=batch.segments_BL[row : row + 1],
            positions_BL=batch.positions_BL[row : row + 1],
            final_BLD=batch.final()[row : row + 1],
            taps={layer: states[row : row + 1] for layer, states in batch.taps.items()},
        )
        for row in range(batch.tokens_BL.shape[0])
    ]
