"""Requests, the answers of transformers' own `generate` to them, and observations written by hand."""

import random
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from draftsmith.modules import (
    Acceptance,
    DecodeSettings,
    Drafter,
    Features,
    Frontier,
    Observation,
    Proposer,
    Replay,
    Request,
    StaticTree,
    Target,
    Topology,
    Verified,
    decode,
)
from draftsmith.modules.interfaces.proposer import DraftState
from draftsmith.modules.token_tree import VirtualNodes
from draftsmith.modules.tuning.tree_search import acceptance_of
from torch import Tensor

_KEPT: WeakKeyDictionary[Target, dict[tuple[object, ...], list[int]]] = WeakKeyDictionary()
"""Answers of each target by what they follow from. Weights that were written since have another version."""


def native_greedy(target: Target, prompt: tuple[int, ...], count: int, *, eos: bool = False,
                  penalty: float = 1.0) -> list[int]:
    """The answer of `generate`, which tests of a target ask for again and again: a shorter one is the start of a longer
    one, unless an end token may end it."""
    weights = tuple((weight.data_ptr(), weight._version) for weight in target.model.parameters())
    kept = _KEPT.setdefault(target, {})
    asked = (tuple(prompt), penalty, (count, *target.eos_ids) if eos else (), weights)
    if len(kept.get(asked, ())) < count and not (eos and asked in kept):
        kept[asked] = _generated(target, prompt, count, eos=eos, penalty=penalty)
    return kept[asked][:count]


def greedy_answers(target: Target, requests: list[Request], penalty: float = 1.0) -> list[list[int]]:
    return [native_greedy(target, one.tokens, one.max_new_tokens, penalty=penalty) for one in requests]


def texts_of(requests: list[Request], answers: list[list[int]]) -> list[list[int]]:
    """Prompts with their answers."""
    return [[*request.tokens, *answer] for request, answer in zip(requests, answers, strict=True)]


def _generated(target: Target, prompt: tuple[int, ...], count: int, *, eos: bool, penalty: float) -> list[int]:
    with target.native() as model:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, repetition_penalty=penalty,
                             pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                             eos_token_id=list(target.eos_ids) if eos else None)
    return out[0, len(prompt) :].tolist()


def requests_for(target: Target, count: int, new_tokens: int, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(1)
    return [Request(tuple(rng.randrange(4, target.vocab_size) for _ in range(rng.randrange(2, 12))), index,
                    new_tokens + rng.randrange(8), temperature) for index in range(count)]


def encoded_answers(target: Target, requests: list[Request]) -> list[Features]:
    result = decode(target, requests, DecodeSettings(batch_size=4))
    rows = [([*g.request.tokens, *g.tokens], [False] * len(g.request.tokens) + [True] * len(g.tokens))
            for g in result.generations]
    return [target.encode(Features.from_rows(rows[:3])), target.encode(Features.from_rows(rows[3:]))]


def replay(drafter: Drafter, target: Target, features: Sequence[Features], topology: Topology) -> Acceptance:
    """The acceptance of a static tree by decoding stored answers, in place of a walk along their ranks."""
    source = Replay(target, features, drafter=drafter)
    result = decode(source, source.requests, DecodeSettings(batch_size=8), drafter=drafter, policy=StaticTree(topology))
    return acceptance_of([count for one in result.generations for count in one.emitted], topology.depth)


ROOT = Frontier(nodes_BF=torch.tensor([[0]]), parents_BF=torch.tensor([[-1]]), tokens_BF=torch.tensor([[0]]))


def observation(texts: list[list[int]], verified: Verified | None = None) -> Observation:
    """The rows' new tokens, each row's last one its new root; shorter rows are padded with token 0."""
    width = max(map(len, texts)) - 1
    return Observation(
        tokens_BN=torch.tensor([[*text[:-1], *([0] * (width - len(text) + 1))] for text in texts], dtype=torch.long),
        counts_B=torch.tensor([len(text) - 1 for text in texts]), final_BND=torch.zeros(len(texts), width, 1), taps={},
        roots_B=torch.tensor([text[-1] for text in texts]), verified=verified)


def observe(drafter: Proposer, state: DraftState, rows: list[int], texts: list[list[int]]) -> None:
    drafter.observe(state, torch.tensor(rows), observation(texts))


def frontier(nodes: list[int], parents: list[int], tokens: list[list[int]] | Tensor) -> Frontier:
    """A frontier with the same nodes in every row."""
    rows = len(tokens)
    return Frontier(nodes_BF=torch.tensor([nodes] * rows), parents_BF=torch.tensor([parents] * rows),
                    tokens_BF=torch.as_tensor(tokens))


def level(nodes: list[int], parents: list[int], tokens: list[int]) -> Frontier:
    """A frontier of one row."""
    return frontier(nodes, parents, [tokens])


def text(target: Target, drafter: Drafter, tokens: list[int]) -> Features:
    """A row of which every token is a label."""
    return target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), drafter.taps)


