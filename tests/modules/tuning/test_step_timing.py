"""Seconds of steps: the shortest of those timed, read along a table."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from draftsmith.modules import Chain, CostTable, DecodeSettings, Request, StaticTree, Target, Topology, baseline, decode
from draftsmith.modules.files.json_records import record_of
from draftsmith.modules.tuning import step_timing
from draftsmith.modules.tuning.step_timing import CostCurve, along, measure_cost, timed_slots
from support.artifacts import costs
from support.drafters import ScriptedDrafter
from support.families import CASES, randomised


@pytest.mark.parametrize("drafter", ["scripted", "recycling", "prompt_lookup", "first_layers", "prompt-tokens",
                                     "kangaroo", "eagle"])
def test_seconds_are_measured_for_every_drafter(tiny_target: Target, drafter: str) -> None:
    target = tiny_target
    if drafter in CASES:
        target = CASES[drafter].verifier(target)
        one = randomised(CASES[drafter].make(target))
    elif drafter == "scripted":
        one = ScriptedDrafter(target.vocab_size, [], "random")
    else:
        one = baseline(drafter, target)[0]
    found = measure_cost(target, one, Topology.chain(min(5, (one.reach or 5))), context=20, repeats=1)
    assert [curve.batch for curve in found.curves] == [1, 2, 4, 8, 16]
    assert found.curves[0].sizes[:2] == (1, 2)
    assert (found.largest, found.curves[-1].sizes[-1]) == (32, 4)
    assert all(seconds > 0 for curve in found.curves for seconds in curve.pass_seconds)
    assert all(curve.draft_seconds[0] == 0 < min(curve.draft_seconds[1:]) for curve in found.curves)
    assert record_of(CostTable, json.loads(json.dumps(asdict(found))), "it", "copy it") == found


def test_the_plan_counts_the_slots_that_are_taken(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, start = list[int](), Target.start

    def watched(target: Target, rows: int, slots: int, *more: Any, **named: Any) -> Any:
        taken.append(rows * slots)
        return start(target, rows, slots, *more, **named)

    monkeypatch.setattr(Target, "start", watched)
    measure_cost(tiny_target, ScriptedDrafter(tiny_target.vocab_size, [], "random"), Topology.chain(7), context=20,
                 repeats=1)
    assert sum(taken) == timed_slots(8, 0, 20)


def clock(monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
    """Steps by a stand-in clock: each part takes one of these seconds by chance, as where other programs take the
    processor for some of them."""
    now, chance = [0.0], random.Random(0)

    def read(_device: torch.device) -> float:
        now[0] += chance.choice(seconds)
        return now[0]

    monkeypatch.setattr(step_timing, "_now", read)


def test_the_shortest_of_the_timed_passes_counts(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six parts two are not disturbed: a median would hold the others."""
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    clock(monkeypatch, [1.0, 1.0, 9.0, 17.0, 30.0, 5.0])
    found = measure_cost(tiny_target, drafter, Topology.chain(7), context=20, repeats=40, seconds=1e9)
    assert all(set(curve.pass_seconds) == {1.0} for curve in found.curves)
    assert found.contended
    # On a slow machine too, of which no third round is timed; what falls with more nodes is noise.
    found = measure_cost(tiny_target, drafter, Topology.chain(7), context=20, seconds=-1.0)
    assert found.contended
    assert all(list(curve.pass_seconds) == sorted(curve.pass_seconds) for curve in found.curves)
    # A plain pass that others disturbed does not make larger ones seem free: their own shortest times stay.
    monkeypatch.setattr(step_timing._Bench, "step", lambda bench, size: (30.0 if size == 1 else float(size), 0.1))
    found = measure_cost(tiny_target, drafter, Topology.chain(7), context=20, repeats=1)
    assert found.curves[0].pass_seconds[:4] == found.curves[0].sizes[1:2] + found.curves[0].sizes[1:4]
    monkeypatch.undo()
    clock(monkeypatch, [1.0, 1.01])
    assert not measure_cost(tiny_target, drafter, Topology.chain(7), context=20, repeats=3, seconds=1e9).contended


