"""Sentences and number formats of a report; its headline says how much faster it was, and whether a word changed."""

from collections.abc import Sequence

from ...modules import NONE
from ..evaluation.results import OWN, Evaluation, EvaluationRun, Interval, Lossless, Measures

NEAR_TIES_PER_TOKEN = 1 / 10_000
"""In float32, more first differences of greedy answers at near-ties than this would point to a fault. Draws differ more
often: in the flat tail of a distribution the next token is nearer than any rounding."""


def number(value: float | None, digits: int) -> str:
    """The value with so many digits after the point, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, such as 1.62×."""
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """A share in whole percent."""
    return "–" if value is None else f"{value:.0%}"


def span(interval: Interval | None, digits: int) -> str:
    """An interval such as 1.80–2.05; empty where there is none."""
    return "" if interval is None else f"{interval[0]:.{digits}f}–{interval[1]:.{digits}f}"


def nothing_drafted(evaluation: Evaluation) -> str:
    """Words that say why nothing is drafted."""
    # A method is named by its policy where that is not the usual one.
    if evaluation.name.endswith(f", {NONE}"):
        return "as asked"
    where = f" at temperature {evaluation.temperature:g}" if evaluation.temperature else ""
    return f"because on this machine no tree makes decoding faster{where}"


def label(run: EvaluationRun, evaluation: Evaluation) -> str:
    """The method's name, with its temperature and batch size where the run has several."""
    degree = evaluation.temperature
    temperature = ("" if len(run.temperatures) == 1 else f", temperature {degree:g}" if degree else ", greedy")
    return evaluation.name + temperature + (f", batch {evaluation.batch_size}" if len(run.batch_sizes) > 1 else "")


def how_measured(run: EvaluationRun) -> str:
    """One line: prompts, answer length, batches, temperatures."""
    settings = run.header["settings"]
    planned = run.header["planned"]
    prompts = sum(run.header["prompt_sets"].values())
    answers = run.evaluations[0].overall.prompts
    turns = f" ({answers} turns)" if answers != prompts else ""
    sizes, degrees = run.batch_sizes, run.temperatures
    batches = f"batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
    drawn = (f"temperatures {', '.join(f'{one:g}' for one in degrees)}" if len(degrees) > 1 else
             f"temperature {degrees[0]:g}" if degrees[0] else "greedy")
    # Where a replay or a compiler was asked for and refused, the speeds are of another program than the reader expects.
    notes = ""
    if run.header["graphs"]:
        refused = "; ".join(run.header["graph_refusals"])
        notes += f"; replayed as CUDA graphs{f', as far as possible: {refused}' if refused else ''}"
    if settings.get("compile"):
        refusal = run.header["compile_refusal"]
        notes += (f"; layers not compiled: {refusal}" if refusal else
                  f"; layers compiled in {run.header['compile_seconds']:.0f} s")
    # Next to what was planned, where some were left out.
    decoded, timed = (f"{measured}" if measured == wanted else f"{measured} of {wanted}" for measured, wanted in (
        (prompts, sum(planned["prompt_sets"].values())), (run.header["timed_prompts"], planned["timed_prompts"])))
    return (f"{decoded} prompts{turns}, answers of at most {settings['max_new_tokens']} tokens; {batches}; {drawn}; "
            f"timed prompts: {timed}{notes}")


def group_name(run: EvaluationRun, name: str) -> str:
    """Name of a prompt set or category, with its prompts measured and planned where some were left out."""
    header = run.header
    for groups in ("prompt_sets", "categories"):
        planned = header["planned"][groups].get(name)
        if planned is not None:
            measured = header[groups].get(name, 0)
            return name if measured == planned else f"{name} ({measured} of {planned})"
    return name


def all_prompts(run: EvaluationRun) -> str:
    """Heading of the row of all prompts that were measured."""
    measured, planned = (sum(one["prompt_sets"].values()) for one in (run.header, run.header["planned"]))
    return "all prompts" if measured == planned else f"{measured} of {planned} prompts"


