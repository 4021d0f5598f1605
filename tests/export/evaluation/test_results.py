"""Figures of an evaluation: sums, medians and intervals."""

from typing import Any

import pytest
from draftsmith.export.evaluation.results import Answer, Comparison, Timing
from draftsmith.export.evaluation.summary import acceptance_by_position, summarise
from draftsmith.modules.decoding.requests import repeats_itself


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