def test_seconds_between_those_timed_are_interpolated_and_the_last_slope_goes_on() -> None:
    found = costs(node=0.01, many=0.8)
    assert [found.pass_seconds(nodes) for nodes in (1, 3, 5.5, 11)] == pytest.approx([0.1, 0.12, 0.145, 0.2])
    assert [found.draft_seconds(nodes) for nodes in (1, 2, 20)] == pytest.approx([0.0, 0.01, 0.01])
    # Of rows that were not timed the next larger number holds, and the largest beyond it.
    assert [found.curve(rows).batch for rows in (1, 2, 16, 64)] == [1, 16, 16, 16]
    assert found.step_seconds(3, 16) == pytest.approx(found.pass_seconds(3, 16) + found.draft_seconds(3, 16))
    assert found.step_seconds(1, 64) == pytest.approx(found.pass_seconds(4, 16)), "as many nodes in all"
    assert found.predict(2.0, 4) == pytest.approx(2.0 * 0.1 / 0.14)
    # An engine's file may say that a larger pass is the faster one, but none takes no time.
    assert [along((1, 2, 4), (3.0, 2.0, 1.0), nodes) for nodes in (1, 3, 4, 9)] == [3.0, 1.5, 1.0, 1.0]


@pytest.mark.parametrize(("chance", "ahead", "gain"), [(0.6, 4, 1.13), (0.8, 8, 1.12), (0.9, 8, 1.26)])
def test_the_gain_of_drafting_meanwhile_is_that_of_a_simulation(chance: float, ahead: int, gain: float) -> None:
    """With passes that take as long as so many draft steps, whatever they hold."""
    cost = CostTable(curves=(CostCurve(batch=1, sizes=(1, 2, 4), pass_seconds=(1.0 * ahead,) * 3,
                                       draft_seconds=(0.0, 1.0, 3.0)),))
    assert cost.overlapped(chance) == (ahead, pytest.approx(gain, abs=0.005))
    draw, tokens, rounds, drafted = random.Random(0), 0, 40_000, False
    for _ in range(rounds):
        # The tokens that are verified with this pass: all that are drafted and unverified, and the next block's first.
        right = 0
        while right < (ahead if drafted else 1) and draw.random() < chance:
            right += 1
        whole = right == (ahead if drafted else 1)
        tokens, drafted = tokens + right + (not whole), whole
    best = max(sum(chance**guess for guess in range(count + 1)) / (ahead + count) for count in range(64))
    assert tokens / rounds / ahead / best == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize(("changes", "message"), [
    ({"sizes": (2, 4, 8, 9)}, "must ascend from 1"), ({"batch": 0}, "for 1 row or more"),
    ({"pass_seconds": (0.1,)}, "pass_seconds of a cost curve must be 4 numbers, got 1"),
    *(({"draft_seconds": (0.0, 0.1, wrong, 0.1)}, "draft_seconds of a cost curve must lie between 0 and 86400 s, got ")
      for wrong in (-0.1, 1e308, float("inf"), float("nan"))),
    *(({"pass_seconds": (fast, 0.1, 0.1, 0.1)}, "a pass must take 1e-09 s or more") for fast in (0.0, 1e-300)),
])
def test_seconds_that_no_machine_has_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(costs().curves[0], **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a cost table needs a curve"):
        replace(costs(), curves=())


def test_a_tree_of_one_node_is_plain_decoding(tiny_target: Target) -> None:
    requests = [Request((5, 6, 7), 0, 9)]
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    plain, single = (
        decode(tiny_target, requests, DecodeSettings(ignore_eos=True), drafter=chosen, policy=policy) for chosen,
        policy in ((None, None), (drafter, StaticTree(Topology.chain(0)))))
    drafted = decode(tiny_target, requests, DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(1))
    assert single.generations == plain.generations
    assert (single.stats.draft_seconds, drafted.stats.draft_seconds > 0) == (0.0, True)
