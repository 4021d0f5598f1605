"""The budget of an evaluation: what fits into its minutes is decoded, however the speed of the machine changes."""

import re
from collections.abc import Iterator

import pytest
from draftsmith.export import EvaluateConfig, Method, Question, evaluate
from draftsmith.export.evaluation.evaluate import opening
from draftsmith.export.evaluation.schedule import CLOSING_SHARE, Budget, Schedule
from draftsmith.modules import Target, UserError
from draftsmith.modules.progress import ProgressLine

SETS = {"own": [Question.single((1, 2, 3, 4)) for _ in range(6)],
        "written": [Question.single((1, 2, 3, 4), f"kind{kind}") for kind in range(3) for _ in range(8)]}
PLAIN = Method(name="plain", family="none", drafter=None, policy_for=None)


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


def test_the_line_ends_with_the_minutes_and_its_total_stays() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    budget.line = ProgressLine("evaluate", 1000, "answer", seconds_left=lambda: budget.seconds_left, shown=False)
    clock.now += 60.0
    budget.answered(10)
    assert re.fullmatch(r"evaluate: 10 of 1,000 answer in 0:00, 9:00 left, .*", str(budget.line))


def test_the_opening_names_the_work_and_its_limit() -> None:
    config = EvaluateConfig(max_new_tokens=30, speed_prompts=2)
    said = opening(Schedule.of([PLAIN], SETS, config))
    assert said.startswith("30 prompts (6 own, 24 written) are decoded with plain: ")
    assert said.endswith("answers of at most 30 tokens, greedy; 4 of them are timed against decoding without drafts")
    short = EvaluateConfig(max_new_tokens=30, speed_prompts=2, budget_minutes=1)
    assert opening(Schedule.of([PLAIN], SETS, short)) == (
        f"{said}. What does not fit into evaluate.budget_minutes 1 is left out")


def test_an_evaluation_in_bundles_finds_what_one_in_a_piece_does(tiny_target_f64: Target) -> None:
    whole, cut = (evaluate(tiny_target_f64, [PLAIN], SETS, EvaluateConfig(
        max_new_tokens=12, speed_prompts=2, budget_minutes=minutes), progress=False) for minutes in (None, 60.0))
    assert cut.left_out == whole.left_out == ()
    for one in ("prompts", "new_tokens", "target_passes", "lossless", "accepted_length_interval"):
        assert getattr(cut.evaluations[0].overall, one) == getattr(whole.evaluations[0].overall, one)


def test_a_partial_evaluation_says_so(tiny_target: Target) -> None:
    config = EvaluateConfig(max_new_tokens=12, speed_prompts=2, budget_minutes=1e-6)
    found = evaluate(tiny_target, [PLAIN], SETS, config, progress=False)
    assert found.header["prompt_sets"] == {"own": 1, "written": 1}
    assert found.header["planned"]["prompt_sets"] == {"own": 6, "written": 24}
    assert found.evaluations[0].overall.prompts == 2
    assert found.to_dict()["left_out"] == list(found.left_out)
    assert found.left_out == (
        "evaluation: 2 of 30 prompts were decoded (1 of 6 own, 1 of 24 written; none of the categories kind1, kind2); "
        "the rest did not fit into evaluate.budget_minutes 1e-06",
        "evaluation: 2 of 4 prompts were timed; the rest did not fit into evaluate.budget_minutes 1e-06")
    whole = evaluate(tiny_target, [PLAIN], SETS, EvaluateConfig(max_new_tokens=12, speed_prompts=2), progress=False)
    assert whole.left_out == ()
    with pytest.raises(UserError, match="budget_minutes must be above 0, got 0"):
        EvaluateConfig(budget_minutes=0)
