"""The cost model: it recovers a known law, chooses as brute force does, and drafts only where that is faster."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle

import pytest
import torch
from draftsmith.modules import (
    Chain,
    CostCurve,
    CostModel,
    DecodeSettings,
    Request,
    Sample,
    StaticTree,
    Target,
    Topology,
    baseline,
    choose_size,
    decode,
    measure_cost,
)
from draftsmith.modules.files.json_records import record_of
from draftsmith.modules.tuning import step_timing
from draftsmith.modules.tuning.cost_model import NORMAL_MEDIAN, least_squares
from scipy.optimize import nnls
from support.drafters import ScriptedDrafter

Law = Callable[[int, int, int], float]
KINDS = [
    *((size, 1, 192) for size in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
    *((size, batch, 192) for batch, sizes in ((4, (1, 4, 16)), (8, (1, 8)), (16, (1, 4))) for size in sizes),
    *((size, batch, 768) for batch, sizes in ((1, (1, 16)), (4, (1, 8))) for size in sizes),
]
"""Sizes, batches and contexts that are measured on a real target."""


def roofline(size: int, batch: int, context: int) -> float:
    """30 ms up to 16 tokens, then 1 ms a token; reading and comparing with the context comes on top."""
    tokens = size * batch
    return 0.03 + 0.001 * max(0, tokens - 16) + 2e-6 * batch * context + 1e-7 * tokens * context


def draft(size: int, batch: int, context: int) -> float:
    """4 ms and a fifth of one a node; more rows cost a little."""
    return 0.004 + 0.0002 * size + 0.0001 * (batch - 1) + 1e-7 * batch * context


def sampled(passes: Law, drafts: Law, noise: float = 0.0) -> list[Sample]:
    rng = random.Random(0)
    return [
        Sample(size=size, batch=batch, context=context,
               pass_seconds=passes(size, batch, context) * (1 + rng.uniform(-noise, noise)),
               draft_seconds=drafts(size, batch, context) * (1 + rng.uniform(-noise, noise)) if size > 1 else 0.0)
        for size, batch, context in KINDS
    ]


def lengths(share: float, largest: int = 64) -> list[float]:
    """Expected accepted lengths that grow ever more slowly."""
    found = [1.0]
    for size in range(1, largest):
        found.append(found[-1] + share / size)
    return found


def test_a_known_law_is_recovered() -> None:
    model = CostModel.fit(sampled(roofline, draft), context=192)
    assert model.pass_error < 1e-6
    assert model.draft_error < 1e-6
    # Kinds of steps that were never measured, beyond the largest too.
    for size, batch, context in ((3, 1, 100), (40, 1, 500), (12, 8, 192), (64, 4, 1000), (64, 16, 2000)):
        assert model.pass_seconds(size, batch, context) == pytest.approx(roofline(size, batch, context), rel=1e-6)
        assert model.draft_seconds(size, batch, context) == pytest.approx(draft(size, batch, context), rel=1e-6)
    assert model.draft_seconds(1, 4, 192) == 0.0


def test_the_error_of_a_speedup_has_the_fit_of_both_parts_of_a_step() -> None:
    """A step of two nodes drafts for half of its time; a plain one does not."""
    model = CostModel(knots=(1,), pass_weights=(0.1, 0.0, 0.0, 0.0), draft_weights=(0.1, *[0.0] * 5), largest=2,
                      context=1, pass_error=0.02 * NORMAL_MEDIAN, draft_error=0.1 * NORMAL_MEDIAN, excess=0.04)
    assert model.relative_error(2) == pytest.approx((0.02**2 + 0.01**2 + 0.05**2 + 0.04**2) ** 0.5)


def test_noise_changes_the_law_a_little_and_nothing_gets_faster_by_being_larger() -> None:
    model = CostModel.fit(sampled(roofline, draft, noise=0.1), context=192)
    assert 0.01 < model.pass_error < 0.1
    for size, batch, context in KINDS:
        assert model.pass_seconds(size, batch, context) == pytest.approx(roofline(size, batch, context), rel=0.15)
    for batch in (1, 3, 8, 20):
        for find in (model.pass_seconds, model.draft_seconds):
            found = [find(size, batch, 300) for size in range(1, 100)]
            assert found == sorted(found)
            assert find(9, batch + 1, 300) >= find(9, batch, 300)
            assert find(9, batch, 600) >= find(9, batch, 300)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_size_is_that_of_brute_force(batch: int, share: float) -> None:
    model, expected = CostModel.fit(sampled(roofline, draft), context=192), lengths(share)

    def speed(size: int) -> float:
        step = roofline(size, batch, 192) + (draft(size, batch, 192) if size > 1 else 0.0)
        return batch * expected[size - 1] / step

    best = max(range(1, 65), key=speed)
    choice = choose_size(expected, model.curve(batch))
    assert choice.size == best
    assert choice.predicted_speedup == pytest.approx(speed(best) / speed(1), rel=1e-6)
    if best > 1:
        assert model.predict(expected[best - 1], best, batch) == pytest.approx(choice.predicted_speedup)


def test_larger_batches_get_smaller_trees() -> None:
    model = CostModel.fit(sampled(roofline, draft), context=192)
    sizes = [choose_size(lengths(0.9), model.curve(batch)).size for batch in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 8 > sizes[-1]


def test_no_drafting_when_the_draft_is_too_slow() -> None:
    slow = CostModel.fit(sampled(roofline, lambda size, batch, context: 0.2), context=192)
    choice = choose_size(lengths(0.9), slow.curve())
    assert (choice.size, choice.predicted_speedup) == (1, 1.0)
    assert slow.predict(2.0, 8) < 1


def test_sizes_between_those_known_are_interpolated() -> None:
    cost = CostCurve(
        sizes=(1, 2, 4, 8), pass_seconds=(1.0, 1.0, 1.2, 3.0), draft_seconds=(0.0, 0.1, 0.1, 0.1), context=10
    )
    assert choose_size((1.0, 1.5, 1.6, 1.7, 1.75, 1.8, 1.85, 1.9), cost).size == 2
    assert [cost.step_seconds(size) for size in (2, 3, 8, 9)] == pytest.approx([1.1, 1.2, 3.1, 3.1])


def test_the_model_survives_json() -> None:
    model = CostModel.fit(sampled(roofline, draft, noise=0.1), context=192)
    assert record_of(CostModel, json.loads(json.dumps(asdict(model))), "it", "copy it") == model


def test_a_model_needs_plain_passes() -> None:
    with pytest.raises(ValueError, match="needs passes of 1 node to compare with, got none"):
        CostModel.fit([sample for sample in sampled(roofline, draft) if sample.size > 1], context=192)


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_least_squares_are_scipys(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(30, 9, dtype=torch.float64, generator=generator)
    # Terms of very different size, one that is the sum of two others.
    terms = torch.cat([terms, terms[:, :1] + terms[:, 1:2]], dim=1) * torch.logspace(-4, 4, 10, dtype=torch.float64)
    wanted = torch.randn(30, dtype=torch.float64, generator=generator)
    weights = least_squares(terms, wanted)
    assert float(weights.min()) >= 0
    assert float((terms @ weights - wanted).norm()) == pytest.approx(nnls(terms.numpy(), wanted.numpy())[1], rel=1e-9)


@pytest.mark.parametrize("family", ["scripted", "recycling", "prompt_lookup", "first_layers"])
def test_cost_is_measured_for_every_drafter(tiny_target: Target, family: str) -> None:
    target = tiny_target
    drafter = ScriptedDrafter(target.vocab_size, [], "random") if family == "scripted" else baseline(family, target)[0]
    model = measure_cost(target, drafter, Topology.chain(7), context=20, repeats=2)
    assert (model.largest, model.context) == (8, 20)
    assert model.curve().sizes == tuple(range(1, 9))
    assert all(seconds > 0 for seconds in model.curve(2, 30).pass_seconds)
    assert all(seconds > 0 for seconds in model.curve(2, 30).draft_seconds[1:])


def clock(monkeypatch: pytest.MonkeyPatch, factors: Sequence[float]) -> None:
    """Steps of the tiny target by a stand-in clock: a second for each part, times the next factor in turn, as where
    other programs take the processor for some of them."""
    now, turn = [0.0], cycle(factors)

    def read(_device: torch.device) -> float:
        now[0] += next(turn)
        return now[0]

    monkeypatch.setattr(step_timing, "_now", read)


def test_the_shortest_of_the_timed_passes_counts(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven times the readings of a pass two or three are not disturbed: medians would hold the others."""
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    clock(monkeypatch, [1.0, 1.0, 9.0, 17.0, 30.0, 9.0, 5.0])
    found = measure_cost(tiny_target, drafter, Topology.chain(7), context=20, repeats=60, seconds=1e9)
    assert [found.pass_seconds(size) for size in (1, 4, 8)] == pytest.approx([1.0] * 3)
    assert found.contended
    clock(monkeypatch, [1.0, 1.01])
    assert not measure_cost(tiny_target, drafter, Topology.chain(7), context=20, repeats=3, seconds=1e9).contended


