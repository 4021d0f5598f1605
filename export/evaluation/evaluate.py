"""Measure drafts against the target alone: acceptance, speed, and whether a single word changed."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from ...modules import Drafter, Target, UserError
from .contention import machine
from .methods import EvaluateConfig, Method, PromptSets
from .reference_answers import References
from .results import Answer, Evaluation, EvaluationRun, Measures, Timing, summarise
from .runner import Bench, Entry, Exchange, Records, by_prompt_set
from .sample_answers import sample_answers
from .tree_replay import Replays, replay_trees

T = TypeVar("T")
Groups = dict[int, list[list[Entry]]]
"""What is timed together, by batch size."""


def evaluate(target: Target, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig, *,
             references: Path | None = None, progress: bool = True) -> EvaluationRun:
    """Decode every question with every method and compare with the target alone.

    Greedy answers are compared with transformers' `generate`, sampled ones with this project's own loop under the same
    random stream (the two cannot share one with `generate`). A later turn's prompt holds the target's own answers to
    the turns before it, so that all methods see the same text.

    Args:
        target: the model that answers, and verifies.
        methods: who drafts; `config.baselines` come behind them.
        prompt_sets: the questions.
        config: what is decoded and what is timed.
        references: file of the target's own answers, read and added to: runs over the same prompts share them.
        progress: whether a bar is shown.

    Raises:
        UserError: if there is no method or no prompt, two methods share a name, a prompt and its answer exceed the
            target's context, or a prompt set has too few prompts for whole timed batches of every size.
    """
    methods = [*methods, *(Method.of_baseline(name, target) for name in config.baselines)]
    _check(methods)
    entries = _entries(prompt_sets, config)
    groups = _groups(entries, config)
    with tqdm(total=_work(entries, groups, methods, config), desc="evaluate", unit=" answers",
              disable=not progress) as bar:
        bench = Bench(target, methods, config, bar.update, References(references, target, config))
        found = [one for temperature in config.degrees for one in _measured(bench, entries, groups, temperature)]
    samples = sample_answers(target, methods[0], {entry.number: entry.question for entry in entries}, bench.first,
                             config)
    header = {**machine(target), "settings": asdict(config),
              "prompt_sets": {name: len(members) for name, members in by_prompt_set(entries).items()},
              "timed_prompts": len(_timed(groups)),
              "contention": bench.probe.to_dict()}
    return EvaluationRun(header=header, samples=samples,
                         evaluations=tuple(replace(one, contended=bench.probe.contended) for one in found))


def _measured(bench: Bench, entries: Sequence[Entry], groups: Groups, temperature: float) -> list[Evaluation]:
    """Every batch size and method at one temperature; whether the machine was busy is only known in the end."""
    exchanges = bench.refer(entries, temperature)
    timed = {size: bench.time([[exchange for entry in group for exchange in exchanges if exchange.entry is entry]
                               for group in members], size) for size, members in groups.items()}
    apart = _timed(groups)
    # Their answers depend on the tree, but on no batch size: they are decoded once for each tree.
    untimed = bench.finish([exchange for exchange in exchanges if exchange.entry.number not in apart], temperature)
    trees = [_trees(bench, method, exchanges) for method in bench.methods]
    return [
        _evaluation(bench, method, exchanges, records.beside(untimed[place][method.nodes(size, temperature)]), size,
                    trees[place])
        for size, found in timed.items()
        for place, (method, records) in enumerate(zip(bench.methods, found, strict=True))
    ]


def _evaluation(bench: Bench, method: Method, exchanges: Sequence[Exchange], records: Records, batch_size: int,
                trees: Replays) -> Evaluation:
    """Compare every answer with its reference and summarise."""
    temperature = exchanges[0].temperature
    answers = bench.answers(exchanges, records, compared=method.comparable(batch_size, temperature))
    bench.first = bench.first or answers
    share, seed = bench.draft_share(records), bench.config.seed

    def measures(mine: Sequence[Answer], timings: Sequence[Timing]) -> Measures:
        return summarise(mine, timings, draft_share=share, seed=seed)

    sets = dict.fromkeys(answer.prompt_set for answer in answers)
    categories = dict.fromkeys(answer.category for answer in answers if answer.category)
    turns = sorted({answer.turn for answer in answers})
    return Evaluation(
        name=method.name, family=method.family, target=bench.target.identity.name, batch_size=batch_size,
        temperature=temperature, nodes=method.nodes(batch_size, temperature), contended=False,
        target_calls=records.target_calls, draft_share=share,
        predicted_speedup=None if temperature else method.predicted(batch_size),
        overall=measures(answers, records.timings),
        accepted_length_by_tree_size=trees.accepted_lengths,
        confidence=trees.confidence,
        by_prompt_set={name: measures([answer for answer in answers if answer.prompt_set == name],
                                      [timing for timing in records.timings if timing.prompt_set == name])
                       for name in sets},
        by_category={name: measures([answer for answer in answers if answer.category == name],
                                    [timing for timing in records.timings if timing.category == name])
                     for name in categories},
        # A question is timed as a whole, so a turn has no speed of its own.
        by_turn={str(turn): measures([answer for answer in answers if answer.turn == turn], [])
                 for turn in turns if len(turns) > 1},
    )


def _trees(bench: Bench, method: Method, exchanges: Sequence[Exchange]) -> Replays:
    """Replay some greedy answers of each prompt set through prefixes of the method's tree."""
    if not isinstance(method.drafter, Drafter) or method.trees is None or exchanges[0].temperature > 0:
        return Replays()
    rows: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
    for exchange in exchanges:
        rows.setdefault(exchange.entry.prompt_set, []).append((exchange.prompt, exchange.reference))
    chosen = {name: _spread(members, bench.config.tree_prompts) for name, members in rows.items()}
    return replay_trees(bench.target, method.drafter, method.trees,
                        {name: members for name, members in chosen.items() if members})


