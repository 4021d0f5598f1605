"""Figures of an evaluation: sums, medians and intervals; the check of sampled drafts by their p-values, positions of
exact answers, and wrong rules that it sees; three answers that are shown, with the author of each token."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.export import EvaluateConfig, EvaluationRun, Method, Question, evaluate
from draftsmith.export.evaluation.lossless import positions
from draftsmith.export.evaluation.results import Answer, Comparison, Timing
from draftsmith.export.evaluation.summary import (
    _chosen,
    acceptance_by_position,
    distribution_of,
    p_value,
    rounding,
    summarise,
    visible_distance,
)
from draftsmith.modules import Chain, Policy, Rejection, SampledTree, StaticTree, Target, Topology, decode
from draftsmith.modules.decoding.requests import DecodeSettings, Request, repeats_itself
from draftsmith.modules.families.medusa.drafter import Medusa, MedusaConfig
from references import wrong_rules
from scipy.stats import kstest
from support.drafters import ScriptedDrafter
from support.families import CASES, randomised
from support.tiers import some_long


def test_acceptance_by_position_sums_to_the_accepted_length() -> None:
    emitted = [1, 3, 2, 1, 5, 3]
    shares = acceptance_by_position(emitted)
    assert shares == (4 / 6, 3 / 6, 1 / 6, 1 / 6)
    assert 1 + sum(shares) == pytest.approx(sum(emitted) / 6)
    assert acceptance_by_position([]) == ()


def test_repetition_is_counted_on_4_grams() -> None:
    assert not repeats_itself([])
    assert not repeats_itself(range(40))
    assert repeats_itself([1, 2, 3, 4] * 10)
    # 10 grams, of which 3 occurred before: exactly 30 %, which is not over 30 %.
    assert not repeats_itself([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6])


def answer(emitted: tuple[int, ...], **changes: Any) -> Answer:
    fields = {"question": 0, "turn": 1, "prompt_set": "own", "category": "", "tokens": (1,) * (1 + sum(emitted)),
              "emitted": emitted, "truncated": False, "comparison": Comparison(divergence=None)}
    return Answer(**(fields | changes))


def timing(drafted: float, plain: float, generated: float, efficiency: float = 1.0) -> Timing:
    return Timing(prompt_set="own", category="", drafted=drafted, plain=plain, generate=generated,
                  efficiency=efficiency, seconds=2.0, draft_seconds=0.5)


def test_accepted_length_is_a_ratio_of_sums_and_baselines_are_medians() -> None:
    found = summarise([answer((4,)), answer((1, 1, 1, 1), question=1)],
                      [timing(30, 10, 12), timing(20, 11, 15), timing(90, 9, 14)])
    assert found.accepted_length == 8 / 5  # the mean over prompts would be 2.5
    assert (found.plain_tokens_per_second, found.generate_tokens_per_second) == (10, 14)
    assert found.block_efficiency == 10 / 7
    assert found.tokens_per_second == 30 * (10 / 7)
    assert found.speedup == 30 * (10 / 7) / 14
    assert found.draft_time_share == 0.25


def test_speed_is_that_of_a_pass_times_the_tokens_that_passes_have_on_all_prompts() -> None:
    # Ten passes a second on every prompt. The timed ones happen to be easy: a median of their speeds would be 40.
    answers = [answer((3,) * 3, question=0, tokens=(1,) * 12)]
    answers += [answer((1,) * 11, question=number, tokens=(1,) * 12) for number in range(1, 6)]
    timings = [timing(40, 10, 8, efficiency=4.0), timing(30, 10, 8, efficiency=3.0), timing(50, 10, 8, efficiency=5.0)]
    found = summarise(answers, timings)
    assert found.tokens_per_second == pytest.approx(10 * found.block_efficiency)
    assert found.speedup == pytest.approx(found.block_efficiency)
    assert found.block_efficiency == 72 / 64
    # What varies is the prompts, and with them the tokens of a pass.
    low, high = found.speedup_interval or (0, 0)
    assert low == pytest.approx(1.0)
    assert 1.2 < high < 2.0


def test_with_every_prompt_timed_the_speed_is_that_of_all_tokens_over_all_seconds() -> None:
    # Passes of equal seconds: 0.1 each.
    answers = [answer((2,) * 4, question=0, tokens=(1,) * 10), answer((1,) * 9, question=1, tokens=(1,) * 10)]
    found = summarise(answers, [timing(20, 10, 10, efficiency=2.0), timing(10, 10, 10, efficiency=1.0)])
    assert found.tokens_per_second == pytest.approx(20 / (0.1 * 15))


def test_an_answer_of_one_token_has_no_pass() -> None:
    found = summarise([answer(())], [])
    assert (found.new_tokens, found.target_passes, found.accepted_length) == (1, 0, 0.0)


def test_intervals_are_over_questions_and_paired() -> None:
    def two_turns(question: int, emitted: int) -> list[Answer]:
        return [answer((emitted,) * 4, question=question, turn=turn) for turn in (1, 2)]

    alike = [one for question in range(5) for one in two_turns(question, 3)]
    assert summarise(alike, []).accepted_length_interval == (3.0, 3.0)
    low, high = summarise([*two_turns(0, 1), *two_turns(1, 3)], []).accepted_length_interval or (0, 0)
    assert (low, high) == (1.0, 3.0)
    # Speeds differ from prompt to prompt a hundredfold, the ratio never: the interval of the ratio has no width.
    efficiency = len(alike[0].tokens) / (1 + len(alike[0].emitted))
    ratios = summarise(alike, [timing(2 * speed, speed, speed / 2, efficiency) for speed in (1.0, 10.0, 100.0)])
    assert ratios.speedup_interval == pytest.approx((2.0, 2.0))
    assert ratios.tokens_per_second_interval == pytest.approx((2.0, 200.0))
    assert summarise(alike, [timing(2, 1, 1)]).speedup_interval is None


# Uniformity of sampled tokens -----------------------------------------------------------------------------------------


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


# Answers that are shown -----------------------------------------------------------------------------------------------


PROMPTS = [(1, 5 + place, 40, 9) for place in range(6)]
SETS = {"own": [Question.single(tokens) for tokens in PROMPTS[:3]],
        "written": [Question(prompt=lambda _, tokens=tokens: tokens, text="<b>hi</b>") for tokens in PROMPTS[3:]]}
CONFIG = EvaluateConfig(max_new_tokens=21, speed_prompts=1)


def mixed(target: Target, mode: str = "mixed") -> Method:
    """A method that knows the answers, and guesses wrong now and then."""
    requests = [Request(tokens, index, 40) for index, tokens in enumerate(PROMPTS)]
    answers = decode(target, requests, DecodeSettings(batch_size=6)).generations
    texts = [[*tokens, *answer.tokens] for tokens, answer in zip(PROMPTS, answers, strict=True)]
    return Method(name=mode, family="scripted", drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                  policy_for=lambda _, __: Chain(3))


def run(target: Target, method: Method, config: EvaluateConfig = CONFIG) -> EvaluationRun:
    return evaluate(target, [method], SETS, config, progress=False)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_three_answers_are_the_plain_ones(tiny_target_f64: Target, temperature: float) -> None:
    found = run(tiny_target_f64, mixed(tiny_target_f64), replace(CONFIG, temperatures=temperature))
    requests = [Request(tokens, index, 21, temperature) for index, tokens in enumerate(PROMPTS)]
    plain = decode(tiny_target_f64, requests, DecodeSettings(batch_size=6)).generations
    texts = [tiny_target_f64.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in plain]
    assert [one.rank for one in found.samples] == ["best", "median", "worst"]
    assert len({texts.index("".join(token.text for token in one.tokens)) for one in found.samples}) == 3


def test_authors_agree_with_the_passes(tiny_target_f64: Target) -> None:
    for one in run(tiny_target_f64, mixed(tiny_target_f64)).samples:
        passes = 1 + sum(not token.guessed for token in one.tokens[1:])
        # Every pass ends with a token of the target's; the limit may cut the last one.
        assert one.accepted_length == pytest.approx((len(one.tokens) - 1) / (passes - 1), rel=0.2)
        assert sum(token.guessed for token in one.tokens) == len(one.tokens) - passes
        assert not any(token.rejected for token in one.tokens if token.guessed)
    wrong = run(tiny_target_f64, mixed(tiny_target_f64, "wrong")).samples
    assert all(one.accepted_length == 1 and not any(token.guessed for token in one.tokens) for one in wrong)
    assert all(len(token.rejected) == 1 for one in wrong for token in one.tokens[1:])


def test_the_json_keeps_them(tiny_target_f64: Target) -> None:
    found = run(tiny_target_f64, mixed(tiny_target_f64))
    kept = json.loads(json.dumps(found.to_dict(), allow_nan=False))["sample_answers"]
    assert [one["rank"] for one in kept] == ["best", "median", "worst"]
    assert all(one["prompt"] == "<b>hi</b>" for one in kept if one["prompt_set"] == "written")
    assert all(one["prompt"] for one in kept)
    assert kept[0]["tokens"][0].keys() == {"text", "guessed", "rejected"}


def test_real_heads_and_trees_are_recorded(tiny_target_f64: Target) -> None:
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0)]))
    method = Method(name="medusa", family="medusa", policy_for=lambda _, __: tree,
                    drafter=Medusa.create(MedusaConfig(num_heads=2), tiny_target_f64))
    found = run(tiny_target_f64, method)
    assert max(len(token.rejected) for one in found.samples for token in one.tokens) == 2
    lengths = [one.accepted_length for one in found.samples]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= found.evaluations[0].overall.accepted_length >= lengths[-1]


def an_answer(number: int, emitted: tuple[int, ...], **changes: Any) -> Answer:
    fields: dict[str, Any] = {"question": number, "turn": 1, "prompt_set": "own", "category": "",
                              "tokens": (7,) * (1 + sum(emitted)), "emitted": emitted, "truncated": False,
                              "comparison": None}
    return Answer(**(fields | changes))


def test_best_median_and_worst_are_chosen_among_long_answers() -> None:
    answers = [an_answer(0, (4,)), an_answer(1, (1,) * 20), an_answer(2, (3,) * 9), an_answer(3, (2,) * 10),
               an_answer(4, (2,) * 11), an_answer(5, (5,) * 9, turn=2), an_answer(6, ())]
    assert {rank: one.question for rank, one in _chosen(answers).items()} == {"best": 2, "median": 4, "worst": 1}
    assert {rank: one.question for rank, one in _chosen(answers[:2]).items()} == {"best": 0, "median": 1}
    assert _chosen([an_answer(6, ())]) == {}
