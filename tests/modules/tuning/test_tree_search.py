"""Tree search against brute force; a walk along ranks counts what a replay decodes, for every family."""

from itertools import product
from math import prod

import pytest
import torch
from draftsmith.modules import Drafter, Features, Request, Target, Topology
from draftsmith.modules.tuning.tree_search import PathEstimate, RankedText, acceptance_of, ranked_text, search_tree
from references.trees import best_expected_length
from support.answers import encoded_answers, replay
from support.families import CASES, randomised
from support.policies import paths
from support.tiers import others_long


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
def test_search_equals_brute_force(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    table = torch.randint(0, 4, (200, 3), generator=generator).clamp(max=3)
    table[:80, 0] = 0
    probability = PathEstimate(table, 3)
    all_paths = [path for length in (1, 2, 3) for path in product(range(3), repeat=length)]
    tree, expected = search_tree(table, nodes, 3)
    assert tree.size == nodes
    every = {path: prod(probability.step(path[:depth]) for depth in range(1, len(path) + 1)) for path in all_paths}
    likely = dict(sorted(every.items(), key=lambda item: -item[1])[:14])
    assert expected[-1] == pytest.approx(best_expected_length(likely, nodes))
    assert expected[-1] == pytest.approx(1 + sum(every[path] for path in paths(tree)[1:]))


def test_without_shrinkage_the_expected_length_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.modules.tuning.tree_search._SHRINKAGE", 1e-9)
    table = torch.randint(0, 4, (500, 2))
    tree, expected = search_tree(table, 6, 3)
    accepted = [sum(tuple(row[:depth]) in paths(tree) for depth in (1, 2)) for row in table.tolist()]
    assert expected[-1] == pytest.approx(1 + sum(accepted) / 500, abs=1e-6)


def test_prefixes_are_nested_and_lengths_grow() -> None:
    table = torch.randint(0, 6, (300, 3))
    tree, expected = search_tree(table, 20)
    assert list(expected) == sorted(expected)
    small, _ = search_tree(table, 7)
    assert tree.prefix(7) == small


WIDE = Topology.from_paths([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 1), (5,), (0, 2), (9,)])
"""A tree of two depths."""


def made(name: str, original: Target) -> tuple[Drafter, Target]:
    target = CASES[name].verifier(original)
    torch.manual_seed(7)
    return randomised(CASES[name].make(target).to(target.dtype)), target


def answers(drafter: Drafter, target: Target) -> list[Features]:
    """Greedy answers, of which one has two tokens and one a single one, several in a batch."""
    lengths = (25, 2, 40, 1, 33, 28, 30)
    requests = [Request((5, 20 + at, 7), at, length) for at, length in enumerate(lengths)]
    return [target.encode(batch, drafter.taps) for batch in encoded_answers(target, requests)]


@pytest.mark.parametrize("name", others_long(CASES))
def test_a_walk_along_ranks_counts_what_a_replay_decodes(name: str, tiny_target_f64: Target) -> None:
    drafter, target = made(name, tiny_target_f64)
    features = answers(drafter, target)
    text = ranked_text(drafter, features)
    deep, _ = search_tree(text.ranks_PK, 24)
    for tree in (WIDE, deep.prefix(5), deep):
        found = acceptance_of(text.walk(tree)[1], tree.depth)
        assert found == replay(drafter, target, features, tree)
    assert deep.depth >= min(2, drafter.reach or 2)
    assert found.accepted_length > 1.02, "nothing is accepted: the test would see nothing"


def test_a_pass_starts_after_the_accepted_tokens_and_the_bonus() -> None:
    """Two answers of 6 and 2 tokens, the first entries of each before its first token; the chain accepts up to 2."""
    ranks_PK = torch.tensor([[0, 0], [0, 0], [9, 9], [9, 9], [0, 0], [0, 9], [0, 0], [0, 9]])
    left_P = torch.tensor([0, 5, 4, 3, 2, 1, 0, 1])
    places_P = torch.arange(8)
    text = RankedText(ranks_PK=ranks_PK, labelled_PK=ranks_PK < 9, rows_P=places_P // 6, roots_P=places_P,
                      left_P=left_P)
    # Three of five tokens; then two places on, where an answer of two tokens has no room for a bonus; then one token.
    starts_S, emitted = text.walk(Topology.chain(2))
    assert (starts_S.tolist(), emitted) == ([1, 4, 7], [3, 2, 1])
    assert text.walk(Topology.chain(0))[1] == [1] * 6
    assert text.walk(Topology.from_paths([(1,)]))[1] == [1] * 6
