"""Ranks of an answer's own tokens among a drafter's proposals, the passes of decoding that follow from them, and the
search for the best static tree, all without a pass of the target.

A greedy pass accepts the longest path of the tree that the text takes, and the nodes off that path change nothing. So
only guesses after true tokens count: a head's guess depends on no other guess, and an autoregressive drafter has read
exactly the true tokens where its guess is accepted. The next pass starts after the accepted tokens and the one that the
target adds. For every family the counts equal those of decoding, which tests/modules/tuning/test_tree_search.py holds
on to.

Shapes: B rows, L positions, N indices with a label, K draft steps, P places where a draft starts, S of them where a
pass starts, R proposals, Q draft vocabulary, D hidden size, C values of a place and step."""

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
from ..interfaces.drafter import Drafter, Drafts
from ..processes import ALONE, Processes
from ..target.model import Target
from ..token_tree import Topology
from .replayed_answers import answer_requests

MAX_RANK = 10  # Number of proposals of one node that a tree may use
UNROLLED = 8  # Depth of the tree for a drafter that has no deepest step
_CHUNK = 512  # Number of positions for which logits are computed at once


@dataclass(frozen=True, kw_only=True)
class RankedText:
    """Answers by the places at which a draft may start, in the order of the text, on the CPU. A place is counted when
    its first step has a label; its step k is the drafter's at the k-th token after it."""

    ranks_PK: Tensor
    """Rank of the text's own token among each step's proposals, int64; their largest number where it is none of them,
    or after the end of the answer."""
    labelled_PK: Tensor  # False after the end of the answer
    rows_P: Tensor  # Row of each place, counted over all features, int64
    roots_P: Tensor  # Position in that row of the last token before the draft, int64
    left_P: Tensor  # Tokens of the answer after it, int64; 0 where it is not the answer's, and no pass starts

    def depths(self, topology: Topology) -> Tensor:
        """Length of the tree's path that the text takes at each place, [P], int64, which ends after K steps."""
        steps = self.ranks_PK.shape[1]
        depths_P = torch.zeros_like(self.left_P)
        taken = [torch.ones_like(depths_P, dtype=torch.bool)]
        for parent, rank, depth in list(zip(topology.parents, topology.ranks, topology.depths, strict=True))[1:]:
            taken.append(taken[parent] & (self.ranks_PK[:, depth - 1] == rank) if depth <= steps else ~taken[0])
            # A node comes after its parent, and of two children of one node the text takes one.
            depths_P = torch.where(taken[-1], depth, depths_P)
        return depths_P

    def walk(self, topology: Topology) -> tuple[Tensor, list[int]]:
        """(places at which the passes of greedy decoding with a static tree start [S], the tokens that each emits, the
        target's own included), answer by answer."""
        steps_P, starts, place = torch.minimum(self.depths(topology) + 1, self.left_P).tolist(), list[int](), 0
        # One by one: where a pass starts follows from what the one before has emitted.
        while place < len(steps_P):
            starts += [place] if steps_P[place] else []
            place += max(1, steps_P[place])
        return torch.tensor(starts, dtype=torch.long), [steps_P[start] for start in starts]


@torch.no_grad()
def ranked_text(drafter: Drafter, features: Sequence[Features], max_rank: int = MAX_RANK) -> RankedText:
    """Ranks of held-out text, encoded rows, packed or not, among the first `max_rank` proposals of a step of a drafter,
    which is bound to the target, on the features' device."""
    # Rank, label or none, row, root and tokens that are left; what has no label is no hit.
    missing = torch.tensor([max_rank, 0, 0, 0, 0])
    tables, count = [], 0
    for batch in features:
        table_PKC = _looked(drafter, batch, max_rank, missing).cpu()
        # Rows are counted over all batches.
        table_PKC[:, 0, 2] += count
        tables.append(table_PKC)
        count += len(batch.tokens_BL)
    table_PKC = torch.cat(tables) if tables else missing.expand(0, 1, -1)
    rows_P, roots_P, left_P = table_PKC[:, 0, 2:].unbind(-1)
    return RankedText(ranks_PK=table_PKC[..., 0], labelled_PK=table_PKC[..., 1].bool(), rows_P=rows_P, roots_P=roots_P,
                      left_P=left_P)


def _looked(drafter: Drafter, batch: Features, max_rank: int, missing: Tensor) -> Tensor:
    """Values of K draft steps at each place of a batch, [P, K, C]; `missing` where a later one has no label. The steps
    are those that were trained as such, or an autoregressive drafter's one at `UNROLLED` successive indices: as long as
    the guesses before were right, it has read exactly this when it drafts."""
    drafts = drafter(batch)
    if (step := drafter.unrolls) is None:
        here_BL = batch.labels(drafts.offsets[0])[1]
        return torch.stack([_seen(drafter, drafts, batch, each, max_rank, missing)[here_BL]
                            for each in range(len(drafts.offsets))], dim=1)
    valid_BL, segments_BL = batch.labels(drafts.offsets[step])[1], batch.segments_BL
    seen_BLC = _seen(drafter, drafts, batch, step, max_rank, missing)
    length, order_L = segments_BL.shape[1], torch.arange(segments_BL.shape[1], device=segments_BL.device)
    columns = []
    for later in range(UNROLLED):
        there_L = (order_L + later).clamp(max=length - 1)
        same_BL = (segments_BL[:, there_L] == segments_BL) & (order_L + later < length)
        column_BLC = seen_BLC[:, there_L]
        # The index after a conversation belongs to another one.
        column_BLC[~same_BL] = missing.to(column_BLC)
        columns.append(column_BLC[valid_BL])
    return torch.stack(columns, dim=1)