def partial_note(run: EvaluationRun) -> str:
    """Words for an evaluation of fewer prompts than planned; empty where all were decoded."""
    measured, planned = (sum(one["prompt_sets"].values()) for one in (run.header, run.header["planned"]))
    if measured == planned:
        return ""
    return (f"{measured} of {planned} prompts were decoded: the rest did not fit into "
            f"{run.header['minutes']['budget']:g} min")


def threads(run: EvaluationRun) -> str:
    """Threads of the processor."""
    return f"{run.header['threads']} thread{'s' if run.header['threads'] > 1 else ''}"


def where_measured(run: EvaluationRun) -> str:
    """One line: number format, machine, threads, versions."""
    header = run.header
    device = header["machine"]["device"]
    # Threads and packed layers change speeds on a processor alone.
    where = (f"{header['machine']['processor']}, {threads(run)}; {header['linear_layers']['forms']}"
             if device == "cpu" else device)
    versions = ", ".join(f"{name} {text}" for name, text in header["versions"].items())
    return f"{header['dtype']} on {where}; {versions}"


COLUMNS_NOTE = (
    "Tokens/pass: tokens that one pass of the target adds to an answer; 1 without drafts. Tokens/s: passes per "
    "second, median over the timed prompts, times tokens per pass of all prompts; plain is this project's loop without "
    "drafts, generate is that of transformers, both medians over the timed prompts. Speed-up: over the faster of these "
    "two. Identical: answers equal to the target's own, token by token, of those compared. "
    "Ranges are 95 % bootstrap intervals over prompts; there is none where fewer than two prompts were timed.")
"""Explanation of the columns and the ranges."""
PARTS_NOTE = ("Several drafters guess together. Of the guesses that the target accepted, the share of each; a guess "
              "that two of them make counts for the one named first.")
"""Explanation of the shares of drafters that guess together."""
HALF_NOTE = (
    "The target runs in {dtype}, and the answers are compared with its own in {dtype}, not with those in float32. In "
    "half precision two tokens more often have the same logit within rounding; which of them is chosen then depends on "
    "the number of tokens in the pass. Such near-ties are counted above, and only other differences would be a fault.")
"""The meaning of identical in half precision."""
SHARED_NOTE = ("Answers that are not timed are decoded once for each tree size and count at every batch size that uses "
               "it.")
"""Note for reports in which batch sizes share answers."""


def partners(evaluation: Evaluation) -> str:
    """The guesses that stand next to those of the draft's own tree; empty where none do."""
    return " and ".join("copies from the text" if name == "lookup" else f"guesses of {name}"
                        for name in evaluation.partners)


def drafting_note(evaluation: Evaluation) -> str:
    """Sentences on the size of the trees, the cost of drafting, and repetitive or cut answers."""
    overall = evaluation.overall
    whence = (f", from the draft's own tree of {evaluation.tree_nodes} nodes and from {both}"
              if (both := partners(evaluation)) else "")
    grown = (f"A pass of the target checks at most {evaluation.nodes} nodes: the last token and the guesses after it"
             f"{whence}." if evaluation.nodes > 1 else f"Nothing is drafted, {nothing_drafted(evaluation)}.")
    return (f"{grown} Drafting took {percent(overall.draft_time_share)} of the time. "
            f"{percent(overall.repetition_rate)} of the answers repeat themselves (over 30 % of their sequences of "
            f"four tokens occurred before), {percent(overall.truncation_rate)} reached the length limit.")


