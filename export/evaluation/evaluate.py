"""Measurement of drafts against the target alone: acceptance, speed, and whether a single word changed."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...modules import Target
from .contention import machine
from .methods import EvaluateConfig, Method, PromptSets
from .reference_answers import References
from .results import Answer, Evaluation, EvaluationRun, Measures, Timing, summarise
from .runner import MethodRecord, Runner
from .sample_answers import sample_answers
from .sampled_positions import rounding
from .schedule import Schedule


def evaluate(target: Target, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig, *,
             references: Path | None = None, progress: bool = True) -> EvaluationRun:
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

    Raises:
        UserError: if there is no method or no prompt, two methods share a name, a prompt and its answer exceed the
            target's context, or a prompt set has too few prompts for whole timed batches of every size.
    """
    baselines = [Method.of_baseline(name, target) for name in config.baseline_names]
    schedule = Schedule.of([*methods, *baselines], prompt_sets, config)
    with tqdm(total=schedule.answers, desc="evaluate", unit=" answers", disable=not progress) as bar:
        runner = Runner(target, schedule, References(references, target, config), bar.update,
                        lambda sentence: bar.write(f"warning: {sentence}", file=sys.stderr))
        records = runner.run()
    header = {**machine(target), "linear_layers": _linear_layers(target), "settings": asdict(config),
              "prompt_sets": {name: len(members) for name, members in schedule.prompt_sets.items()},
              "timed_prompts": len(schedule.timed),
              "contention": runner.probe.to_dict()}
    samples = sample_answers(target, schedule.methods[0], {entry.number: entry.question for entry in schedule.entries},
                             records[0].answers, config)
    return EvaluationRun(header=header, samples=samples, evaluations=tuple(
        _evaluation(record, target, runner.probe.contended, config) for record in records))


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
