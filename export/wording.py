"""The sentences and number formats that the terminal, Markdown and HTML share."""

from .results import Evaluation, EvaluationRun

NEAR_TIES_PER_TOKEN = 1 / 10_000
"""In float32, more first differences at near-ties than this would point to a fault."""


def number(value: float | None, digits: int) -> str:
    """The value with so many digits after the point, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, such as 1.62×."""
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """A share in whole percent."""
    return "–" if value is None else f"{value:.0%}"


def how_measured(run: EvaluationRun) -> str:
    """One line: prompts, answer length, batch, temperature, machine."""
    header, first = run.header, run.evaluations[0]
    settings = header["settings"]
    chosen = "greedy" if first.temperature == 0 else f"temperature {first.temperature:g}"
    device = header["machine"]["device"]
    where = f"{header['machine']['processor']}, {header['threads']} threads" if device == "cpu" else device
    return (f"{first.overall.prompts} prompts, answers of at most {settings['max_new_tokens']} tokens, batch size "
            f"{first.batch_size}, {chosen}, {header['dtype']} on {where}; {header['timed_prompts']} prompts timed")


def lossless_verdict(run: EvaluationRun, evaluation: Evaluation) -> str:
    """What the comparison with the reference found, in words."""
    found, tokens = evaluation.overall.lossless, evaluation.overall.new_tokens
    reference = ("transformers' own generate" if evaluation.temperature == 0 else
                 "this project's loop without drafts under the same random numbers")
    if found.identical == found.prompts:
        return (f"All {found.prompts} answers ({tokens:,} tokens) are identical, token by token, to those of "
                f"{reference}.")
    gap = found.max_logit_gap_at_divergence
    where = "" if gap is None else f" (largest logit gap there: {gap:.2g})"
    text = f"{found.identical} of {found.prompts} answers ({tokens:,} tokens) are identical to those of {reference}. "
    if found.near_tie_divergences:
        text += (f"{_differ(found.near_tie_divergences)} where the target itself is undecided within the rounding "
                 f"of {run.header['dtype']}{where}. ")
    if found.different:
        text += f"{_differ(found.different)} where it is not{where}: this is a fault, please report it."
    elif run.header["dtype"] == "float32" and found.near_tie_divergences > max(1.0, tokens * NEAR_TIES_PER_TOKEN):
        text += "That is more often than once in 10,000 tokens, which rounding does not explain."
    return text.strip()


def _differ(count: int) -> str:
    return f"{count} first {'differs' if count == 1 else 'differ'}"


def steadiness(run: EvaluationRun) -> str:
    """How far the repeated passes left their best, and how far they may."""
    seen = run.header["contention"]
    listed = " and ".join(f"{excess:.0%} for {size} {'token' if size == '1' else 'tokens'}"
                          for size, excess in seen["worst_excess"].items())
    return f"{listed} (allowed: {seen['bound']:.0%})"


def contention_note(run: EvaluationRun) -> str:
    """Why the speeds of a contended run are not to be trusted."""
    return (f"The machine was busy with something else: repeated passes left their best by up to "
            f"{steadiness(run)}. Do not trust these speeds; measure again when it is quiet.")
