"""Measurement of drafts against the target alone: acceptance, speed, and whether a single word changed."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...modules import StaticTree, Target
from ...modules.progress import ProgressLine
from ..acceptance_profile import DECODED, measurements
from .contention import ContentionProbe, busy_warning, machine
from .methods import SEED, EvaluateConfig, Method, PromptSets
from .reference_answers import References
from .results import Answer, Evaluation, EvaluationRun, Measures, Timing
from .runner import MethodRecord, Runner
from .schedule import Budget, Entry, Schedule, by_prompt_set, require_context
from .summary import summarise
from .uniformity import rounding


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
        say: called before the start with a sentence on what is measured.

    Raises:
        UserError: if there is no method or no prompt, two methods share a name, a prompt and its answers exceed the
            target's context, or a prompt set has too few prompts for whole timed batches of every size.
    """
    baselines = [Method.of_baseline(name, target) for name in config.baseline_names]
    schedule = Schedule.of([*methods, *baselines], prompt_sets, config)
    require_context(prompt_sets, config, target.context_length)
    runner = Runner(target, schedule, References(references, target, config), ContentionProbe(target))
    if schedule.timed and (warning := busy_warning()) is not None:
        sys.stderr.write(f"warning: {warning}\n")
    say(opening(schedule))
    compiled_before = target.compiler.seconds
    budget = Budget(config.budget_minutes)
    with (ProgressLine("evaluate", schedule.answers, "answer", seconds_left=lambda: budget.seconds_left,
                       shown=progress) as budget.line,
          target.compiler.watched(lambda busy: budget.line.entitle("compile" if busy else "evaluate"))):
        records = runner.run(budget)
    packing = target.linears.packing
    header = {**machine(target), "linear_layers": {"forms": packing.in_words, **asdict(packing)},
              "settings": asdict(config),
              # By them `push` knows whose figures these are: an artifact's weights are of one target alone.
              "artifacts": {method.name: method.weights_sha256 for method in schedule.methods},
              "graph_refusals": list(dict.fromkeys(
                  one.records.graph_refusal for one in records if one.records.graph_refusal)),
              "compile_refusal": target.compiler.refusal if config.compile else "",
              "compile_seconds": target.compiler.seconds - compiled_before,
              # Planned next to measured: a reader of the JSON must see what a budget left out.
              **_coverage(runner.taken, schedule), "planned": _coverage(schedule.entries, schedule),
              "minutes": {"taken": budget.elapsed / 60, "budget": config.budget_minutes},
              "contention": runner.probe.to_dict()}
    return EvaluationRun(header=header, samples=records[0].samples, left_out=left_out(header), evaluations=tuple(
        _evaluation(record, target, runner.probe.contended, config) for record in records))


def opening(schedule: Schedule) -> str:
    """Sentence on what an evaluation measures, and on the minutes that it may take."""
    config, timed = schedule.config, len(schedule.timed)
    sets = ", ".join(f"{len(members)} {name}" for name, members in by_prompt_set(schedule.entries).items())
    drawn = " and ".join("greedy" if one == 0 else f"at temperature {one:g}" for one in config.degrees)
    names = ", ".join(method.name for method in schedule.methods)
    said = f"; {timed} of them are timed against decoding without drafts" if timed else "; nothing is timed"
    limit = ("" if config.budget_minutes is None else
             f". What does not fit into evaluate.budget_minutes {config.budget_minutes:g} is left out")
    return (f"{len(schedule.entries)} prompts ({sets}) are decoded with {names}: {schedule.answers} answers of at most "
            f"{config.max_new_tokens} tokens, {drawn}{said}{limit}")


def _coverage(entries: Sequence[Entry], schedule: Schedule) -> dict[str, Any]:
    """Numbers of some questions by set and category, and of the timed ones, for the header of an evaluation."""
    ordered = sorted(entries, key=lambda one: one.number)
    return {"prompt_sets": dict(Counter(entry.prompt_set for entry in ordered)),
            "categories": dict(Counter(entry.question.category for entry in ordered if entry.question.category)),
            "timed_prompts": sum(entry.number in schedule.timed for entry in ordered)}


def left_out(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences on what did not fit into the budget, from the header of an evaluation; empty where everything did."""
    planned, budget = header["planned"], header["minutes"]["budget"]
    rest = f"the rest did not fit into evaluate.budget_minutes {budget:g}" if budget is not None else ""
    found = []
    measured, wanted = (sum(one["prompt_sets"].values()) for one in (header, planned))
    if measured < wanted:
        sets = ", ".join(f"{header['prompt_sets'].get(name, 0)} of {count} {name}"
                         for name, count in planned["prompt_sets"].items())
        missing = [name for name in planned["categories"] if not header["categories"].get(name)]
        none = f"; none of the categories {', '.join(missing)}" if missing else ""
        found.append(f"evaluation: {measured} of {wanted} prompts were decoded ({sets}{none}); {rest}")
    if header["timed_prompts"] < planned["timed_prompts"]:
        found.append(f"evaluation: {header['timed_prompts']} of {planned['timed_prompts']} prompts were timed; {rest}")
    return tuple(found)


def acceptance_of(record: MethodRecord, config: EvaluateConfig) -> list[dict[str, Any]]:
    """Records of acceptance.json from the answers of a method; none where nothing was drafted."""
    method, rows, degree = record.method, record.batch_size, record.temperature
    policy = None if method.policy_for is None else method.policy_for(rows, degree)
    if policy is None or policy.max_size == 1:
        return []
    depth = policy.topology.depth if isinstance(policy, StaticTree) else max(
        (max(answer.emitted, default=1) for answer in record.answers), default=1) - 1
    setting = {"method": method.name, "chain": depth == policy.max_size - 1 and isinstance(policy, StaticTree),
               "nodes": policy.max_size, **asdict(config.sampling(degree)), "batch_size": rows,
               "answers": len(record.answers), "source": DECODED}
    return measurements([one for answer in record.answers for one in answer.passes], setting, depth)


def _evaluation(record: MethodRecord, target: Target, contended: bool, config: EvaluateConfig) -> Evaluation:
    """The summary of one record, over all its answers and by groups of them."""
    method, batch_size, temperature = record.method, record.batch_size, record.temperature
    answers, timings = record.answers, record.records.timings

    def measures(mine: Sequence[Answer], timed: Sequence[Timing]) -> Measures:
        return summarise(mine, timed, seed=SEED, rounding=rounding(target.dtype, temperature))

    def by(key: str, least: int = 1) -> dict[str, Measures]:
        """The measures of each group, if there are so many."""
        names = dict.fromkeys(getattr(answer, key) for answer in answers if getattr(answer, key))
        return {str(name): measures([answer for answer in answers if getattr(answer, key) == name],
                                    # A question is timed as a whole, so a turn has no speed of its own.
                                    [timing for timing in timings if getattr(timing, key, None) == name])
                for name in names if len(names) >= least}

    return Evaluation(name=method.name, family=method.family, target=target.identity.name, batch_size=batch_size,
                      temperature=temperature, nodes=method.nodes(batch_size, temperature),
                      tree_nodes=method.own_nodes(batch_size, temperature), partners=method.parts[:-1],
                      contended=contended, target_calls=record.records.target_calls,
                      prediction=method.predicted(batch_size, config.sampling(temperature)),
                      overall=measures(answers, timings), by_prompt_set=by("prompt_set"), by_category=by("category"),
                      by_turn=by("turn", 2), by_mode=by("mode", 2), acceptance=tuple(acceptance_of(record, config)))
