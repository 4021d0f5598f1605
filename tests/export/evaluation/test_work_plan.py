"""The plan of an evaluation: its units, the minutes predicted by measured costs, and what fits into a budget."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from draftsmith.export import EvaluateConfig, Method, Question, evaluate
from draftsmith.export.evaluation import evaluate as evaluating
from draftsmith.export.evaluation.course import Course, opening
from draftsmith.export.evaluation.schedule import Schedule
from draftsmith.export.evaluation.work_plan import PLAIN, REFERENCES, TIMED, UNTIMED, Costs, Kind, Ledger, WorkPlan
from draftsmith.modules import (
    Chain,
    CostModel,
    Medusa,
    MedusaConfig,
    StaticTree,
    Target,
    Topology,
    UserError,
)

CONFIG = EvaluateConfig(max_new_tokens=30, speed_prompts=2)


def cost(*, slope: float, draft: float) -> CostModel:
    """A pass of n tokens takes 1 + slope (n - 1) seconds, a draft so many."""
    return CostModel(knots=(1,), pass_weights=(1.0, slope, 0.0, 0.0), draft_weights=(draft, 0.0, 0.0, 0.0, 0.0, 0.0),
                     largest=16, context=1, pass_error=0.0, draft_error=0.0)


def method(name: str = "chain", length: float = 2.0, **changes: Any) -> Method:
    """A chain of three guesses of which so many tokens are expected to be emitted."""
    fields = {"name": name, "family": "none", "drafter": None, "policy_for": lambda _rows, _temperature: Chain(3),
              "cost": cost(slope=0.1, draft=0.5), "expected_length": lambda _rows, _temperature: length}
    return Method(**{**fields, **changes})


def sets(own: int = 6, kinds: int = 3, each: int = 8) -> dict[str, list[Question]]:
    """Prompts of 4 tokens: own ones without a category, written ones of several."""
    return {"own": [Question.single((1, 2, 3, 4)) for _ in range(own)],
            "written": [Question.single((1, 2, 3, 4), f"kind{kind}") for kind in range(kinds) for _ in range(each)]}


def planned(config: EvaluateConfig = CONFIG, *methods: Method, questions: Any = None,
            known: Callable[..., bool] = lambda _entry, _temperature: False) -> WorkPlan:
    schedule = Schedule.of(methods or (method(),), questions or sets(), config)
    return WorkPlan(schedule, Costs.of(schedule.methods, {1: 1.0, 8: 1.7}, 1), known)


class Bar:
    """A progress bar that shows nothing."""

    def __init__(self, **_: Any) -> None:
        self.n, self.total, self.postfix = 0, 0, ""

    @staticmethod
    def write(text: str, file: Any) -> None:
        """Write nothing."""

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def update(self, units: int) -> None:
        self.n += units

    def refresh(self) -> None:
        """Show nothing."""

    def set_postfix_str(self, text: str) -> None:
        self.postfix = text


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_unit_is_the_work_of_one_pass_of_one_token() -> None:
    plan = planned()
    entry = plan.schedule.entries[0]
    prompt = 1 + 0.1 * 3
    assert plan.units(Kind(PLAIN), entry) == round(prompt + 30)
    # 15 passes of 4 nodes, each with a draft.
    assert plan.units(Kind(TIMED, "chain"), entry) == round(prompt + 15 * (1.3 + 0.5))
    # Eight rows together: a pass over 32 nodes costs each of them an eighth.
    step = plan.costs.model.step_seconds(4, 8) / 8
    assert plan.units(Kind(UNTIMED, "chain"), entry) == round(prompt + 15 * step)


def test_the_units_of_all_answers_sum_to_the_total(tiny_target: Target) -> None:
    """Whatever is decoded, the bar ends at the total that it started with."""
    config = EvaluateConfig(max_new_tokens=12, speed_prompts=2, batch_sizes=(1, 2), temperatures=(0.0, 0.8),
                            tree_prompts=2, baselines=("recycling", "prompt_lookup"))
    tree = Topology.from_paths([(0,), (1,), (0, 0)])
    heads = Method(name="heads", family="medusa", drafter=Medusa.create(MedusaConfig(num_heads=2), tiny_target),
                   policy_for=lambda _rows, _temperature: StaticTree(tree), trees=tree)
    talk = [Question(prompt=lambda answers, place=place: (1, 30 + place, *(token for one in answers for token in one)),
                     turns=2) for place in range(5)]
    questions = {"talk": talk, **sets(own=3, each=2)}
    seen: list[Course] = []
    real = Course.finish
    before: list[tuple[int, int]] = []

    def finish(self: Course) -> None:
        before.append((self._bar.n, self._bar.total))
        seen.append(self)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Course, "finish", finish)
        patch.setattr(evaluating, "tqdm", Bar)
        evaluate(tiny_target, [heads], questions, config)
    course = seen[0]
    assert before == [(course.plan.total.total(),) * 2]
    assert course.ledger.units == course.plan.total
    assert course.ledger.answers.total() == course.plan.schedule.answers + 3 + 2 * 2 + 2 * 2


def test_the_prediction_uses_the_costs_that_were_measured() -> None:
    plan = planned()
    clock = Time()
    predicted = [Course(plan, Ledger(seconds, clock)).predicted for seconds in (0.1, 0.2)]
    assert predicted == pytest.approx([0.1 * plan.total.total(), 0.2 * plan.total.total()])
    # A draft that costs more, or is accepted less often, takes longer.
    for slower in (method(cost=cost(slope=0.1, draft=2.0)), method(length=1.2)):
        assert planned(CONFIG, slower).total.total() > 1.1 * plan.total.total()
    # Without a model the measured passes give the proportions: here a pass of 8 tokens costs 1.7 of one.
    bare = planned(CONFIG, method(cost=None))
    assert bare.costs.step(8, 1) == pytest.approx(1.7)


def test_what_is_measured_on_the_way_replaces_what_was_predicted() -> None:
    plan, clock = planned(), Time()
    ledger = Ledger(0.1, clock)
    entry = plan.schedule.entries[0]
    kind, other = Kind(REFERENCES, "", 8), Kind(PLAIN)
    assert ledger.seconds({kind: 10, other: 10}) == pytest.approx(2.0)
    clock.now = 3.0
    ledger.add(kind, plan.units(kind, entry))
    measured = 3.0 / plan.units(kind, entry)
    assert ledger.seconds({kind: 10}) == pytest.approx(10 * measured)
    assert ledger.seconds({other: 10}) == pytest.approx(10 * measured), "of another kind nothing is known yet"
    clock.now = 4.0
    ledger.add(other, 5)
    assert ledger.seconds({kind: 10, other: 10}) == pytest.approx(10 * measured + 10 * 0.2)


def test_answers_that_other_runs_have_made_cost_nothing() -> None:
    fresh, known = planned(), planned(known=lambda _entry, _temperature: True)
    assert sum(count for kind, count in known.total.items() if kind.work == REFERENCES) == 0
    assert sum(count for kind, count in fresh.total.items() if kind.work == REFERENCES) > 0


def test_every_start_of_the_order_covers_sets_and_categories_evenly() -> None:
    plan = planned(EvaluateConfig(max_new_tokens=30, speed_prompts=4, batch_sizes=(1, 2)), questions=sets(own=12))
    bundles = plan.schedule.bundles
    assert sorted(entry.number for bundle in bundles for entry in bundle) == list(range(36))
    assert [bundle[0].prompt_set for bundle in bundles[:2]] == ["own", "written"]
    assert all(len(bundle) == 2 for bundle in bundles[:2]), "timed prompts come in whole batches"
    for end in range(1, len(bundles) + 1):
        entries = [entry for bundle in bundles[:end] for entry in bundle]
        untimed = Counter((entry.prompt_set, entry.question.category) for entry in entries
                          if entry.number not in plan.schedule.timed)
        whole = Counter((entry.prompt_set, entry.question.category) for entry in plan.schedule.entries
                        if entry.number not in plan.schedule.timed)
        shares = [untimed[kind] / count for kind, count in whole.items()]
        assert max(shares) - min(shares) <= max(1 / count for count in whole.values()) + 1e-9


def walked(course: Course, clock: Time, seconds_per_unit: float) -> list[int]:
    """Do all the work that a course deals out; returns the sizes of its portions."""
    sizes = []
    while (portion := course.portion()) is not None:
        sizes.append(len(portion.entries))
        for entry in portion.entries:
            for kind in course.plan.kinds(entry):
                clock.now += seconds_per_unit * course.plan.units(kind, entry)
                course.done(kind, entry)
    clock.now += seconds_per_unit * course.plan.closing(course.taken).total()
    return sizes


@pytest.mark.parametrize("slower", [1.0, 3.0, 0.4])
def test_a_budget_is_kept_however_wrong_the_prediction_was(slower: float) -> None:
    """A unit takes another time than a pass took before the start; whatever fits is decoded."""
    whole = planned(questions=sets(own=40, each=40)).total.total()
    config = EvaluateConfig(max_new_tokens=30, speed_prompts=2, budget_minutes=0.5 * whole / 60)
    plan, clock = planned(config, questions=sets(own=40, each=40)), Time()
    course = Course(plan, Ledger(1.0, clock))
    sizes = walked(course, clock, slower)
    assert clock.now <= 60 * config.budget_minutes * 1.02
    if slower < 0.5:
        assert course.complete
    else:
        assert clock.now > 0.85 * 60 * config.budget_minutes
        assert len(sizes) > 1
        assert not course.complete


def test_without_a_budget_everything_is_one_portion_in_the_old_order() -> None:
    course = Course(planned(), Ledger(1.0, Time()))
    portion = course.portion()
    assert portion is not None
    assert (portion.entries, portion.groups) == (course.plan.schedule.entries, course.plan.schedule.groups)
    assert course.portion() is None


def test_the_least_is_one_timed_prompt_of_each_set() -> None:
    config = EvaluateConfig(max_new_tokens=30, speed_prompts=2, budget_minutes=1e-6)
    course = Course(planned(config), Ledger(1.0, Time()))
    portion = course.portion()
    assert portion is not None
    assert [(entry.prompt_set, entry.number in portion.timed) for entry in portion.entries] == [
        ("own", True), ("written", True)]


def test_the_opening_names_the_work_and_its_minutes() -> None:
    course = Course(planned(), Ledger(0.5, Time()))
    said = opening(course)
    assert said.startswith("30 prompts (6 own, 24 written) are decoded with chain: ")
    assert "answers of at most 30 tokens, greedy; 4 of them are timed against decoding without drafts" in said
    assert said.endswith(f"takes about {0.5 * course.plan.total.total() / 60:.1f} minutes")
    short = EvaluateConfig(max_new_tokens=30, speed_prompts=2, budget_minutes=1)
    said = opening(Course(planned(short), Ledger(0.1, Time())))
    assert "of the prompts fit into evaluate.budget_minutes 1" in said


def test_a_partial_evaluation_says_so(tiny_target: Target) -> None:
    plain = Method(name="plain", family="none", drafter=None, policy_for=None)
    config = EvaluateConfig(max_new_tokens=12, speed_prompts=2, budget_minutes=1e-6)
    found = evaluate(tiny_target, [plain], sets(), config, progress=False)
    assert found.header["prompt_sets"] == {"own": 1, "written": 1}
    assert found.header["planned"]["prompt_sets"] == {"own": 6, "written": 24}
    assert found.evaluations[0].overall.prompts == 2
    assert found.to_dict()["left_out"] == list(found.left_out)
    assert found.left_out == (
        "evaluation: 2 of 30 prompts were decoded (1 of 6 own, 1 of 24 written; none of the categories kind1, kind2); "
        "the rest did not fit into evaluate.budget_minutes 1e-06",
        "evaluation: 2 of 4 prompts were timed; the rest did not fit into evaluate.budget_minutes 1e-06")
    whole = evaluate(tiny_target, [plain], sets(), CONFIG, progress=False)
    assert whole.left_out == ()
    with pytest.raises(UserError, match="budget_minutes must be above 0, got 0"):
        EvaluateConfig(budget_minutes=0)