def prediction_note(evaluation: Evaluation) -> str:
    """Predicted figures next to measured ones; empty where nothing was predicted."""
    found, measures = evaluation.prediction, evaluation.by_prompt_set.get(OWN, evaluation.overall)
    if found is None:
        return ""
    # The seconds are those of this project's loop alone, so `generate` is no baseline here, even where it is faster.
    drafted, plain = measures.tokens_per_second, measures.plain_tokens_per_second
    measured = times(drafted / plain) if drafted is not None and plain else "none"
    joined = f", with {both}" if (both := partners(evaluation)) else ""

    def within(interval: tuple[float, float] | None) -> str:
        return "" if interval is None else f" (90 %: {interval[0]:.2f} to {interval[1]:.2f})"

    whose = ("prompts like the training's" if OWN in evaluation.by_prompt_set else
             "all prompts, predicted for those like the training's")
    chosen = ("" if found.interval is not None or found.accepted_length == 1 else
              " Too few answers were held out to predict from any that did not choose the draft: expect less.")
    return (f"Predicted and measured on {whose}: tokens per pass{joined} {found.accepted_length:.2f}"
            f"{within(found.interval)}, measured: {measures.accepted_length:.2f}; speed-up "
            f"over this loop without drafts {times(found.speedup)}{within(found.speedup_interval)}, "
            f"measured: {measured}.{chosen}")


def positions_note(evaluation: Evaluation) -> str:
    """The shares of passes that accepted so many guesses."""
    if evaluation.nodes == 1:
        return "nothing was drafted"
    found = evaluation.overall.acceptance_by_position
    shares = [f"{percent(share)} at least {count}" for count, share in enumerate(found, 1)]
    return f"guesses that a pass accepted: {', '.join(shares)}" if shares else "no pass accepted a guess"


def verdicts(run: EvaluationRun) -> list[str]:
    """Result of the comparison with the target's own answers, a sentence or two for each temperature."""
    found = [lossless_verdict(run, run.at(temperature=temperature)) for temperature in run.temperatures]
    # First of all, since "identical" means another reference for a draft that adapts its target.
    if drift := run.header.get("drift"):
        found.insert(0, "Changes the target: everything below is measured with the adapted target and compared with "
                     f"it. On the original target's greedy answers to {drift['prompts']} prompts ({drift['tokens']:,} "
                     f"tokens), the adapted one differs by a KL divergence of {drift['kl']:.3g} nats a token, and "
                     f"would have chosen {drift['agreement']:.1%} of the tokens as well.")
    if run.header["dtype"] in ("bfloat16", "float16"):
        found.append(HALF_NOTE.format(dtype=run.header["dtype"]))
    if partial := partial_note(run):
        found.append(f"{partial}, and nothing is known of their answers.")
    shared = len(run.batch_sizes) > 1 and run.header["timed_prompts"] < sum(run.header["prompt_sets"].values())
    return [*found, SHARED_NOTE] if shared else found


def identical(measures: Measures) -> str:
    """Answers equal to the reference, of those compared; of sampled drafts the p-value of their distribution."""
    found, drawn = measures.lossless, measures.distribution
    # "0/0" would read like a failure where nothing could be compared.
    if not found.prompts and drawn is not None:
        return f"sampled, p = {drawn.p_value:.2g}"
    return f"{found.identical}/{found.prompts}"


def lossy_words(found: Lossless, lossy: str) -> str:
    """The share of answers that a lossy rule changed, which must not be mistaken for a lossless result."""
    return (f"LOSSY ({lossy}): {found.different} of {found.prompts} answers ({found.different / found.prompts:.0%}) "
            "differ from those of exact verification")


def lossless_verdict(run: EvaluationRun, evaluations: Sequence[Evaluation]) -> str:
    """The result of the comparison for some evaluations at one temperature."""
    temperature = evaluations[0].temperature
    if lossy := evaluations[0].lossy:
        return " ".join(f"{one.name} at temperature {temperature:g}: {lossy_words(one.overall.lossless, lossy)} with "
                        "the same drafts and random numbers. They are not the target's own." for one in evaluations)
    compared = [evaluation for evaluation in evaluations if evaluation.overall.distribution is None]
    said = [_compared(run, compared)] if compared else []
    # Sampled drafts give other tokens than the reference, so only their distribution can be checked.
    for evaluation in evaluations:
        found = evaluation.overall.distribution
        if found is None:
            continue
        where = f"{evaluation.name} with {evaluation.batch_size} rows" if evaluation.batch_size > 1 else evaluation.name
        end = ("chance does not explain that: this is a fault, please report it" if found.differs else
               f"as chance has it; {found.visible:.1%} in this order would have been seen")
        if found.impossible:
            end = f"{found.impossible} tokens had no probability at all; {end}"
        said.append(f"{where}: drafts were sampled, so answers at temperature {temperature:g} are other words from the "
                    f"same distribution. How likely each of {found.tokens:,} tokens was to the target differs from "
                    f"what its probabilities say by at most {found.distance:.1%} (p = {found.p_value:.2g}): {end}.")
        if wrong := evaluation.overall.lossless.wrong_references:
            said.append(f"{wrong} of {evaluation.overall.prompts} answers of this project's loop without drafts are "
                        "not what the target draws with the same random numbers: this is a fault of the loop itself, "
                        "please report it.")
    return " ".join(said)


