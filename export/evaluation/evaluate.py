"""Measurement of drafts against the target alone: acceptance, speed, and whether a single word changed; and the drift
of an adapted target, how much its answers differ from the original target's.

Shapes: B rows, L positions, N tokens of the original's answers, V vocabulary."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...modules import DecodeSettings, Features, Request, Target, UserError, decode
from ...modules.baselines.registry import baseline
from ...modules.progress import ProgressLine
from .contention import ContentionProbe, busy_warning, machine
from .methods import EvaluateConfig, Method, PromptSets
from .results import EvaluationRun
from .runner import Runner
from .schedule import Budget, Entry, Schedule, require_context, spread
from .timed_answers import References

NOTHING: Mapping[str, Any] = {}
DRIFT_PROMPTS = 24  # Most questions of each set on which the drift of a target is measured
CHUNK = 128  # Positions whose whole distributions are formed at once


def evaluate(target: Target, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig, *,
             references: Path | None = None, progress: bool = True, origins: Mapping[str, Any] = NOTHING,
             original: Target | None = None,
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
        origins: where sets come from, by name, for the header.
        original: the target before an artifact changed it, whose first turns are compared with the changed one's.
        say: called before the start with a sentence on what is measured.

    Raises:
        UserError: if there is no method or no prompt, two methods share a name, a prompt and its answers exceed the
            target's context, or a prompt set has too few prompts for whole timed batches of every size."""
    every = [*methods]
    for name in config.baseline_names:
        # A new one, which has not read any text yet.
        drafter, policy = baseline(name, target)
        every.append(Method(name=name, family=drafter.family, drafter=drafter,
                            policy_for=partial(lambda policy, _rows, _temperature: policy, policy)))
    schedule = Schedule.of(every, prompt_sets, config)
    require_context(prompt_sets, config, target.context_length)
    runner = Runner(target, schedule, References(references, target, config), ContentionProbe(target))
    if schedule.timed and (warning := busy_warning()) is not None:
        sys.stderr.write(f"warning: {warning}\n")
    say(opening(schedule))
    compiled_before = target.compiler.seconds
    budget = Budget(config.budget_minutes)
    with (ProgressLine("evaluate", schedule.answers, "answer", seconds_left=lambda: budget.limit - budget.elapsed,
                       shown=progress) as budget.line,
          target.compiler.watched(lambda busy: budget.line.entitle("compile" if busy else "evaluate"))):
        evaluations = runner.run(budget)
    packing = target.linears.packing
    header = {**machine(target), "linear_layers": {"forms": packing.in_words, **asdict(packing)},
              "settings": asdict(config),
              # By them `push` knows whose figures these are: an artifact's weights are of one target alone.
              "artifacts": {method.name: method.weights_sha256 for method in schedule.methods},
              # Rounds are replayed on a device, if nobody says otherwise.
              "graphs": target.device.type != "cpu" if config.graphs is None else config.graphs,
              "graph_refusals": list(runner.graph_refusals),
              "compile_refusal": target.compiler.refusal if config.compile else "",
              "compile_seconds": target.compiler.seconds - compiled_before,
              "sets": dict(origins),
              # Planned next to measured: a reader of the JSON must see what a budget left out.
              **_coverage(runner.taken, schedule), "planned": _coverage(schedule.entries, schedule),
              "minutes": {"taken": budget.elapsed / 60, "budget": config.budget_minutes},
              "contention": runner.probe.to_dict()}
    if original is not None:
        prompts = [one.prompt([]) for questions in prompt_sets.values() for one in spread(questions, DRIFT_PROMPTS)]
        header["drift"] = measure_drift(original, target, prompts, max_new_tokens=config.max_new_tokens)
    return EvaluationRun(header=header, samples=runner.samples, left_out=left_out(header), evaluations=evaluations)


def opening(schedule: Schedule) -> str:
    """Sentence on what an evaluation measures, and on the minutes that it may take."""
    config, counts = schedule.config, _coverage(schedule.entries, schedule)
    sets = ", ".join(f"{count} {name}" for name, count in counts["prompt_sets"].items())
    timed = counts["timed_prompts"]
    drawn = " and ".join("greedy" if one == 0 else f"at temperature {one:g}" for one in config.degrees)
    names = ", ".join(method.name for method in schedule.methods)
    said = f"; {timed} of them are timed against decoding without drafts" if timed else "; nothing is timed"
    limit = ("" if config.budget_minutes is None else
             f". What does not fit into evaluate.budget_minutes {config.budget_minutes:g} is left out")
    return (f"{sum(counts['prompt_sets'].values())} prompts ({sets}) are decoded with {names}: "
            f"{schedule.answers} answers of at most "
            f"{config.max_new_tokens} tokens, {drawn}{said}{limit}")


def _coverage(entries: Sequence[Entry], schedule: Schedule) -> dict[str, Any]:
    """Numbers of some questions by set and category, and of the timed ones, for the header of an evaluation."""
    ordered = sorted((one for one in entries if one.answer == 0), key=lambda one: one.number)
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


# Drift of an adapted target -------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_drift(original: Target, adapted: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
                  batch_size: int = 8) -> dict[str, float]:
    """Let the original answer the prompts greedily, and compare both targets' distributions at each token: numbers of
    prompts and tokens, the mean KL(original || adapted) in nats, and the share of the tokens that the adapted one would
    also choose.

    Raises:
        UserError: if there is no prompt."""
    if not prompts:
        raise UserError("there is no prompt to measure the target's drift on; give at least one")
    requests = [Request(tuple(prompt), index, max_new_tokens) for index, prompt in enumerate(prompts)]
    answers = decode(original, requests, DecodeSettings(batch_size=batch_size)).generations
    # On the original's own answers: those are the texts whose distribution a user would miss.
    divergence, agreed, tokens = 0.0, 0, 0
    for answer in answers:
        prompt = answer.request.tokens
        row = Features.from_rows([([*prompt, *answer.tokens], [False] * len(prompt) + [True] * len(answer.tokens))])
        own, theirs = (target.encode(row).final()[0, len(prompt) - 1 : -1] for target in (original, adapted))
        # Two distributions over a large vocabulary in double precision: a long answer at once would fill the memory.
        for start in range(0, len(own), CHUNK):
            log_p_NV, log_q_NV = (target.logits(states[start : start + CHUNK]).double().log_softmax(-1)
                                  for target, states in ((original, own), (adapted, theirs)))
            divergence += float(torch.nn.functional.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True))
            chosen_N = torch.tensor(answer.tokens[start : start + CHUNK], device=log_q_NV.device)
            agreed += int((log_q_NV.argmax(-1) == chosen_N).sum())
        tokens += len(answer.tokens)
    return {"prompts": len(answers), "tokens": tokens, "kl": divergence / tokens, "agreement": agreed / tokens}
