"""Checks of the training rows by their tokens alone: mask, template, thinking, ends, repetitions, lengths, vocabulary.

Shapes: T tokens of all rows.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from ...data.answers.distill import TRUNCATED_SHARE
from ...data.batches.learned_tokens import LearnedTokens, coverage, repetitions
from ...modules.decoding.token_text import TokenText
from .case import Case, DataSample
from .finding import Finding, group, judged, unchecked
from .openings import START_KINDS, Openings

LEAST_INSIDE, LEAST_INSIDE_ROW = 0.9, 0.75
"""Least share of the answers' tokens in a reduced vocabulary, of all rows and of one: a token outside ends a draft."""
MOST_REPEATED = 0.5
"""Largest share of the answers' tokens in repetitions to the end, which are not learned."""
LEAST_AT_USE = 0.25
"""Least share of rows at a temperature like that of the use; the recipes that mix them give each a third at least."""
MOST_CUT = 0.05
"""Largest share of the labels that may stand after the end of packed rows."""
SHORT, MOST_SHORT = 4, 0.25
"""Labels of an answer that is hardly one, and largest share of rows with no more labels than the draft has steps."""
SAMPLE_TOKENS = 160
"""Tokens of the rendered row."""


def text_findings(case: Case, data: DataSample) -> Iterator[Finding]:
    """Findings from the tokens of the rows and their mask."""
    openings = Openings(case.template)
    yield from _mask(case, data, openings)
    yield _special(case, data, openings)
    yield _ends(case, data)
    yield _repeated(data)
    yield _lengths(case, data)
    yield _temperature(case, data)
    if (ids_Q := case.artifact.drafter.token_ids_Q) is not None:
        yield _vocabulary(data, ids_Q, coverage(data.folder, ids_Q) if data.manifest.split("validation") else 1.0)


def rendered(case: Case, data: DataSample) -> list[tuple[str, bool]]:
    """The first row as pieces of text, each with its mask: True for what is learned."""
    pieces, text = list[tuple[str, bool]](), TokenText(case.target.tokenizer)
    start, stop = data.shard.span(0)
    stop = min(stop, start + SAMPLE_TOKENS)
    for token, learned in zip(data.shard.tokens_T[start:stop].tolist(), data.shard.supervised_T[start:stop].tolist(),
                              strict=True):
        piece = (text.guess if token in case.target.tokenizer.all_special_ids else text.add)(token)
        if pieces and pieces[-1][1] == learned:
            pieces[-1] = (pieces[-1][0] + piece, learned)
        else:
            pieces.append((piece, learned))
    return pieces


def _mask(case: Case, data: DataSample, openings: Openings) -> Iterator[Finding]:
    """Starts of the answers by the mask against those by the template."""
    names, shard = data.names, data.shard
    none = group(names, [row for row in range(len(names)) if not shard.supervised_T[slice(*shard.span(row))].any()])
    yield judged("supervised tokens", f"{float(shard.supervised_T.float().mean()):.0%} of the tokens of {len(names)} "
                 "rows are labels", "every row has labels",
                 (none, f"{none} have no label and teach nothing", 
                  "check the roles of the messages in prompts.path, and target.chat_template"))
    if not openings.by_mode:
        yield unchecked("mask", "the target has no chat template")
        return
    placed = [(row, openings.place(data.tokens(row), start)) for row, start, _ in data.answers()
              if not data.is_document(row)]
    found = {kind: [row for row, one in placed if one.start == kind] for kind in START_KINDS}
    words = {kind: group(names, rows) for kind, rows in found.items()}
    shifts = sorted({one.shift for _, one in placed if one.start == "shifted"})
    late = ", ".join(f"{abs(shift)} token{'s' * (abs(shift) > 1)} too {'late' if shift > 0 else 'early'}"
                     for shift in shifts)
    again = "distil again (distill.answered_by says by whom), or correct what wrote the shards"
    counts = {kind: f"{len(rows)} of {len(placed)} answers" for kind, rows in found.items()}
    yield judged("mask", f"{counts['shifted']} start next to where the template lets them start",
                 "labels start where answers do",
                 (words["shifted"], f"the mask of {words['shifted']} starts {late}: labels are the wrong tokens",
                  again))
    yield judged("turns", f"{counts['other turn']} are a user's message", "labels are the assistant's", (
        words["other turn"], f"labels of {words['other turn']} are another turn: the draft learns to ask",
        f"{again}; prompts.path must name the assistant's messages as such"))
    yield judged("template", f"{counts['other template']} follow other tokens than the served template writes",
                 "answers follow the template that is served", (
        words["other template"], f"{words['other template']} have another template: the target sees other tokens "
        "before an answer than the draft has learned after",
        "set target.chat_template to what is served, and distil again"))
    yield _thinking(data, openings, [(row, one.opening) for row, one in placed if one.opening])


