"""Layers to skip: the search finds those that the target can do without, judges as passes of one token do, and ends."""

from itertools import count

import pytest
import torch
from draftsmith.modules import DecodeSettings, Target, decode
from draftsmith.modules.baselines.registry import baseline
from draftsmith.modules.target.partial_passes import skipping
from draftsmith.modules.tuning.kept_layers import LONGEST, Text, judge, search
from support.answers import native_greedy, requests_for
from support.targets import random_target


def speeds(layers: int, tokens: int, accepted: float) -> float:
    """Of a target with six layers, each of which takes a second, the embedding and the output layer one together."""
    return accepted * 7 / (7 + tokens * (1 + layers))


@pytest.fixture(scope="module")
def target() -> Target:
    """Six layers, of which the second and the last two hardly change what comes out."""
    made = random_target(6)
    with torch.no_grad():
        for place in (1, 4, 5):
            for name, weight in made.layers[place].named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_(1e-3)
    return made


@pytest.fixture(scope="module")
def texts(target: Target) -> list[Text]:
    return [([*one.tokens, *native_greedy(target, one.tokens, 24)], len(one.tokens))
            for one in requests_for(target, 4, 24)]


def test_layers_that_hardly_matter_are_skipped_and_the_draft_pays(target: Target, texts: list[Text]) -> None:
    found, _ = search(target, texts, speeds, 10**9)
    assert {1, 4, 5}.isdisjoint(found.kept)
    assert found.speed_up > 1.05
    # As every policy names it; what was predicted is what decoding does.
    target.kept_layers = found.kept
    try:
        drafter, policy = baseline("layer_skip", target, found.tokens)
        requests = requests_for(target, 4, 24)
        result = decode(target, requests, DecodeSettings(ignore_eos=True), drafter=drafter, policy=policy)
    finally:
        target.kept_layers = ()
    assert [one.tokens for one in result.generations] == [
        native_greedy(target, one.tokens, one.max_new_tokens) for one in requests]
    assert abs(result.accepted_length * 7 / (7 + found.tokens * (1 + len(found.kept))) - found.speed_up) < 0.1


def test_a_choice_is_judged_as_each_of_its_tokens_is(target: Target, texts: list[Text]) -> None:
    kept, runs = (0, 2, 3), list[list[bool]]()
    for tokens, start in texts:
        with target.native() as model, skipping(target.layers, kept), torch.no_grad():
            runs.append([int(model(torch.tensor([tokens[:place]]), use_cache=False).logits[0, -1].argmax())
                         == tokens[place] for place in range(start, len(tokens))])
    expected = {}
    for length in range(1, LONGEST + 1):
        places = [next((n for n in range(length) if place + n >= len(run) or not run[place + n]), length)
                  for run in runs for place in range(len(run))]
        expected[length] = speeds(len(kept), length, 1 + sum(places) / len(places))
    found = judge(target, texts, kept, speeds)
    assert (found.tokens, found.speed_up) == max(expected.items(), key=lambda one: one[1])
    assert judge(target, texts, tuple(range(6)), speeds).speed_up == pytest.approx(
        max(speeds(6, length, 1 + sum(min(length, len(run) - place) for run in runs for place in range(len(run)))
                   / sum(map(len, runs))) for length in range(1, LONGEST + 1)))


def test_the_search_ends_with_its_seconds_and_knows_what_does_not_pay(target: Target, texts: list[Text]) -> None:
    ticks = count()
    found, judged = search(target, texts, speeds, 4, clock=lambda: float(next(ticks)))
    assert 1 <= judged <= 5
    assert found.kept
    # Where a draft step takes as long as the whole target, nothing pays.
    assert search(target, texts, lambda _, tokens, accepted: accepted / (1.5 + tokens), 0)[0].speed_up < 1
