"""The measured form of linear layers: which one pays, from how many tokens on, and in which number format; and packed
linear layers of drafters: the same scores, packed again when a weight changes, never while training."""

import copy
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeSettings, Drafter, Request, StaticTree, Target, Topology, decode
from draftsmith.modules.target import linear_forms
from draftsmith.modules.target.linear_forms import LinearTimes, has_packed_product, measure_linears, worth_measuring
from draftsmith.modules.target.loading.tiny_model import tiny_model
from support.families import CASES, randomised
from torch import nn

AVX2 = ((36, 67, 56, 69, 99, 136), (22, 24, 26, 31, 39, 60))
"""Milliseconds, plain and packed, of one core of an AMD EPYC."""
AMX = ((61, 63, 84, 86, 90, 101), (77, 81, 80, 79, 82, 93))
"""The same shape as on a processor where packing pays from four tokens on."""


def times(plain: tuple[float, ...], packed: tuple[float, ...], dtype: str = "float32") -> LinearTimes:
    return LinearTimes(dtype=dtype, tokens=linear_forms.TOKENS, plain=plain, packed=packed)


@pytest.mark.parametrize(("plain", "packed", "expected"), [
    (*AVX2, 1),
    (*AMX, 4),
    # Packing doubles the memory: a gain of a few percent is not worth it.
    ((100,) * 6, (97,) * 6, 0),
    ((100,) * 6, (90,) * 6, 1),
    ((60,) * 6, (90,) * 6, 0),
    # Packed alone loses 3 % with one token of six: not enough for two forms.
    ((84, 100, 100, 100, 100, 100), (100, 60, 60, 60, 60, 60), 1),
    # Neither single form is good, both together are.
    ((10, 10, 10, 30, 30, 30), (30, 30, 30, 10, 10, 10), 8),
])
def test_the_form_that_pays_is_chosen(plain: tuple[float, ...], packed: tuple[float, ...], expected: int) -> None:
    assert times(plain, packed).fastest() == expected


def test_the_chosen_form_decides_the_seconds_of_each_token_count() -> None:
    assert times(*AMX).seconds(4) == (61, 63, 80, 79, 82, 93)
    assert times(*AMX).seconds(0) == AMX[0]
    assert times(*AMX).seconds(1) == AMX[1]
    assert times(*AMX).excess(4) == 1.0 < times(*AMX).excess(1) < times(*AMX).excess(0) + 0.1


def test_impossible_times_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens of timed passes must ascend from 1 or more, got \[2, 1\]"):
        LinearTimes(dtype="float32", tokens=(2, 1), plain=(1, 1), packed=(1, 1))
    with pytest.raises(ValueError, match=r"packed must be 1 times above 0, got \[0\.0\]"):
        LinearTimes(dtype="float32", tokens=(1,), plain=(1,), packed=(0.0,))


@pytest.mark.skipif(not has_packed_product(torch.float32), reason="this build of torch has no packed product")
def test_every_layer_counts_and_no_random_number_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 96) for _ in range(12)), nn.Linear(96, 64))
    now = iter(range(100_000))
    monkeypatch.setattr(linear_forms.time, "perf_counter", lambda: float(next(now)))
    before = torch.get_rng_state()
    found = measure_linears(model, [torch.float32], tokens=(1, 4))[torch.float32]
    assert torch.equal(torch.get_rng_state(), before)
    # Each timed sample takes one second by this clock: eight of twelve layers of one shape count twelve eighths.
    assert found == LinearTimes(dtype="float32", tokens=(1, 4), plain=(2.5, 2.5), packed=(2.5, 2.5))


@pytest.mark.skipif(not has_packed_product(torch.float32), reason="this build of torch has no packed product")
def test_the_fastest_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other programs disturb the second round of both forms.
    durations = iter([3.0, 4.0, 90.0, 95.0, 2.0, 5.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0])
    clock = [0.0]

    def tick() -> float:
        clock.append(clock[-1] + (next(durations) if len(clock) % 2 == 0 else 0.0))
        return clock[-1]

    monkeypatch.setattr(linear_forms.time, "perf_counter", tick)
    found = measure_linears(nn.Sequential(nn.Linear(8, 8)), [torch.float32], tokens=(1,))[torch.float32]
    assert (found.plain, found.packed) == ((2.0,), (4.0,))


