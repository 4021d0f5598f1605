"""The check of sampled drafts: its p-values, positions of exact answers, and wrong rules that it sees."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from draftsmith.export.evaluation.lossless import positions
from draftsmith.export.evaluation.uniformity import distribution_of, p_value, rounding, visible_distance
from draftsmith.modules import DecodeSettings, Policy, Rejection, Request, SampledTree, Target, Topology, decode
from references import wrong_rules
from scipy.stats import kstest
from support.families import CASES, randomised
from support.tiers import some_long

TREE = SampledTree(Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0)))


def answers(target: Target, settings: DecodeSettings, policy: Policy, count: int = 100) -> list[float]:
    """Positions of the tokens of sampled answers, drafted by random heads."""
    drafter = randomised(CASES["medusa"].make(target))
    requests = [Request((5, 20 + index % 30, 7), index, 20, (0.5, 1.0)[index % 2]) for index in range(count)]
    result = decode(target, requests, settings, drafter=drafter, policy=policy)
    return [place for generation in result.generations
            for place in positions(target, generation.request, generation.tokens, settings)]


def test_the_p_value_is_that_of_scipy() -> None:
    chance = np.random.default_rng(0)
    for count in (30, 400, 5000):
        for power in (1.0, 1.05, 1.3):
            found = chance.random(count) ** power
            own, other = distribution_of(list(found)), kstest(found, "uniform")
            assert own is not None
            assert own.distance == pytest.approx(other.statistic)
            assert own.p_value == pytest.approx(other.pvalue, abs=0.03)
    assert distribution_of([]) is None
    for count in (100, 10_000):
        assert p_value(visible_distance(count), count) == pytest.approx(1e-3, rel=0.01)
    assert p_value(0.0, 10) == 1.0


@pytest.mark.parametrize("filters", some_long(
    [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.4}], 2))
def test_positions_of_exact_answers_are_uniform(filters: dict[str, float], tiny_target_f64: Target) -> None:
    settings = DecodeSettings(batch_size=25, ignore_eos=True, **filters)  # type: ignore[arg-type]
    found = distribution_of(answers(tiny_target_f64, settings, TREE))
    assert found is not None
    assert found.tokens == 2000
    assert found.p_value > 0.01


@pytest.mark.parametrize("name", some_long(["no_residual", "typical"], 9, 1))
def test_a_wrong_rule_is_seen(name: str, tiny_target_f64: Target) -> None:
    inside: AbstractContextManager[object] = wrong_rules.rejecting_by(getattr(wrong_rules, name))
    settings = DecodeSettings(batch_size=25, ignore_eos=True, lossy=Rejection())
    for context, seen in ((inside, True), (nullcontext(), False)):
        with context:
            found = distribution_of(answers(tiny_target_f64, settings, TREE, 150))
        assert found is not None
        assert found.differs is seen


def test_tokens_that_a_filter_excludes_are_counted(tiny_target_f64: Target) -> None:
    settings = DecodeSettings(batch_size=25, ignore_eos=True, top_k=6)
    every = decode(tiny_target_f64, [Request((5, 9), index, 20, 1.0) for index in range(50)], settings).generations
    sound = [place for one in every for place in positions(tiny_target_f64, one.request, one.tokens, settings)]
    found = distribution_of(sound)
    assert found is not None
    assert (found.impossible, found.differs) == (0, False)
    foreign = [place for one in every for place in positions(
        tiny_target_f64, one.request, [one.tokens[0], *[1] * 2], settings)]
    wrong = distribution_of([*sound, *foreign])
    assert wrong is not None
    assert wrong.impossible > 10
    assert wrong.differs


def test_rounding_in_half_precision_is_allowed_for() -> None:
    found = list((np.arange(100_000) + 0.5) / 100_000 * 0.99)
    strict, loose = distribution_of(found), distribution_of(found, rounding(torch.bfloat16, 0.05))
    assert strict is not None
    assert loose is not None
    assert (strict.differs, loose.differs) == (True, False)
    assert rounding(torch.float32, 0.05) == 0.0
    assert rounding(torch.bfloat16, 1.0) == pytest.approx(0.002)


def test_positions_lie_inside_the_share_of_their_token(tiny_target_f64: Target) -> None:
    request, answer = Request((5, 9), 3, 3, 0.8), [11, 12, 11]
    with tiny_target_f64.native() as model:
        logits_TV = model(torch.tensor([[5, 9, *answer]])).logits[0, 1:-1]
    for place, found in enumerate(positions(tiny_target_f64, request, answer, DecodeSettings())):
        shares_V = (logits_TV[place] / 0.8).softmax(-1)
        own = float(shares_V[answer[place]])
        likelier = float(shares_V[shares_V > own].sum())
        assert likelier <= found <= likelier + own