def _thinking(data: DataSample, openings: Openings, found: Sequence[tuple[int, tuple[int, ...]]]) -> Finding:
    """Modes of thinking of the rows against those that are served."""
    modes = {opening: mode for mode, opening in openings.by_mode.items() if mode is not None}
    if len(set(openings.by_mode.values())) < 2 or not found:
        return unchecked("thinking", "the chat template has no switch for it, or no answer follows the template")
    shares = Counter(modes.get(opening) for _, opening in found)
    others = group(data.names, [row for row, one in found if one not in openings.served])
    missing = [one for one in openings.served if all(opening != one for _, opening in found)]
    remedy = ("set template.enable_thinking to what is served ([true, false] for both) and distil again, or tell this "
              "command --template.enable_thinking as it is served")
    return judged("thinking", ", ".join(f"{count / len(found):.0%} of the answers {'' if mode else 'not '}after the "
                                        "prompt of thinking" for mode, count in shares.most_common()),
                  "the rows think as the served template does",
                  (others, f"{others} are in a mode that is not served", remedy),
                  (missing and not others, "a mode that is served is in no row", remedy))


def _special(case: Case, data: DataSample, openings: Openings) -> Finding:
    """Start of the rows and end of the answers against the target's special tokens and the served system prompt."""
    tokenizer, names = case.target.tokenizer, data.names
    ends, special, bos = {*case.template.ends}, {*tokenizer.all_special_ids}, tokenizer.bos_token_id
    starts = {row: data.tokens(row)[: max(2, len(openings.before))] for row in range(len(names))
              if not data.is_document(row)}
    doubled = group(names, [row for row, start in starts.items() if bos is not None and start[:2] == [bos, bos]])
    others = [row for row, start in starts.items() if tuple(start[: len(openings.before)]) != openings.before]
    # Messages of the source may bring system prompts of their own: only with other settings is that a fault.
    other = group(names, others) if data.manifest.template_hash != case.template.hash else ""
    # An end token stands at the end alone; one that stands inside of answers too was cut off there.
    texts = [(row, data.tokens(row)[start:stop]) for row, start, stop in data.answers()]
    inside = {token for _, text in texts for token in text[:-1]}
    strange = [(row, text[-1]) for row, text in texts if text[-1] in special - ends - inside]
    wrong = group(names, [row for row, _ in strange])
    end = tokenizer.convert_ids_to_tokens(strange[0][1]) if strange else ""
    return judged(
        "special tokens", f"{len(starts) - len(others)} of {len(starts)} rows start as the served template does; "
        f"answers end with {', '.join(map(str, tokenizer.convert_ids_to_tokens(sorted(ends))))}",
        "starts and ends are the target's",
        (doubled, f"{doubled} start with {tokenizer.bos_token} twice",
         "set target.chat_template to one without the start token, or render prompts without it"),
        (other, f"{other} start otherwise than the served template, which has another system prompt or form",
         "set template.system, template.tools and target.chat_template to what is served and distil again, or tell "
         "this command the --template keys of the recipe if these are served"),
        (wrong, f"{wrong} end answers with {end}, which is no end token of the target",
         "add it to eos_token_id in the target's generation_config.json, or set target.chat_template"))


def _ends(case: Case, data: DataSample) -> Finding:
    """Answers that the length limit has cut."""
    cut = [data.tokens(row)[stop - 1] not in case.template.ends for row, _, stop in data.answers()
           if not data.is_document(row)]
    share = sum(cut) / max(1, len(cut))
    return judged("truncated answers", f"{share:.0%} of {len(cut)} answers have no end", "answers end by themselves", (
        share > TRUNCATED_SHARE, "drafts will rarely learn an end", "raise distill.max_new_tokens"))