def _compared(run: EvaluationRun, evaluations: Sequence[Evaluation]) -> str:
    """The result for methods whose answers must equal the reference, token by token."""
    found = Lossless.joined(evaluation.overall.lossless for evaluation in evaluations)
    tokens = sum(evaluation.overall.new_tokens for evaluation in evaluations)
    greedy = evaluations[0].temperature == 0
    reference = ("transformers' own generate" if greedy else
                 "this project's loop without drafts under the same random numbers")
    answers = ("answers" if len(run.temperatures) == 1 else "greedy answers" if greedy else
               f"answers at temperature {evaluations[0].temperature:g}")
    if found.identical == found.prompts:
        return (f"All {found.prompts} {answers} ({tokens:,} tokens) are identical, token by token, to those of "
                f"{reference}.")
    # A near-tie is no fault and must be said apart from one: the target itself would have taken either token.
    gap, dtype = found.max_logit_gap, run.header["dtype"]
    where = "" if gap is None else f" (a token lies {gap:.2g} below the target's best logit)"
    text = (f"{found.identical} of {found.prompts} {answers} ({tokens:,} tokens) are identical to those of "
            f"{reference}. ")
    if found.near_tie_divergences:
        verb = "differs" if found.near_tie_divergences == 1 else "differ"
        moved = "" if found.rounding is None else (
            f", which moves two logits by up to {found.rounding:.2g} against each other there,")
        text += (f"{found.near_tie_divergences} {verb} only where the target itself is undecided: each later token was "
                 "compared with what the target says after the same text, and the rounding "
                 f"of {dtype}{moved} explains it. A wrong token nearer to the best than that would not be seen. ")
    if found.different:
        at_fault = ", ".join(dict.fromkeys(one.name for one in evaluations if one.overall.lossless.different))
        verb = "differs" if found.different == 1 else "differ"
        text += (f"{found.different} {verb} where rounding does not explain it{where}: this is a fault, please report "
                 f"it ({at_fault}).")
    elif greedy and dtype == "float32" and found.near_tie_divergences > max(1.0, tokens * NEAR_TIES_PER_TOKEN):
        text += "That is more often than once in 10,000 tokens, which rounding does not explain."
    return text.strip()


def steadiness(run: EvaluationRun) -> str:
    """Largest excess of the repeated passes over their fastest, and the bound."""
    seen = run.header["contention"]
    listed = " and ".join(f"{excess:.0%} for {size} {'token' if size == '1' else 'tokens'}"
                          for size, excess in seen["worst_excess"].items())
    return f"{listed} (allowed: {seen['bound']:.0%})"


# The headline ---------------------------------------------------------------------------------------------------------

FEWEST_PROMPTS, FEWEST_TIMED = 10, 4  # Fewest decoded and timed prompts for a claim: with two chance decides


def headline(run: EvaluationRun) -> str:
    """The sentence, which names the fastest of several methods at the first temperature and batch size. With fewer
    prompts than `FEWEST_PROMPTS` or `FEWEST_TIMED` it claims nothing or no speed, but a fault or a lossy rule from the
    first one on."""
    decoded, timed = sum(run.header["prompt_sets"].values()), run.header["timed_prompts"]
    fault = any(one.faulty or one.lossy for one in run.evaluations)
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
    if best.lossy:
        return f"but {lossy_words(best.overall.lossless, best.lossy)}"
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
