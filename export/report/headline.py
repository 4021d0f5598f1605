"""The headline of a report: in one plain sentence, how much faster decoding was and whether a word changed."""

from ...modules import NONE
from ..evaluation.results import Evaluation, EvaluationRun, Lossless
from .phrases import nothing_drafted, partial_note

FEWEST_PROMPTS, FEWEST_TIMED = 10, 4
"""Fewest decoded and fewest timed prompts of a headline that claims something: with two prompts chance decides."""


def headline(run: EvaluationRun) -> str:
    """The sentence. Of several methods, the fastest at the first temperature and batch size is named; of fewer prompts
    than `FEWEST_PROMPTS` nothing is claimed, and of fewer timed ones than `FEWEST_TIMED` no speed, but a fault is
    reported from the first prompt on."""
    decoded, timed = sum(run.header["prompt_sets"].values()), run.header["timed_prompts"]
    fault = any(one.faulty for one in run.evaluations)
    if decoded < FEWEST_PROMPTS and not fault:
        note = partial_note(run) or f"{decoded} prompt{' was' if decoded == 1 else 's were'} decoded"
        return (f"Too few prompts for a claim: {note}, and it takes at least {FEWEST_PROMPTS}; give more prompts, or "
                "raise evaluate.limit or evaluate.budget_minutes. The figures below are of these few alone.")
    few = (f"too few prompts for a claim about speed ({decoded}, it takes at least {FEWEST_PROMPTS})"
           if decoded < FEWEST_PROMPTS else
           f"too few timed prompts for a claim about speed ({timed}, it takes at least {FEWEST_TIMED})"
           if 0 < timed < FEWEST_TIMED else "")
    firsts = run.at(temperature=run.temperatures[0], batch_size=run.batch_sizes[0])
    best = max(firsts, key=lambda one: one.overall.speedup or 0.0)
    named = len(firsts) > 1 and best.overall.speedup is not None and not few
    said = few or _speed(best)
    # Not str.capitalize, which would also change the case of what follows.
    first = f"{best.name}, the fastest of {len(firsts)} methods: {said}" if named else said[:1].upper() + said[1:]
    # Without a speed a busy machine spoiled nothing that the sentence says.
    spoiled = best.contended and best.overall.speedup is not None and not few
    busy = "; but the machine was busy, so measure the speed again" if spoiled else ""
    partial = f"; {note}" if (note := partial_note(run)) else ""
    return f"{first}, {_words(run, best)}{partial}{busy}."


def _speed(evaluation: Evaluation) -> str:
    """The speed-up as words: a difference that its interval does not confirm is none."""
    speedup, interval = evaluation.overall.speedup, evaluation.overall.speedup_interval
    if evaluation.nodes == 1:
        slower = speedup is not None and round(speedup, 2) < 1 and (interval is None or interval[1] < 1)
        loop = f"; this loop ran at {speedup:.2f} times the speed of transformers' generate" if slower else ""
        return f"nothing was drafted, {nothing_drafted(evaluation)}{loop}"
    if speedup is None:
        return f"{evaluation.overall.accepted_length:.1f} tokens per target pass instead of 1, speed not measured"
    # Neither "1.00 times faster" nor an effect that other prompts could turn round.
    if f"{speedup:.2f}" == "1.00" or (interval is not None and interval[0] <= 1 <= interval[1]):
        return "about as fast as without drafts"
    return f"{speedup:.{1 if speedup >= 1.1 else 2}f} times faster" if speedup > 1 else (
        f"drafting does not pay here, at {speedup:.2f} times the speed without drafts (decode with the policy {NONE})")


def _words(run: EvaluationRun, best: Evaluation) -> str:
    """The result of the comparison over all evaluations, in words; of a best one with sampled drafts its own."""
    found = Lossless.joined(evaluation.overall.lossless for evaluation in run.evaluations)
    adapted = " of the adapted target" if "drift" in run.header else ""
    if any(evaluation.biased for evaluation in run.evaluations):
        return f"but sampled drafts changed the distribution of answers{adapted}, which is a fault"
    if found.different:
        return f"but drafting changed {found.different} of {found.prompts} answers{adapted}, which is a fault"
    if found.wrong_references:
        return "but answers without drafts are not the target's, which is a fault of the loop itself"
    if best.overall.distribution is not None:
        return f"with answers of the {'adapted target' if adapted else 'target'}'s distribution"
    if found.near_tie_divergences:
        return (f"{found.near_tie_divergences} of {found.prompts} answers{adapted} changed, only where rounding "
                "decides between two words")
    return f"not a word{adapted} changed"
