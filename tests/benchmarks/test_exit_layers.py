"""The exit layer by predicted speed: costs of the parts of a pass, expected lengths, the choice."""

import time
from typing import Any

import pytest
import torch
from benchmarks.exit_layers import (
    LayerCosts,
    chain_lengths,
    measure_layers,
    rank_exits,
    untrained_lengths,
)
from draftsmith.modules import DecodeSettings, Features, Kangaroo, KangarooConfig, Request, Target, UserError, decode
from support.targets import random_target

COSTS = LayerCosts(layers=((1.0, 1.1, 1.2),) * 4, rest=(0.5, 0.6, 0.7), adapter=0.25)


def answers(target: Target) -> list[Features]:
    """Greedy answers of the target."""
    requests = [Request((5 + row, 9, 33), row, 20) for row in range(3)]
    found = decode(target, requests, DecodeSettings(ignore_eos=True)).generations
    return [Features.from_rows([([*one.request.tokens, *one.tokens], [False] * 3 + [True] * len(one.tokens))])
            for one in found]


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert COSTS.plain == 4.5
    # Two drafts of one layer, adapter and output; then the last token, three layers over three nodes and the output.
    assert COSTS.step(1, 2) == pytest.approx(2 * (1.0 + 0.25 + 0.5) + 1.0 + 3 * 1.2 + 0.7)


def test_the_fastest_exit_comes_first() -> None:
    lengths = {1: (1.3, 1.4), 2: (1.9, 2.7), 3: (1.05, 1.1)}
    ranked = rank_exits(COSTS, lengths)
    assert [(choice.exit_layer, choice.length) for choice in ranked] == [(2, 2), (1, 1), (3, 1)]
    assert ranked[0].expected_accepted_length == 2.7
    assert ranked[0].predicted_speedup == pytest.approx(2.7 * 4.5 / COSTS.step(2, 2))
    assert ranked[2].predicted_speedup == pytest.approx(1.05 * 4.5 / COSTS.step(3, 1))
    # A chain whose pass was not timed is not considered.
    assert rank_exits(COSTS, {2: (1.1, 1.2, 900.0)})[0].length < 3


def test_lengths_count_the_tokens_before_the_first_wrong_one() -> None:
    target = random_target(3)
    features, found = answers(target), untrained_lengths(target, answers(target), [1, 2])
    for exit_layer, lengths in found.items():
        drafter = Kangaroo.create(KangarooConfig(exit_layer=exit_layer), target)
        right, counted = [], 0
        for batch in features:
            tokens = batch.tokens_BL[0]
            hidden = drafter(target.encode(batch, drafter.taps)).hidden_BLKD[0, :, 0]
            right.append((drafter.project(hidden, 0).argmax(-1)[:-1] == tokens[1:]).tolist())
        totals = [0.0] * len(lengths)
        for row in right:
            for start in range(2, len(row)):
                counted += 1
                run = next((place for place, hit in enumerate(row[start:]) if not hit), len(row) - start)
                totals = [total + min(run, length) for length, total in enumerate(totals, start=1)]
        assert lengths == pytest.approx([1 + total / counted for total in totals])
        assert lengths == chain_lengths(drafter.eval(), [target.encode(batch, drafter.taps) for batch in features])


def test_a_slow_layer_is_seen_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(3)

    now, spent = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now() + spent[0])

    def slow(*_: Any) -> None:
        spent[0] += 1000.0

    # Its attention: the time lies between the start and the end of the layer.
    handle = target.layers[1].self_attn.register_forward_hook(slow)
    costs = measure_layers(target, context=8, repeats=2, longest=2)
    handle.remove()
    assert len(costs.layers) == 3
    assert all(len(part) == 3 for part in (*costs.layers, costs.rest))
    assert min(costs.layers[1]) >= 999 > max(*costs.layers[0], *costs.layers[2], costs.adapter)
    assert min(*costs.rest, costs.adapter) > 0


def test_an_exit_after_all_layers_is_refused() -> None:
    target = random_target(3)
    with torch.no_grad(), pytest.raises(UserError, match="exit_layer must be below the 3 layers of random, got 3"):
        untrained_lengths(target, answers(target), [1, 3])