def _seen(drafter: Drafter, drafts: Drafts, batch: Features, step: int, max_rank: int, missing: Tensor) -> Tensor:
    """Values of one step at all indices, [B, L, C]."""
    offset, ids_Q = drafts.offsets[step], drafter.token_ids_Q
    labels_BL, valid_BL = batch.labels(offset)
    rows_N, indices_N = valid_BL.nonzero(as_tuple=True)
    roots_N, found = indices_N + offset - 1, []
    for hidden_MD, truths_M in zip(*(torch.split(values, _CHUNK) for values in (
            drafts.hidden_BLKD[:, :, step][valid_BL], labels_BL[valid_BL])), strict=True) if len(rows_N) else ():
        logits_MQ = drafter.project(hidden_MD, step)
        best = logits_MQ.topk(min(max_rank, logits_MQ.shape[-1]), dim=-1)
        ids_MR = best.indices if ids_Q is None else ids_Q[best.indices]
        # Tokens that are no candidates of a slot are no guesses.
        hits_MR = (ids_MR == truths_M[:, None]) & (best.values > -torch.inf)
        found.append(torch.where(hits_MR.any(-1), hits_MR.long().argmax(-1), max_rank))
    # Tokens of the same answer after each token: the next one that none of its answer follows, as the last of a row.
    following_BL = batch.labels(1)[1]
    order_L = torch.arange(following_BL.shape[1], device=following_BL.device)
    ends_BL = torch.where(following_BL, len(order_L) - 1, order_L).flip(1).cummin(1).values.flip(1)
    left_N = torch.where(batch.supervised_BL[rows_N, roots_N], (ends_BL - order_L)[rows_N, roots_N], 0)
    ranks_N = torch.cat(found) if found else rows_N
    seen_BLC = missing.to(valid_BL.device).expand(*valid_BL.shape, -1).clone()
    seen_BLC[valid_BL] = torch.stack([ranks_N, torch.ones_like(ranks_N), rows_N, roots_N, left_N], dim=1)
    return seen_BLC


_SHRINKAGE = 20.0  # Weight of the independent estimate of a path, as a number of observations


class PathEstimate:
    """Probability that the true continuation takes a path of ranks, estimated on held-out text: counted jointly, since
    easy passages are easy for all heads, and shrunk towards the product of exactly-rank-i accuracies (arXiv:2401.10774,
    2.3.3) where a path was seen rarely: P(path) = P(parent) (n(path) + s a_k(rank)) / (n(parent) + s)."""

    def __init__(self, table_PK: Tensor, max_rank: int = MAX_RANK) -> None:
        total, self.steps = max(1, len(table_PK)), table_PK.shape[1]
        self.accuracy = [[float((table_PK[:, step] == rank).sum()) / total for rank in range(max_rank)]
                         for step in range(self.steps)]
        self.counts = Counter[tuple[int, ...]]({(): len(table_PK)})
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
    """The static tree that maximises the expected accepted length, nodes in best-first order. A node's probability is
    never above its parent's, so taking the most probable remaining node each time is optimal and every prefix of the
    tree is the best tree of its size. Returns the tree of at most `max_nodes` nodes, at least 1 (ValueError), and for
    each size from 1 the expected accepted length, the bonus included."""
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
    loss: float | None = None  # Mean of the optimizer steps since the measurement before; None where there was none
    accuracy: float | None = None  # Share of their labels that the first draft step guessed
    expected_accepted_length: float | None = None  # Teacher-forced estimate for a chain; None where steps form none


def acceptance_of(emitted: Sequence[int], depth: int) -> Acceptance:
    """Acceptance by the tokens that each pass emitted, with drafts of at most `depth` tokens; 1 without passes."""
    passes = len(emitted)
    reached = tuple(sum(count > least for count in emitted) / passes if passes else 0.0
                    for least in range(1, depth + 1))
    return Acceptance(accepted_length=sum(emitted) / passes if passes else 1.0, by_position=reached,
                      tokens=sum(emitted), passes=passes)


def held_out_acceptance(drafter: Drafter, features: Sequence[Features], nodes: int,
                        processes: Processes = ALONE) -> Acceptance:
    """Accepted length of the best static tree of `nodes` nodes on held-out greedy answers. The tree is searched on
    every second row and measured on the others (with a single row, on the same), so that it is not measured on the text
    it was fitted to. What decoding accepts of it follows from the ranks. `features` are this process's share of the
    rows, one a batch, dealt in pairs of neighbours; all `processes` that share them must call it, with the same
    drafter, and all get the same counts, those of all rows."""
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
    """The prompts of stored conversations with the answers that `target` gives now, one row each, encoded. These
    answers are the target's own, so that drafts can be replayed on them exactly. Each is at most as long as the answer
    it replaces. A row is encoded whenever it is asked for."""
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