def test_a_contended_timing_does_not_switch_off_a_draft_that_gains() -> None:
    """A pass of four tokens waited for other programs, ten times as long as it takes; one of a token did not."""
    curve = CostCurve(sizes=(1, 2, 3, 4), pass_seconds=(1.0, 9.0, 10.0, 10.0), draft_seconds=(0.0, 0.1, 0.1, 0.1),
                      context=10)
    for busy, lengths_, size in ((False, (1.0, 1.4, 1.6, 1.66), 1), (True, (1.0, 1.4, 1.6, 1.66), 4),
                                 (True, (1.0, 1.01, 1.02, 1.03), 1)):
        assert choose_size(lengths_, replace(curve, contended=busy)).size == size


def test_a_tree_of_one_node_is_plain_decoding(tiny_target: Target) -> None:
    requests = [Request((5, 6, 7), 0, 9)]
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    plain, single = (
        decode(tiny_target, requests, DecodeSettings(ignore_eos=True), drafter=chosen, policy=policy)
        for chosen, policy in ((None, None), (drafter, StaticTree(Topology.chain(0))))
    )
    drafted = decode(tiny_target, requests, DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(1))
    assert single.generations == plain.generations
    assert (single.stats.draft_seconds, drafted.stats.draft_seconds > 0) == (0.0, True)


@pytest.mark.parametrize("weight", [-0.1, 1e308, float("inf"), float("nan")])
def test_weights_that_no_machine_has_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"pass_weights of a cost model must lie between 0 and 86400 s, got "):
        CostModel(knots=(1,), pass_weights=(0.1, weight, 0.0, 0.0), draft_weights=(), largest=1, context=1,
                  pass_error=0.0, draft_error=0.0)
