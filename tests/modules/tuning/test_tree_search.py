"""Tree search against brute force, replay against real decoding."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from draftsmith.modules import (
    DecodeSettings,
    Features,
    Replay,
    Request,
    StaticTree,
    Target,
    Topology,
    chance_table,
    decode,
    expected_lengths,
    rank_table,
    search_tree,
)
from draftsmith.modules.drafters.draft_lm import DraftLM
from draftsmith.modules.drafters.draft_lm_config import DraftLMConfig
from draftsmith.modules.drafters.medusa import Medusa, MedusaConfig
from draftsmith.modules.tuning.tree_search import PathEstimate
from references.trees import best_expected_length
from support.drafters import ScriptedDrafter
from support.encoded_answers import encoded_answers


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
def test_search_equals_brute_force(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    table = torch.randint(0, 4, (200, 3), generator=generator).clamp(max=3)
    table[:80, 0] = 0
    probability = PathEstimate(table, 3)
    paths = [path for length in (1, 2, 3) for path in product(range(3), repeat=length)]
    tree, expected = search_tree(table, nodes, 3)
    assert tree.size == nodes
    every = {path: probability(path) for path in paths}
    likely = dict(sorted(every.items(), key=lambda item: -item[1])[:14])
    assert expected[-1] == pytest.approx(best_expected_length(likely, nodes))
    assert expected[-1] == pytest.approx(1 + sum(probability(path) for path in tree.paths[1:]))


def test_without_shrinkage_the_expected_length_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.modules.tuning.tree_search._SHRINKAGE", 1e-9)
    table = torch.randint(0, 4, (500, 2))
    tree, expected = search_tree(table, 6, 3)
    accepted = [sum(tuple(row[:depth]) in tree.paths for depth in (1, 2)) for row in table.tolist()]
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


def made(kind: str, target: Target) -> Medusa | DraftLM:
    """A drafter that guesses differently at each place: with separate steps, or autoregressive."""
    drafter = (Medusa.create(MedusaConfig(num_heads=3), target) if kind == "steps"
               else DraftLM.create(DraftLMConfig(layers=(0,)), target)).eval().to(target.dtype)
    assert (drafter.unrolls is None) == (kind == "steps")
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return drafter


def packed(batches: list[Features]) -> list[Features]:
    """All rows of a batch packed into one, each a segment of its own."""
    found = []
    for batch in batches:
        real = [row[row >= 0].shape[0] for row in batch.segments_BL]
        def joined(tensor: torch.Tensor, real: list[int] = real) -> torch.Tensor:
            return torch.cat([row[:length] for row, length in zip(tensor, real, strict=True)])[None]
        numbers = torch.cat([torch.full((length,), place) for place, length in enumerate(real)])[None]
        found.append(Features(tokens_BL=joined(batch.tokens_BL), supervised_BL=joined(batch.supervised_BL),
                              segments_BL=numbers, positions_BL=joined(batch.positions_BL),
                              final_BLD=joined(batch.final())))
    return found


def test_chances_need_a_temperature_above_0(tiny_target_f64: Target) -> None:
    with pytest.raises(ValueError, match=r"temperature must be above 0, got 0\.0"):
        chance_table(made("steps", tiny_target_f64), tiny_target_f64, [], 0.0)


def test_states_stored_in_half_precision_are_widened(tiny_target: Target) -> None:
    features = encoded_answers(tiny_target, [Request((5, 20 + at, 7), at, 25) for at in range(4)])
    half = [replace(batch, final_BLD=batch.final().to(torch.float16)) for batch in features]
    drafter = made("steps", tiny_target)
    expected, found = (chance_table(drafter, tiny_target, rows) for rows in (features, half))
    torch.testing.assert_close(found.sort(-1).values, expected.sort(-1).values, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["steps", "unrolled"])
def test_a_target_at_a_very_low_temperature_takes_the_greedy_tokens(kind: str, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    features = packed(encoded_answers(target, [Request((5, 20 + at, 7), at, 25 + at) for at in range(7)]))
    drafter = made(kind, target)
    table_PK, chances_PKR = rank_table(drafter, features), chance_table(drafter, target, features, 1e-4)
    assert chances_PKR.shape == (*table_PK.shape, 10)
    assert 0 < int((table_PK < 10).sum()) < table_PK.numel()
    expected = torch.nn.functional.one_hot(table_PK, 11)[..., :10].to(torch.float32)
    torch.testing.assert_close(chances_PKR, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["steps", "unrolled"])
def test_expected_lengths_are_those_of_sampled_decoding(kind: str, tiny_target_f64: Target) -> None:
    """An answer's first pass and its last draft fewer tokens: they are few here, and within the tolerance."""
    target = tiny_target_f64
    requests = [Request((5, 20 + index, 7), index, 120, 1.0) for index in range(40)]
    answers = decode(target, requests, DecodeSettings(batch_size=40)).generations
    rows = [([*one.request.tokens, *one.tokens], [False] * 3 + [True] * len(one.tokens)) for one in answers]
    drafter = made(kind, target)
    features = [target.encode(Features.from_rows(rows))]
    tree = Topology((-1, *[0] * 10, 1, 1, 1, 1, 2, 2, 2, 2), (0, *range(10), 0, 1, 2, 3, 0, 1, 2, 3))
    expected = expected_lengths(chance_table(drafter, target, features), tree)
    result = decode(target, requests, DecodeSettings(batch_size=40), drafter=drafter, policy=StaticTree(tree))
    assert expected[-1] > 1.1
    assert result.accepted_length == pytest.approx(expected[-1], abs=0.03)
    greedy = expected_lengths(chance_table(drafter, target, features, 1e-3), tree)
    assert abs(greedy[-1] - result.accepted_length) > 0.05, "another temperature would be noticed"


def test_a_node_counts_only_with_its_ancestors() -> None:
    table_PKR = torch.tensor([[[0.5, 0.25], [0.5, 0.0]], [[1.0, 0.0], [0.0, 0.5]]])
    tree = Topology((-1, 0, 1, 0, 1, 2, 0), (0, 0, 0, 1, 1, 0, 2))
    # Depth 3 and rank 2 are beyond the table.
    assert expected_lengths(table_PKR, tree) == pytest.approx((1.0, 1.75, 1.875, 2.0, 2.25, 2.25, 2.25))
    assert expected_lengths(torch.zeros(0, 2, 2), tree) == (1.0,) * 7