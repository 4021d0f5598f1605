"""Tree search against brute force, replay against real decoding."""

from itertools import product
from math import prod

import pytest
import torch
from draftsmith.modules import (
    DecodeSettings,
    Replay,
    Request,
    StaticTree,
    Target,
    Topology,
    decode,
    search_tree,
)
from draftsmith.modules.tuning.tree_search import PathEstimate
from references.trees import best_expected_length
from support.drafters import ScriptedDrafter
from support.encoded_answers import encoded_answers
from support.tree_shapes import paths


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


def test_replay_gives_the_accepted_length_of_real_decoding(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    requests = [Request((5, 20 + index, 7), index, 25 + index) for index in range(7)]
    features = encoded_answers(target, requests)
    source = Replay(target, features)
    texts = [row.tokens_L.tolist() for row in source.rows.values()]
    tree = StaticTree(Topology((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0)))
    results = []
    for verifier, asked, settings in (
        (source, source.requests, DecodeSettings(batch_size=3)),
        (target, requests, DecodeSettings()),
    ):
        drafter = ScriptedDrafter(target.vocab_size, texts, "oracle")
        results.append(decode(verifier, asked, settings, drafter=drafter, policy=tree))
    assert [g.tokens for g in results[0].generations] == [g.tokens for g in results[1].generations]
    assert [g.emitted for g in results[0].generations] == [g.emitted for g in results[1].generations]
