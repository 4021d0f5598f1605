"""The schedule of an evaluation: numbers, limits, timed groups, the amount of work, and its budget: what fits into its
minutes is decoded, however the speed of the machine changes."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from draftsmith.export import EvaluateConfig, Method, Question, evaluate
from draftsmith.export.evaluation.evaluate import opening
from draftsmith.export.evaluation.schedule import (
    CLOSING_SHARE,
    UNTIMED_ROWS,
    Budget,
    Schedule,
    by_prompt_set,
    require_context,
    spread,
)
from draftsmith.modules import Chain, Target, Union, UserError
from draftsmith.modules.progress import ProgressLine


def questions(count: int, turns: int = 1) -> list[Question]:
    return [Question(prompt=lambda _answers, place=place: (1, place), turns=turns) for place in range(count)]


def method(name: str, lengths: dict[int, int] | None = None) -> Method:
    """A method whose chain has this length at each batch size."""
    return Method(name=name, family="none", drafter=None,
                  policy_for=lambda rows, _temperature: None if lengths is None else Chain(lengths[rows]))


def schedule(config: EvaluateConfig, *methods: Method, **sets: list[Question]) -> Schedule:
    return Schedule.of(methods or (method("plain"),), sets, config)


def test_a_limit_changes_no_number() -> None:
    sets = {"one": questions(6), "two": questions(5)}
    whole = schedule(EvaluateConfig(speed_prompts=0), **sets)
    assert [entry.number for entry in whole.entries] == list(range(11))
    limited = schedule(EvaluateConfig(speed_prompts=0, limit=2), **sets)
    assert [(entry.prompt_set, entry.number) for entry in limited.entries] == [
        ("one", 0), ("one", 3), ("two", 6), ("two", 8)]
    assert {name: len(members) for name, members in by_prompt_set(limited.entries).items()} == {"one": 2, "two": 2}


def test_timed_groups_are_full_and_of_the_same_questions_at_every_size() -> None:
    found = schedule(EvaluateConfig(speed_prompts=4, batch_sizes=(1, 2, 4)), one=questions(9), two=questions(5))
    numbers = {size: [[entry.number for entry in group] for group in found.groups(found.entries, size)]
               for size in (1, 2, 4)}
    assert numbers[4] == [[0, 2, 4, 6], [9, 10, 11, 12]]
    assert numbers[2] == [[0, 2], [4, 6], [9, 10], [11, 12]]
    assert numbers[1] == [[number] for number in sorted(found.timed)]
    assert found.timed == {0, 2, 4, 6, 9, 10, 11, 12}


def test_the_work_counts_every_answer() -> None:
    """Two turns each: 4 timed by 4 (two methods, two baselines), 6 by the target alone, and these 6 once a tree."""
    config = EvaluateConfig(speed_prompts=2, batch_sizes=(1, 2))
    same, other = method("same", {1: 3, 2: 3}), method("other", {1: 4, 2: 2})
    found = schedule(config, same, other, talk=questions(5, turns=2))
    assert found.answers == 2 * 4 * 4 + 6 + (1 + 2) * 6


def test_unions_of_other_parts_share_no_answers() -> None:
    """Though their passes have the same number of nodes."""
    union = Method(name="union", family="none", drafter=None,
                   policy_for=lambda rows, _temperature: Union([Chain(min(rows, 2)), Chain(5)], 6))
    assert [union.shape(rows, 0.0) for rows in (1, 2, 4)] == [(6, 2, 6), (6, 3, 6), (6, 3, 6)]
    assert union.shapes((1, 2, 4), 0.0) == {(6, 2, 6): 1, (6, 3, 6): 2}
    assert method("chain", {1: 3}).shape(1, 0.0) == (4,)


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(UserError, match="at least one method"):
        Schedule.of([], {"one": questions(1)}, EvaluateConfig())
    with pytest.raises(UserError, match="2 methods are called 'plain'; name each artifact and baseline once"):
        schedule(EvaluateConfig(), method("plain"), method("plain"), one=questions(1))
    with pytest.raises(UserError, match="no prompt to evaluate on"):
        schedule(EvaluateConfig(), one=[])
    with pytest.raises(UserError, match="the set 'one' has 3, whole batches of every size need at least 4"):
        schedule(EvaluateConfig(batch_sizes=4), one=questions(3))


def test_a_choice_is_spread_over_the_members() -> None:
    assert spread("abcdefgh", 3) == ["a", "c", "f"]
    assert spread("ab", 5) == ["a", "b"]
    assert spread("ab", 0) == []


def test_the_sets_take_turns_and_every_start_of_a_set_covers_its_categories_evenly() -> None:
    """Timed bundles hold whole batches of every size, the others one batch; each set's first timed one comes first."""
    sets = {"own": questions(20), "written": [replace(question, category=f"kind{kind}") for kind in range(3)
                                              for question in questions(16)]}
    found = schedule(EvaluateConfig(speed_prompts=4, batch_sizes=(1, 2)), **sets)
    bundles = found.bundles
    assert sorted(entry.number for bundle in bundles for entry in bundle) == list(range(68))
    assert [(bundle[0].prompt_set, len(bundle)) for bundle in bundles[:2]] == [("own", 2), ("written", 2)]
    assert all(len({entry.number in found.timed for entry in bundle}) == 1 for bundle in bundles)
    assert all(len(bundle) <= UNTIMED_ROWS for bundle in bundles)
    assert all(bundle[0].number in found.timed for bundle in bundles[:2])
    # Wherever minutes end the evaluation, as many of one set as of the other are decoded, but for a timed bundle.
    for end in range(2, len(bundles) + 1):
        counts = Counter(entry.prompt_set for bundle in bundles[:end] for entry in bundle)
        assert counts["own"] == 20 or abs(counts["own"] - counts["written"]) <= 2
    whole = Counter((entry.prompt_set, entry.question.category) for entry in found.entries
                    if entry.number not in found.timed)
    for end in range(1, len(bundles) + 1):
        untimed = Counter((entry.prompt_set, entry.question.category) for bundle in bundles[:end] for entry in bundle
                          if entry.number not in found.timed)
        shares = [untimed[kind] / count for kind, count in whole.items() if kind[0] == "written"]
        assert max(shares) - min(shares) <= max(1 / count for count in whole.values()) + 1e-9