@pytest.mark.parametrize(("half", "expected"), [
    (((25, 26, 31, 28, 35, 44), (15, 20, 19, 18, 24, 34)), torch.bfloat16),
    (((82, 88, 92, 94, 87, 94), (82, 88, 92, 94, 87, 94)), torch.float32),
    (((30, 26, 31, 28, 40, 60), (21, 23, 25, 30, 38, 58)), torch.float32),
])
def test_bfloat16_is_taken_where_it_pays(half: tuple[tuple[float, ...], tuple[float, ...]], expected: torch.dtype,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    found = {torch.float32: times(*AVX2), torch.bfloat16: times(*half, "bfloat16")}
    monkeypatch.setattr(linear_forms, "measure_linears", lambda _model, _dtypes, **_given: found)
    monkeypatch.setattr(linear_forms, "worth_measuring", lambda _model: True)
    monkeypatch.setattr(linear_forms, "has_packed_product", lambda _dtype: True)
    assert linear_forms.fastest_dtype(nn.Linear(4, 4)) == expected


def test_rows_at_once_are_compared_in_packed_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "worth_measuring", lambda _model: True)
    monkeypatch.setattr(linear_forms, "has_packed_product", lambda _dtype: True)
    for seconds, expected in ((0.92, torch.float32), (0.9, torch.bfloat16)):
        def measured(_model: Any, dtypes: Any, tokens: Any, seconds: float = seconds) -> Any:
            return {dtype: LinearTimes(dtype=str(dtype), tokens=tokens, plain=(0.1,),
                                       packed=(seconds if dtype == torch.bfloat16 else 1.0,)) for dtype in dtypes}

        monkeypatch.setattr(linear_forms, "measure_linears", measured)
        assert linear_forms.fastest_dtype(nn.Linear(4, 4), rows=40) == expected


def test_without_instructions_for_bfloat16_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "worth_measuring", lambda _model: True)
    monkeypatch.setattr(linear_forms, "has_packed_product", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(linear_forms, "measure_linears", None)
    assert linear_forms.fastest_dtype(nn.Linear(4, 4)) == torch.float32


def test_small_models_are_not_measured() -> None:
    assert not worth_measuring(tiny_model())
    assert worth_measuring(nn.Linear(2048, 2048))
    with torch.device("meta"):
        assert worth_measuring(nn.Linear(2048, 2048))


TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))
PACKABLE = [name for name in CASES if not name.startswith(("medusa-2", "prompt-tokens"))]
"""The others differ in their target alone, or have no linear layer."""


def decoded(drafter: Drafter, target: Target) -> list[float]:
    """Log-probabilities at the root after a text, from a state of their own, and after decoding a few tokens."""
    decode(target, [Request((5, 9, 11), 0, 4)], DecodeSettings(), drafter=drafter, policy=StaticTree(TREE))
    seen: list[float] = []
    original = drafter.expand

    def watch(state: object, frontier: object) -> object:
        scores = original(state, frontier)  # type: ignore[arg-type]
        seen.extend(scores.log_probs_BFHQ.flatten()[:40].tolist())
        return scores

    drafter.expand = watch  # type: ignore[assignment, method-assign]
    try:
        decode(target, [Request((5, 9, 11), 0, 4)], DecodeSettings(), drafter=drafter, policy=StaticTree(TREE))
    finally:
        del drafter.expand
    return seen


@pytest.mark.parametrize("name", PACKABLE)
def test_one_changed_element_is_packed_again(name: str, tiny_target: Target) -> None:
    drafter = randomised(CASES[name].make(tiny_target))
    assert linear_forms.can_pack(drafter)
    before = decoded(drafter, tiny_target)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear) and module.weight.numel() >= 1024:
                # The second element: a sum over a few of many passes it over.
                module.weight.view(-1)[1] += 3.0
    after, fresh = decoded(drafter, tiny_target), decoded(copy.deepcopy(drafter), tiny_target)
    assert after != pytest.approx(before, abs=1e-3)
    assert after == pytest.approx(fresh, abs=1e-5)
    assert not any("forward" in module.__dict__ for module in drafter.modules())


@pytest.mark.parametrize("name", PACKABLE)
def test_training_gives_the_packed_forms_back(name: str, tiny_target: Target) -> None:
    drafter = randomised(CASES[name].make(tiny_target))
    decoded(drafter, tiny_target)
    assert drafter.packing._layers is not None
    assert drafter.train().packing._layers is None


def test_a_target_that_is_not_packed_wants_no_packed_draft(tiny_target: Target) -> None:
    drafter = randomised(CASES["medusa-copy"].make(tiny_target))
    before = tiny_target.linears.packing
    assert before.packed_from == 1
    tiny_target.linears.use(linear_forms.Packing(packed_from=0))
    try:
        drafter.start(1, 32)
        assert drafter.packing._layers is None
    finally:
        tiny_target.linears.use(before)
    drafter.start(1, 32)
    assert drafter.packing._layers is not None
