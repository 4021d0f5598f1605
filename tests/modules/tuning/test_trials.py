"""Trials of ways of drafting: their lengths are those of real decoding, and seconds and answers decide; and bootstrap
intervals: right percentiles, paired, repeatable, and of the stated coverage."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draftsmith.modules import DecodeSettings, Drafter, Features, Request, Target, Topology, decode, ranked_text
from draftsmith.modules.baselines.registry import COPIED, joined_drafter, joined_policy, parse_joined
from draftsmith.modules.policies.registry import policy_named
from draftsmith.modules.tuning import trials as module
from draftsmith.modules.tuning.tree_search import search_tree
from draftsmith.modules.tuning.trials import DRAWS, Counted, Trial, cut, draws, interval, trials
from scipy import stats
from support.answers import encoded_answers
from support.artifacts import costs, trial
from support.families import CASES, randomised
from support.tiers import some_long


def real(target: Target, drafter: Drafter, tree: Topology, requests: list[Request], name: str) -> tuple[float, float]:
    """(tokens of a pass, nodes of a pass) of decoding with the target itself, row by row."""
    parts, nodes = parse_joined(name), list[int]()
    found = decode(target, requests, DecodeSettings(), drafter=joined_drafter(parts, drafter, target),
                   policy=joined_policy(parts, policy_named(parts.own, tree, drafter), target),
                   observer=lambda grown, *_: nodes.append(grown.size))
    return found.accepted_length, sum(nodes) / len(nodes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", some_long(["medusa-copy", "eagle", "prompt-tokens", "hydra", "falcon", "draft-lm",
                                              "hidden-transfer"], 9, 3))
def test_the_lengths_are_those_of_real_decoding(family: str, temperature: float, tiny_target_f64: Target) -> None:
    target = CASES[family].verifier(tiny_target_f64)
    torch.manual_seed(7)
    drafter = randomised(CASES[family].make(target).to(target.dtype))
    requests = [Request((5, 9, 30, 5, 9, 40 + row), row, 24, temperature) for row in range(4)]
    features = [target.encode(one, drafter.taps) for one in encoded_answers(target, requests)]
    ranks_PK = ranked_text(drafter, features).ranks_PK
    if hasattr(drafter, "count_ranks"):
        drafter.count_ranks(ranks_PK)
    tree, _ = search_tree(ranks_PK, 12)
    sizes = [2, 4, tree.size]
    found = trials(drafter, target, [(features[:1], tree), (features[1:], tree)], costs(), sizes, most=20)
    assert [one.policy for one in found][:3] == [f"static-{size}" for size in sizes]
    assert {one.kind for one in found} >= {"static", "static+lookup"}
    assert any(one.kind == "sparse" for one in found) == (family in ("prompt-tokens", "hidden-transfer"))
    short = [replace(one, max_new_tokens=20) for one in requests]
    for one in found:
        for counted, asked in ((one.chosen, short[:3]), (one.reported, short[3:])):
            assert counted is not None
            length, nodes = real(target, drafter, tree, asked, one.policy)
            assert counted.accepted_length == pytest.approx(length), one
            if one.kind == "static+lookup":
                assert counted.nodes == pytest.approx(nodes), one
    assert max(one.chosen.accepted_length for one in found) > 1.02, "nothing is accepted: the test would see nothing"
    assert trials(drafter, target, [([], tree)], costs(), sizes, 20) == ()


@pytest.mark.parametrize(("node", "sizes", "besides"), [
    (0.0, [2, 4, 8], [1, 4, 8]), (1.0, [2, 4, 8], [1, 2]), (0.0, [6], [6]), (0.0, [], [1])])
def test_copies_stand_next_to_the_fastest_trees(node: float, sizes: list[int], besides: list[int],
                                                tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, asked = CASES["medusa"].make(tiny_target), list[str]()
    monkeypatch.setattr(module, "walked_sizes", lambda *_: {
        f"static-{size}": Counted(accepted_length=size, nodes=size) for size in sizes})
    monkeypatch.setattr(module, "tried", lambda *given: asked.extend(given[-1]) or {})
    row = Features.from_rows([([5, 6, 7], [False, True, True])])
    trials(drafter, tiny_target, [([row], Topology.chain(8))], costs(node=node), sizes, 9)
    # The first is decoded once more, for its seconds.
    assert asked[1:] == [f"static-{size}+lookup-{COPIED}" for size in besides]


@pytest.mark.parametrize(("seconds", "answers"), [(0.0, 20), (2.6, 8), (60.0, 8), (2.4, 16)])
def test_a_slow_machine_tries_all_ways_on_fewer_answers(seconds: float, answers: int, tiny_target: Target,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, asked, clock = CASES["medusa"].make(tiny_target), list[int](), iter([0.0, seconds])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "walked_sizes", lambda _drafter, features, *_: asked.append(len(features)) or {})
    monkeypatch.setattr(module, "tried", lambda *given: asked.append(len(given[3])) or {})
    row = Features.from_rows([([5, 6, 7], [False, True, True])])
    trials(drafter, tiny_target, [([row] * 20, Topology.chain(8))] * 2, costs(), [2, 4], 9)
    assert asked == [8, *[answers] * 4]


def test_an_answer_is_cut_after_so_many_tokens() -> None:
    row = Features.from_rows([(list(range(9)), [False, True, True, True, False, True, True, False, True])])
    assert cut(row, 2).supervised_BL[0].tolist() == [False, True, True, False, False, True, True, False, True]


def test_the_interval_is_that_of_answers_drawn_anew() -> None:
    """Of answers that are all alike it is a point; one answer has none. Each counts by its passes."""
    assert Counted.of([[2, 2], [2, 2, 2]], 4.0) == Counted(accepted_length=2.0, nodes=4.0, interval=(2.0, 2.0))
    assert Counted.of([[3, 1], []], 4.0) == Counted(accepted_length=2.0, nodes=4.0)
    assert Counted.of([], 4.0) == Counted(accepted_length=1.0, nodes=4.0)
    low, high = Counted.of([[1] * 9, [3]] * 20, 4.0).interval or (0.0, 0.0)
    assert 1.1 < low < 1.2 < high < 1.35


def test_a_speedup_is_the_quotient_of_lengths_and_seconds() -> None:
    """Copies make passes of some rows larger, of several rows nearly all, and take time themselves."""
    cost, joined = costs(), trial("static-4+lookup-7", 2.9, 5.0)
    assert trial("static-4", 1.6).speedup(cost) == pytest.approx(1.6 * 0.1 / (0.13 + 0.01))
    assert joined.speedup(cost) == pytest.approx(2.9 * 0.1 / (0.14 + 0.01 + 0.001))
    assert joined.speedup(cost, 16) == pytest.approx(2.9 * 0.1 / (0.1 + 10 * 0.8 + 0.01 + 0.001))
    # Of nine nodes six are virtual: the pass of a timed tree of three.
    sparse = replace(trial("sparse-9", 1.6), virtual=2)
    assert sparse.speedup(cost) == pytest.approx(1.6 * 0.1 / (0.12 + 0.01))


def test_a_contended_timing_does_not_switch_off_a_draft_that_gains() -> None:
    """Further nodes of a pass waited for other programs, ten times as long as they take."""
    dear = costs(node=0.1)
    for excess, length, pays in ((0.0, 1.66, False), (0.5, 1.66, True), (0.5, 1.03, False)):
        assert trial("static-4", length).pays(replace(dear, excess=excess)) == pays


@pytest.mark.parametrize(("changes", "message"), [
    ({"policy": "static"}, "must name its nodes, got 'static'"),
    ({"policy": "static-4+lookup"}, r"must name its nodes, got 'static-4\+lookup'"),
    ({"chosen": (0.5, 4.0)}, "must lie between 1 and 1024, got 0.5 and 4"),
    ({"chosen": (2.0, float("nan"))}, "must lie between 1 and 1024, got 2 and nan"),
])
def test_impossible_trials_are_refused(changes: dict[str, object], message: str) -> None:
    length, nodes = changes.pop("chosen", (1.5, 4.0))  # type: ignore[misc]
    with pytest.raises(ValueError, match=message):
        Trial(**{"policy": "static-4", "chosen": Counted(accepted_length=length, nodes=nodes), **changes})


def mean_interval(values_N: np.ndarray, seed: int = 0) -> tuple[float, float]:
    found = interval(len(values_N), lambda drawn_RN: values_N[drawn_RN].mean(1), 0.95, seed)
    assert found is not None
    return found


def test_an_interval_agrees_with_scipy() -> None:
    values_N = np.random.default_rng(3).lognormal(size=60)
    expected = stats.bootstrap((values_N,), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    width = expected.high - expected.low
    assert mean_interval(values_N) == pytest.approx((expected.low, expected.high), abs=0.1 * width)


def test_an_interval_equals_a_plain_loop() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    means = sorted(sum(values[place] for place in draw) / len(values) for draw in draws(len(values), 7).tolist())
    assert mean_interval(np.array(values), 7) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert len(means) == DRAWS


def test_the_coverage_of_an_interval_is_about_the_stated_one() -> None:
    rng = np.random.default_rng(0)
    intervals = [mean_interval(rng.normal(size=40), seed) for seed in range(300)]
    held = sum(low <= 0 <= high for low, high in intervals)
    assert 270 <= held <= 298  # a percentile interval of 40 is a little too narrow


def test_draws_depend_on_the_seed_and_the_count_alone() -> None:
    assert (draws(5, 1) == draws.__wrapped__(5, 1)).all()
    assert not (draws(5, 1) == draws(5, 2)).all()
    assert draws(5, -1).shape == (DRAWS, 5)


def test_one_prompt_has_no_interval() -> None:
    assert interval(1, lambda drawn_RN: drawn_RN[:, 0].astype(float), 0.95) is None
    assert interval(0, lambda drawn_RN: drawn_RN[:, 0].astype(float), 0.95) is None