def packed(target: Target, drafter: Drafter) -> Features:
    """Rows of two segments, with padding before, between and after them, and gaps in the supervision."""
    segments = torch.tensor([[-1] * 2 + [0] * cut + [-1] + [1] * (15 - cut) for cut in (3, 7)] + [[0] * 16 + [-1] * 2])
    positions = torch.tensor([[row[:place].count(segment) for place, segment in enumerate(row)]
                              for row in segments.tolist()])
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, target.vocab_size, segments.shape, generator=chance)
    supervised = (segments >= 0) & (torch.rand(segments.shape, generator=chance) < 0.8)
    return target.encode(Features(tokens_BL=tokens, segments_BL=segments, positions_BL=positions,
                                  supervised_BL=supervised), drafter.taps)


def encoded(target: Target, rows: int = 3, length: int = 12) -> Features:
    """Random rows of which every token is a label."""
    tokens = torch.randint(4, target.vocab_size, (rows, length)).tolist()
    return target.encode(Features.from_rows([(row, [True] * length) for row in tokens]))


def observed(features: Features, rows: list[int], first: list[int] | int, counts: list[int]) -> Observation:
    """The next counts[b] positions of these rows from first[b] on, left-aligned, garbage after them."""
    index_B1, order_N = torch.tensor(rows)[:, None], torch.arange(max(counts) + 2)
    unread_BN, first_B = order_N >= torch.tensor(counts)[:, None], torch.tensor(first).expand(len(rows))
    places_BN = (first_B[:, None] + order_N).clamp(max=features.tokens_BL.shape[1] - 1)

    def cut(states_BLD: Tensor) -> Tensor:
        return states_BLD[index_B1, places_BN].masked_fill(unread_BN[..., None], torch.nan)

    return Observation(tokens_BN=features.tokens_BL[index_B1, places_BN].masked_fill(unread_BN, 7),
                       counts_B=torch.tensor(counts), final_BND=cut(features.final()),
                       taps={layer: cut(states) for layer, states in features.taps.items()},
                       roots_B=features.tokens_BL[index_B1[:, 0], first_B + torch.tensor(counts)])


def news(features: Features, first: int, count: int) -> Observation:
    """The next positions of the only row."""
    return observed(features, [0], [first], [count])


def read(drafter: Drafter, features: Features, *counts: int) -> Any:
    """The state after the first positions of the only row, read in pieces of these sizes."""
    state = drafter.start(1, 64)
    for number, count in enumerate(counts):
        drafter.observe(state, torch.tensor([0]), news(features, sum(counts[:number]), count))
    return state


def check_tree(drafter: Drafter, features: Features, levels: list[tuple[list[int], list[int]]]) -> None:
    """Compare the scores of each node below the seventh token of a text with those of its path alone.

    Args:
        levels: nodes and their parents, the root's first; node n has token 50 + n.
    """
    parents = {node: parent for nodes, above in levels for node, parent in zip(nodes, above, strict=True)}
    token = {node: 50 + node if node else int(features.tokens_BL[0, 6]) for node in parents}
    grown = read(drafter, features, 6)
    for nodes, above in levels:
        scores = drafter.expand(grown, level(nodes, above, [token[node] for node in nodes]))
        for column, node in enumerate(nodes):
            path, alone = [node], read(drafter, features, 6)
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            for depth, step in enumerate(path):
                told = drafter.expand(alone, level([depth], [depth - 1], [token[step]]))
            torch.testing.assert_close(scores.log_probs_BFHQ[0, column], told.log_probs_BFHQ[0, 0],
                                       atol=1e-5, rtol=1e-4)


def logits_of(successors: list[list[int]], vocab_size: int) -> Tensor:
    """Logits [1, M, V] whose most probable tokens at each node are the given ones, in order."""
    logits = torch.full((1, len(successors), vocab_size), -20.0)
    for node, tokens in enumerate(successors):
        for rank, token in enumerate(tokens):
            logits[0, node, token] = float(len(tokens) - rank)
    return logits


def unplaced(embedded_BMD: Tensor) -> VirtualNodes:
    """Virtual nodes with these embeddings whose places the tree itself says; no node is named as their anchor."""
    slots_BM = torch.arange(embedded_BMD.shape[1]).expand(embedded_BMD.shape[:2])
    return VirtualNodes(embedded_BMD=embedded_BMD, anchors_BM=torch.full_like(slots_BM, -1), slots_BM=slots_BM,
                        slots=embedded_BMD.shape[1])