def test_all_answers_to_a_question_are_in_one_bundle() -> None:
    """Drafters that remember earlier text forget it between bundles; the order is that of single answers."""
    sets = {"own": questions(20), "written": [replace(question, category=f"kind{place % 3}")
                                              for place, question in enumerate(questions(48))]}
    single, found = (schedule(EvaluateConfig(speed_prompts=4, batch_sizes=(1, 2), temperatures=1.0, answers=answers),
                              **sets) for answers in (1, 3))
    assert [[(entry.number + answer * 68, answer) for entry in bundle for answer in range(3)]
            for bundle in single.bundles] == [[(entry.number, entry.answer) for entry in bundle]
                                              for bundle in found.bundles]
    for size in (1, 2):
        assert all(len(group) == size for bundle in found.bundles for group in found.groups(bundle, size))


def test_turns_and_their_longest_answers_must_fit_the_context_together() -> None:
    """Ten tokens a turn, and eight an answer: two turns take 36 with both answers."""
    sets = {"talk": [Question(prompt=lambda answers: [0] * 10 * (1 + len(answers)), turns=2, text="Tell me more.")]}
    config = EvaluateConfig(speed_prompts=0, max_new_tokens=8)
    require_context(sets, config, 36)
    with pytest.raises(UserError, match=r"a question of the set 'talk' \('Tell me more\.'\) has 20 tokens; with 2 "
                                        r"answers of evaluate\.max_new_tokens 8 it exceeds .* of 35; lower .* to 7"):
        require_context(sets, config, 35)
    with pytest.raises(UserError, match="leave it out, or choose another target"):
        require_context(sets, config, 20)


def test_only_questions_that_a_limit_leaves_must_fit() -> None:
    sets = {"one": [*questions(1), Question.single([0] * 99)]}
    require_context(sets, EvaluateConfig(limit=1, max_new_tokens=8), 50)
    with pytest.raises(UserError, match="has 99 tokens"):
        require_context(sets, EvaluateConfig(max_new_tokens=8), 50)


# The budget -----------------------------------------------------------------------------------------------------------


SIX_AND_MORE = {"own": [Question.single((1, 2, 3, 4)) for _ in range(6)],
        "written": [Question.single((1, 2, 3, 4), f"kind{kind}") for kind in range(3) for _ in range(8)]}
PLAIN = Method(name="plain", family="none", drafter=None)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def worked(budget: Budget, clock: Clock, pieces: list[float], slow_from: float = float("inf")) -> Iterator[float]:
    """Work so many seconds on each piece, three times as long from some time on; yields when each one started."""
    for seconds in budget.fitting(pieces, least=2, share=1 - CLOSING_SHARE, sort=lambda one: one < 5):
        started = clock.now - 100.0
        clock.now += seconds * (3 if started >= slow_from else 1)
        yield started