def _repeated(data: DataSample) -> Finding:
    """Answers that end in the repetition of a phrase."""
    found = list(repetitions(data.shard))
    share = sum(stop - start for _, start, stop in found) / max(1, int(data.shard.supervised_T.sum()))
    return judged("repetitive answers", f"{len(found)} answers end in repetitions: {share:.0%} of all answer tokens, "
                  "which are not learned", "most answer tokens are learned",
                  (share > MOST_REPEATED, "most answer tokens are lost", "sample some answers (distill.temperatures), "
                   "lower distill.max_new_tokens, or take other prompts (prompts.path)"))


def _lengths(case: Case, data: DataSample) -> Finding:
    """Rows that are too short for the draft's steps, and labels after the end of a packed row."""
    steps, labels_T, batch = case.artifact.drafter.trained_steps, LearnedTokens().of(data.shard), case.recipe("batch")
    rows = [labels_T[slice(*data.shard.span(row))] for row in range(len(data.names))]
    counts = [int(row.sum()) for row in rows]
    # With stored states a longer row becomes windows; without, the target would not see the tokens before one.
    length = batch.get("row_length") if batch.get("states") == "computed" else None
    lost = sum(int(row[length:].sum()) for row in rows if length) / max(1, sum(counts))
    of_steps = [row for row, count in enumerate(counts) if 0 < count <= steps]
    short = group(data.names, [row for row in of_steps if counts[row] <= SHORT]) or group(
        data.names, of_steps, MOST_SHORT)
    return judged("lengths", f"{sorted(counts)[len(counts) // 2]} labels in the median row, {min(counts)} to "
                  f"{max(counts)}", "rows are long enough for the draft's steps",
                  (short, f"{short} have no more labels than the {steps} draft steps: later ones learn nothing there",
                   "raise distill.max_new_tokens, or take prompts with longer answers (prompts.path)"),
                  (lost > MOST_CUT, f"{lost:.0%} of the labels stand after the end of a packed row",
                   "raise batch.row_length"))


def _temperature(case: Case, data: DataSample) -> Finding:
    """Temperatures of the answers against that of the use."""
    found, use = Counter(round(one, 3) for one in data.shard.temperatures_R.tolist()), case.temperature
    total = sum(found.values())
    # Half of the usual range apart: at 0.5 a sampled answer is about as near to a greedy one as to one at 1.
    near = sum(count for one, count in found.items() if (abs(one - use) < 0.5 if use else one == 0)) / total
    figure = ", ".join(f"{count / total:.0%} of the rows at {one:g}" for one, count in sorted(found.items()))
    return judged("temperature", f"{figure}; used at {use:g}", "answers were written as the draft is used",
                  (near < LEAST_AT_USE, "answers were drawn otherwise than the draft is used",
                   f"add {use:g} to distill.temperatures, or tell this command the --temperature of the use"))


def _vocabulary(data: DataSample, ids_Q: torch.Tensor, held_out: float) -> Finding:
    """Coverage of the answers by the reduced draft vocabulary, over all rows, by row, and of held-out answers."""
    shard = data.shard
    inside_T = torch.isin(shard.tokens_T, ids_Q.cpu().to(shard.tokens_T.dtype))
    places = [slice(*shard.span(row)) for row in range(shard.num_rows)]
    rows = [inside_T[place][shard.supervised_T[place]].float() for place in places]
    whole = float(torch.cat(rows).mean())
    poor = group(data.names, [row for row, found in enumerate(rows) if float(found.mean()) < LEAST_INSIDE_ROW])
    remedy = ("raise drafter.vocabulary_size (null for all tokens), and distil prompts of all kinds that are served "
              "(prompts.path)")
    return judged("draft vocabulary", f"{len(ids_Q):,} tokens hold {whole:.1%} of the answers' tokens" + (
                      f", {held_out:.1%} in held-out ones" if held_out < 1 else ""),
                  "hardly a draft ends at a token outside",
                  (whole < LEAST_INSIDE, f"{1 - whole:.0%} of the answers' tokens can never be guessed", remedy),
                  (held_out < LEAST_INSIDE <= whole, f"{1 - held_out:.0%} of the tokens of other answers can never be "
                   "guessed: too few answers chose the vocabulary", f"raise distill.budget_tokens; or {remedy}"),
                  (poor, f"{poor} have more than a quarter outside: another language or kind of text", remedy))
