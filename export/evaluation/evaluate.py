"""Measurement of drafts against the target alone: acceptance, speed, and whether a single word changed."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...modules import Target
from .contention import ContentionProbe, machine
from .course import Course, opening
from .coverage import coverage, left_out
from .methods import EvaluateConfig, Method, PromptSets
from .reference_answers import References
from .results import Answer, Evaluation, EvaluationRun, Measures, Timing, summarise
from .runner import MethodRecord, Runner
from .sample_answers import sample_answers
from .sample_records import SampleAnswer
from .sampled_positions import rounding
from .schedule import Schedule
from .work_plan import Costs, Ledger, WorkPlan


def evaluate(target: Target, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig, *,
             references: Path | None = None, progress: bool = True,
             say: Callable[[str], object] = lambda _: None) -> EvaluationRun:
    """Decode every question with every method and compare with the target alone.

    Greedy answers are compared with transformers' `generate`, sampled ones with this project's own loop under the same
    random stream (the two cannot share one with `generate`). A later turn's prompt holds the target's own answers to
    the turns before it, so that all methods see the same text. A machine that is busy before anything is timed is
    reported on stderr at once; `contended` says whether it was busy while the evaluation ran.

    Args:
        target: the model that answers, and verifies.
        methods: the methods to measure; `config.baselines` are added after them.
        prompt_sets: the questions.
        config: what is decoded and what is timed.
        references: file of the target's own answers, read and added to: runs over the same prompts share them.
        progress: whether a bar is shown.
        say: called before the start with sentences on what is measured and how many minutes that is predicted to take.

    Raises:
        UserError: if there is no method or no prompt, two methods share a name, a prompt and its answer exceed the
            target's context, or a prompt set has too few prompts for whole timed batches of every size.
    """
    baselines = [Method.of_baseline(name, target) for name in config.baseline_names]
    schedule = Schedule.of([*methods, *baselines], prompt_sets, config)
    runner = Runner(target, schedule, References(references, target, config), ContentionProbe(target))
    if schedule.timed and (warning := runner.probe.warning()) is not None:
        tqdm.write(f"warning: {warning}", file=sys.stderr)
    course = _course(runner)
    say(opening(course))
    compiled_before = target.compiler.seconds
    # Answers are counted in batches: the rate is one over many of them.
    with (tqdm(total=course.units, desc="evaluate", unit="pass", disable=not progress, smoothing=0.05) as bar,
          target.compiler.watched(lambda busy: bar.set_description("compile" if busy else "evaluate"))):
        course.show(bar)
        records = runner.run(course)
        samples = _samples(runner, course, records[0])
        course.finish()
    header = {**machine(target), "linear_layers": _linear_layers(target), "settings": asdict(config),
              "graph_refusals": list(dict.fromkeys(one.graph_refusal for one in records if one.graph_refusal)),
              "compile_refusal": target.compiler.refusal if config.compile else "",
              "compile_seconds": target.compiler.seconds - compiled_before,
              **coverage(schedule, course), "contention": runner.probe.to_dict()}
    return EvaluationRun(header=header, samples=samples, left_out=left_out(header), evaluations=tuple(
        _evaluation(record, target, runner.probe.contended, config) for record in records))


def _course(runner: Runner) -> Course:
    """The course of a runner's schedule, its costs measured now."""
    schedule, passes = runner.schedule, runner.probe.pass_seconds()
    costs = Costs.of(schedule.methods, passes, runner.probe.context)
    return Course(WorkPlan(schedule, costs, runner.known), Ledger(passes[1]))


def _samples(runner: Runner, course: Course, record: MethodRecord) -> tuple[SampleAnswer, ...]:
    """The sample answers of the first method, of the questions that were decoded."""
    questions = {entry.number: entry.question for entry in course.taken}
    found = sample_answers(runner.target, record.method, questions, record.answers, runner.schedule.config)
    for entry in course.plan.sampled(course.taken)[: len(found)]:
        course.done(course.plan.samples, entry)
    return found


def _linear_layers(target: Target) -> dict[str, Any]:
    """Forms of the target's linear layers in words, and the measurement that chose them."""
    packing = target.linears.packing
    return {"forms": packing.in_words, **asdict(packing)}


def _evaluation(record: MethodRecord, target: Target, contended: bool, config: EvaluateConfig) -> Evaluation:
    """The summary of one record, over all its answers and by groups of them."""
    method, batch_size, temperature = record.method, record.batch_size, record.temperature
    answers, timings = record.answers, record.timings

    def measures(mine: Sequence[Answer], timed: Sequence[Timing]) -> Measures:
        return summarise(mine, timed, draft_share=record.draft_share, seed=config.seed,
                         rounding=rounding(target.dtype, temperature))

    sets = dict.fromkeys(answer.prompt_set for answer in answers)
    categories = dict.fromkeys(answer.category for answer in answers if answer.category)
    turns = sorted({answer.turn for answer in answers})
    return Evaluation(
        name=method.name, family=method.family, target=target.identity.name,
        batch_size=batch_size, temperature=temperature, nodes=method.nodes(batch_size, temperature),
        contended=contended, target_calls=record.target_calls,
        draft_share=record.draft_share,
        predicted_speedup=method.predicted(batch_size, config.sampling(temperature)),
        overall=measures(answers, timings),
        accepted_length_by_tree_size=record.replays.accepted_lengths,
        confidence=record.replays.confidence,
        by_prompt_set={name: measures([answer for answer in answers if answer.prompt_set == name],
                                      [timing for timing in timings if timing.prompt_set == name]) for name in sets},
        by_category={name: measures([answer for answer in answers if answer.category == name],
                                    [timing for timing in timings if timing.category == name]) for name in categories},
        # A question is timed as a whole, so a turn has no speed of its own.
        by_turn={str(turn): measures([answer for answer in answers if answer.turn == turn], [])
                 for turn in turns if len(turns) > 1},
    )