@pytest.mark.parametrize("slow_from", [float("inf"), 0.0, 300.0])
def test_a_budget_is_kept_with_fast_and_slow_bundles(slow_from: float) -> None:
    """Also where everything takes three times as long from the middle on."""
    clock, pieces = Clock(), [2.0, 2.5, 10.0, 11.0] * 100
    budget = Budget(10.0, clock)
    starts = list(worked(budget, clock, pieces, slow_from))
    longest = 33.0 if slow_from < 600 else 11.0
    assert max(starts) <= 540, "nothing starts after the share for decoding"
    assert abs(budget.elapsed - 540) <= longest, "it ends one bundle before or after"
    assert 2 < len(starts) < len(pieces)


def test_without_a_budget_everything_is_decoded() -> None:
    clock = Clock()
    assert len(list(worked(Budget(None, clock), clock, [1e6] * 50))) == 50


def test_the_least_is_done_whatever_time_it_is_and_no_more() -> None:
    clock = Clock()
    assert len(list(worked(Budget(1e-6, clock), clock, [1e6] * 50))) == 2


def test_a_slow_first_bundle_says_nothing_of_the_next() -> None:
    """It warms up: a compiler may take most of the minutes."""
    clock = Clock()
    assert len(list(worked(Budget(10.0, clock), clock, [1.0, 400.0, *[10.0] * 50]))) > 10


def test_the_line_ends_with_the_minutes_its_total_stays_and_it_shows_what_drafts_add() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    budget.line = ProgressLine("evaluate", 1000, "answer", seconds_left=lambda: budget.limit - budget.elapsed,
                               shown=False)
    clock.now += 60.0
    budget.count(7)
    assert "accepted" not in str(budget.line)
    budget.count(3, [[3, 1], [2], [1]])
    assert re.fullmatch(r"evaluate: 10 of 1,000 answer in 0:00, 9:00 left, .*, accepted 1\.75", str(budget.line))


def test_the_opening_names_the_work_and_its_limit() -> None:
    config = EvaluateConfig(max_new_tokens=30, speed_prompts=2)
    said = opening(Schedule.of([PLAIN], SIX_AND_MORE, config))
    assert said.startswith("30 prompts (6 own, 24 written) are decoded with plain: ")
    assert said.endswith("answers of at most 30 tokens, greedy; 4 of them are timed against decoding without drafts")
    short = EvaluateConfig(max_new_tokens=30, speed_prompts=2, budget_minutes=1)
    assert opening(Schedule.of([PLAIN], SIX_AND_MORE, short)) == (
        f"{said}. What does not fit into evaluate.budget_minutes 1 is left out")


def test_an_evaluation_in_bundles_finds_what_one_in_a_piece_does(tiny_target_f64: Target) -> None:
    whole, cut = (evaluate(tiny_target_f64, [PLAIN], SIX_AND_MORE, EvaluateConfig(
        max_new_tokens=12, speed_prompts=2, budget_minutes=minutes), progress=False) for minutes in (None, 60.0))
    assert cut.left_out == whole.left_out == ()
    for one in ("prompts", "new_tokens", "target_passes", "lossless", "accepted_length_interval"):
        assert getattr(cut.evaluations[0].overall, one) == getattr(whole.evaluations[0].overall, one)


def test_a_partial_evaluation_says_so(tiny_target: Target) -> None:
    config = EvaluateConfig(max_new_tokens=12, speed_prompts=2, budget_minutes=1e-6)
    found = evaluate(tiny_target, [PLAIN], SIX_AND_MORE, config, progress=False)
    assert found.header["prompt_sets"] == {"own": 1, "written": 1}
    assert found.header["planned"]["prompt_sets"] == {"own": 6, "written": 24}
    assert found.evaluations[0].overall.prompts == 2
    assert found.to_dict()["left_out"] == list(found.left_out)
    assert found.left_out == (
        "evaluation: 2 of 30 prompts were decoded (1 of 6 own, 1 of 24 written; none of the categories kind1, kind2); "
        "the rest did not fit into evaluate.budget_minutes 1e-06",
        "evaluation: 2 of 4 prompts were timed; the rest did not fit into evaluate.budget_minutes 1e-06")
    whole = evaluate(tiny_target, [PLAIN], SIX_AND_MORE, EvaluateConfig(max_new_tokens=12, speed_prompts=2),
                     progress=False)
    assert whole.left_out == ()
    with pytest.raises(UserError, match="budget_minutes must be above 0, got 0"):
        EvaluateConfig(budget_minutes=0)
