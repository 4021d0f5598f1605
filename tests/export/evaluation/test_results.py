"""Figures of an evaluation: sums, medians and intervals."""

from typing import Any

import pytest
from draftsmith.export.evaluation.results import Answer, Comparison, Timing, acceptance_by_position, summarise
from draftsmith.modules import repeats_itself


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


def timing(drafted: float, plain: float, generated: float) -> Timing:
    return Timing(prompt_set="own", category="", drafted=drafted, plain=plain, generate=generated, seconds=2.0,
                  draft_seconds=0.5)


def test_accepted_length_is_a_ratio_of_sums_and_speed_a_median() -> None:
    found = summarise([answer((4,)), answer((1, 1, 1, 1))], [timing(30, 10, 12), timing(20, 11, 15), timing(90, 9, 14)])
    assert found.accepted_length == 8 / 5  # the mean over prompts would be 2.5
    assert (found.tokens_per_second, found.plain_tokens_per_second, found.generate_tokens_per_second) == (30, 10, 14)
    assert found.speedup == 30 / 14
    assert found.draft_time_share == 0.25


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
    ratios = summarise(alike, [timing(2 * speed, speed, speed / 2) for speed in (1.0, 10.0, 100.0)])
    assert ratios.speedup_interval == (2.0, 2.0)
    assert ratios.tokens_per_second_interval == (2.0, 200.0)
    assert summarise(alike, [timing(2, 1, 1)]).speedup_interval is None