def _check(methods: Sequence[Method]) -> None:
    if not methods:
        raise UserError("an evaluation needs at least one method; give an artifact or a baseline")
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{names.count(name)} methods are called {name!r}; name each artifact and baseline once")


def _entries(prompt_sets: PromptSets, config: EvaluateConfig) -> list[Entry]:
    """The questions to use, numbered over all sets, so that a limit changes no random stream."""
    entries: list[Entry] = []
    number = 0
    for name, questions in prompt_sets.items():
        members = [Entry(number=number + place, prompt_set=name, question=question)
                   for place, question in enumerate(questions)]
        number += len(members)
        entries += _spread(members, len(members) if config.limit is None else config.limit)
    if not entries:
        raise UserError("there is no prompt to evaluate on; give a file of prompts with at least one line")
    return entries


def _groups(entries: Sequence[Entry], config: EvaluateConfig) -> Groups:
    """What is timed together: the same questions at every batch size, spread over each set so that every category of
    an ordered set has some, and full batches only.

    Raises:
        UserError: if a set has too few questions to fill whole batches of every size.
    """
    found: Groups = {size: [] for size in config.batches}
    for name, members in by_prompt_set(entries).items():
        chosen = _spread(members, config.timed(len(members)))
        if config.speed_prompts and not chosen:
            sizes = ", ".join(map(str, config.batches))
            raise UserError(f"batches of {sizes} rows cannot be timed on the same prompts: the set "
                            f"{name!r} has {len(members)}, whole batches of every size need at least "
                            f"{math.lcm(*config.batches)}; give more prompts, choose smaller batch_sizes or "
                            "ones that divide one another, or set speed_prompts to 0")
        for size, groups in found.items():
            groups += [chosen[start : start + size] for start in range(0, len(chosen), size)]
    return found


def _timed(groups: Groups) -> set[int]:
    """Numbers of the questions that are timed, the same at every batch size."""
    return {entry.number for members in groups.values() for group in members for entry in group}


def _work(entries: Sequence[Entry], groups: Groups, methods: Sequence[Method], config: EvaluateConfig) -> int:
    """Answers to be decoded, those of the baselines included."""
    turns = {entry.number: entry.question.turns for entry in entries}
    timed = sum(turns[number] for number in _timed(groups))
    untimed = sum(turns.values()) - timed
    trees = sum(len(method.tree_sizes(config.batches, temperature)) for method in methods
                for temperature in config.degrees)
    once = sum(turns.values()) + (2 + len(methods)) * len(groups) * timed
    return len(config.degrees) * once + trees * untimed


def _spread(members: Sequence[T], count: int) -> list[T]:
    count = min(count, len(members))
    return [members[place * len(members) // count] for place in range(count)]
