"""Search for the best static tree of a drafter, and what it accepts of held-out answers, without a pass of the target.

Shapes: B rows, L positions, K draft steps, P places where a draft starts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

import torch
from torch import Tensor

from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings, Request
from ..features import Features, ReadRows
from ..interfaces.drafter import Drafter
from ..processes import ALONE, Processes
from ..target.model import Target
from ..token_tree import Topology
from .ranked_text import MAX_RANK, ranked_text
from .replayed_answers import answer_requests

_SHRINKAGE = 20.0  # Weight of the independent estimate of a path, as a number of observations


class PathEstimate:
    """Probability that the true continuation takes a path of ranks, estimated on held-out text.

    Counted jointly, since easy passages are easy for all heads, and shrunk towards the product of exactly-
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
                # No tree of these ranks goes on from here.
                if rank >= max_rank:
                    break
                self.counts[tuple(ranks[: step + 1])] += 1

    def step(self, path: tuple[int, ...]) -> float:
        """Probability of the last rank of a path, given the ranks before it."""
        own = self.accuracy[len(path) - 1][path[-1]]
        return (self.counts[path] + _SHRINKAGE * own) / (self.counts[path[:-1]] + _SHRINKAGE)


def search_tree(table_PK: Tensor, max_nodes: int, max_rank: int = MAX_RANK) -> tuple[Topology, tuple[float, ...]]:
    """The static tree that maximises the expected accepted length, nodes in best-first order.

    A node's probability is never above its parent's, so taking the most probable remaining node each time is optimal
    and every prefix of the tree is the best tree of its size.

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
    expected = [0.0]
    # Minus the probability of a path: the heap gives its smallest entry first.
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    # Of all nodes whose parent is in the tree the most probable one comes next.
    while heap and len(paths) < max_nodes:
        chance, path = heappop(heap)
        paths.append(path)
        expected.append(expected[-1] - chance)
        for rank in range(max_rank) if len(path) < probability.steps else ():
            if (child := chance * probability.step((*path, rank))) < 0:
                heappush(heap, (child, (*path, rank)))
    return Topology.from_paths(paths), tuple(expected[1:])


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance measured by decoding held-out text."""

    accepted_length: float  # Tokens emitted per pass, the bonus included
    by_position: tuple[float, ...]  # Share of passes that accepted at least 1, 2, … drafted tokens
    tokens: int  # Number of tokens decoded
    passes: int  # Number of passes


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """An optimizer step after which held-out text was decoded, and the training text since the measurement before."""

    step: int  # Number of the step; 0 is the untrained drafter
    accepted_length: float  # Tokens per pass of held-out text, decoded, the bonus included
    labels: int  # Labels that training has read up to here, repeated ones again
    loss: float | None = None
    """Mean loss of the optimizer steps since the measurement before; None where there was none."""
    accuracy: float | None = None  # Share of their labels that the first draft step guessed
    expected_accepted_length: float | None = None
    """Teacher-forced estimate of their tokens per pass, for a chain; None where draft steps form none."""


def acceptance_of(emitted: Sequence[int], depth: int) -> Acceptance:
    """Acceptance by the tokens that each pass emitted, with drafts of at most `depth` tokens; 1 without passes."""
    passes = len(emitted)
    reached = tuple(sum(count > least for count in emitted) / passes if passes else 0.0
                    for least in range(1, depth + 1))
    return Acceptance(accepted_length=sum(emitted) / passes if passes else 1.0, by_position=reached,
                      tokens=sum(emitted), passes=passes)


def held_out_acceptance(drafter: Drafter, features: Sequence[Features], nodes: int,
                        processes: Processes = ALONE) -> Acceptance:
    """Accepted length of the best static tree of `nodes` nodes on held-out greedy answers.

    The tree is searched on every second row and measured on the others (with a single row, on the same), so that it
    is not measured on the text it was fitted to. What decoding accepts of it follows from the ranks.

    Args:
        drafter: bound to the target, on the features' device; the same in all processes.
        features: this process's share of the rows, one a batch, dealt in pairs of neighbours: one to search on, one to
            measure on.
        nodes: largest number of nodes, root included.
        processes: those that share the rows; all must call it, and all get the same counts, those of all rows.
    """
    # A tree must not be measured on the text it was searched on.
    fitted, measured = features[0::2], features[1::2]
    if sum(processes.gather(len(features))) == 1:
        measured = fitted
    # A process without rows takes part: the others wait for its answer.
    tables = [table_PK for table_PK in processes.gather(ranked_text(drafter, fitted).ranks_PK if fitted else None)
              if table_PK is not None]
    # On text that no guess fits, a chain of one token still shows what a pass would accept; so it does without text,
    # where each answer is a single token, which comes from the pass over its prompt.
    topology = search_tree(torch.cat(tables), nodes)[0] if tables else Topology.chain(1)
    if topology.size == 1:
        topology = Topology.chain(1)
    emitted = ranked_text(drafter, measured).walk(topology)[1] if measured else []
    return acceptance_of([count for part in processes.gather(emitted) for count in part], topology.depth)


def answered_anew(target: Target, features: Sequence[Features], batch_size: int = 16,
                  temperature: float = 0.0) -> ReadRows:
    """The prompts of stored conversations with the answers that `target` gives now, one row each, encoded.

    These answers are the target's own, so that drafts can be replayed on them exactly. Each is at most as long as the
    answer it replaces. A row is encoded whenever it is asked for.

    Args:
        target: writes and encodes the answers.
        features: conversations, with or without states; each of their answers gives one request.
        batch_size: answers written at a time; it changes none of them.
        temperature: of the answers; 0 is greedy.
    """
    requests: list[Request] = []
    for batch in features:
        for row in range(len(batch.tokens_BL)):
            requests += answer_requests(batch, row, len(requests))
    requests = [replace(request, temperature=temperature) for request in requests]
    written = decode(target, requests, DecodeSettings(batch_size=batch_size)).generations
    # Only the answers are labels, as in distilled data.
    rows = [([*one.request.tokens, *one.tokens], [False] * len(one.request.tokens) + [True] * len(one.tokens))
            for one in written]
    return ReadRows(partial(Features.from_rows, [row]) for row in rows).mapped(target.encode)
