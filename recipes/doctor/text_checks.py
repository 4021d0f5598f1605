"""Checks of the training rows by their tokens alone: mask, template, thinking, ends, repetitions, lengths, vocabulary.

The mask says where an answer starts, and so does the template: its generation prompt stands right before every answer.

Shapes: T tokens of all rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from ...data import ChatTemplate
from ...data.answers.distill import TRUNCATED_SHARE
from ...data.store.token_store import coverage, learned_tokens, repetitions
from ...modules import UserError
from ...modules.decoding.requests import TokenText
from .case import Case, DataSample, Finding, group, judged, unchecked

LEAST_INSIDE, LEAST_INSIDE_ROW = 0.9, 0.75
"""Least share of the answers' tokens in a reduced vocabulary, of all rows and of one: a token outside ends a draft."""
MOST_REPEATED = 0.5  # Largest share of the answers' tokens in repetitions to the end, which are not learned
LEAST_AT_USE = 0.25  # Least share of rows near the temperature of the use; recipes that mix them give each a third
MOST_CUT = 0.05  # Largest share of the labels that may stand after the end of packed rows
SHORT, MOST_SHORT = 4, 0.25  # Labels that hardly make an answer; largest share of rows with no more labels than steps
SAMPLE_TOKENS = 160  # Tokens of the rendered row
PROBE = "\ue000"  # A private character, which stands in no template
MOST_SHIFT = 8  # Largest shift of a mask that is recognised, in tokens; further off it is another template
START_KINDS = ("shifted", "other turn", "other template")  # Wrong starts of an answer by the template


class Openings:
    """Tokens that a chat template, as it is served, writes before answers and before a user's message: none without a
    source."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.by_mode: dict[bool | None, tuple[int, ...]] = {}  # Tokens before an answer, by mode of thinking
        self.before, self.user = tuple[int, ...](), tuple[int, ...]()
        """Tokens before the first user's message, and those of them from the last special one on."""
        if template.source is None:
            return
        asked = [{"role": "user", "content": PROBE}]
        for mode in dict.fromkeys((*template.modes, None, True, False)):
            # A mode that the template refuses has no opening.
            with suppress(UserError):
                bare, text = (template.rendered(asked, mode, prompt) for prompt in (False, True))
                # Some templates write no header: the end of the user's message is what an answer follows.
                before = bare if text.startswith(bare) and text != bare else text[: text.index(PROBE) + 1]
                self.by_mode[mode] = tuple(template.encode_after(before, text[len(before) :]))
        self.before = template.user_turn().before
        special = {*template.tokenizer.all_special_ids}
        places = [place for place, token in enumerate(self.before) if token in special]
        self.user = self.before[max(places, default=0) :]

    def place(self, tokens: Sequence[int], start: int) -> tuple[str, int, tuple[int, ...]]:
        """(one of START_KINDS, or "" for a right one; tokens by which the mask is late; generation prompt before the
        answer) of the start of an answer that the mask puts at `start`. Prompts of thinking and not may differ."""
        # The longest first: not thinking may be an opening of thinking and an empty thought.
        known = sorted({one for one in self.by_mode.values() if one}, key=len, reverse=True)
        for distance in range(MOST_SHIFT + 1):
            for shift in (distance, -distance):
                before = tokens[: max(0, start - shift)]
                for opening in known:
                    if tuple(before[-len(opening) :]) == opening and start - shift <= len(tokens):
                        return "shifted" if shift else "", shift, opening
            if distance == 0 and self.user and tuple(tokens[:start][-len(self.user) :]) == self.user:
                return "other turn", 0, ()
        return "other template", 0, ()


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


def _mask(case: Case, data: DataSample) -> Iterator[Finding]:
    """Starts of the answers by the mask against those by the template."""
    names, shard, openings = data.names, data.shard, Openings(case.template)
    none = group(names, [row for row in range(len(names)) if not shard.supervised_T[slice(*shard.span(row))].any()])
    yield judged("supervised tokens", f"{float(shard.supervised_T.float().mean()):.0%} of the tokens of {len(names)} "
                 "rows are labels", "every row has labels",
                 (none, f"{none} have no label and teach nothing", 
                  "check the roles of the messages in prompts.path, and target.chat_template"))
    if not openings.by_mode:
        yield unchecked("mask", "the target has no chat template")
        return
    placed = [(row, *openings.place(data.tokens(row), start)) for row, start, _ in data.answers()
              if not data.is_document(row)]
    found = {kind: [row for row, start, _, _ in placed if start == kind] for kind in START_KINDS}
    words = {kind: group(names, rows) for kind, rows in found.items()}
    shifts = sorted({shift for _, start, shift, _ in placed if start == "shifted"})
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
    yield _thinking(data, openings, [(row, opening) for row, _, _, opening in placed if opening])


def _thinking(data: DataSample, openings: Openings, found: Sequence[tuple[int, tuple[int, ...]]]) -> Finding:
    """Modes of thinking of the rows against those that are served."""
    modes = {opening: mode for mode, opening in openings.by_mode.items() if mode is not None}
    if len(set(openings.by_mode.values())) < 2 or not found:
        return unchecked("thinking", "the chat template has no switch for it, or no answer follows the template")
    shares = Counter(modes.get(opening) for _, opening in found)
    served = {openings.by_mode[mode] for mode in openings.template.modes if mode in openings.by_mode}
    others = group(data.names, [row for row, one in found if one not in served])
    missing = [one for one in served if all(opening != one for _, opening in found)]
    remedy = ("set template.enable_thinking to what is served ([true, false] for both) and distil again, or tell this "
              "command --template.enable_thinking as it is served")
    return judged("thinking", ", ".join(f"{count / len(found):.0%} of the answers {'' if mode else 'not '}after the "
                                        "prompt of thinking" for mode, count in shares.most_common()),
                  "the rows think as the served template does",
                  (others, f"{others} are in a mode that is not served", remedy),
                  (missing and not others, "a mode that is served is in no row", remedy))


def _special(case: Case, data: DataSample) -> Finding:
    """Start of the rows and end of the answers against the target's special tokens and the served system prompt."""
    tokenizer, names, openings = case.target.tokenizer, data.names, Openings(case.template)
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


def _repeated(_: Case, data: DataSample) -> Finding:
    """Answers that end in the repetition of a phrase."""
    found = list(repetitions(data.shard))
    share = sum(stop - start for _, start, stop in found) / max(1, int(data.shard.supervised_T.sum()))
    return judged("repetitive answers", f"{len(found)} answers end in repetitions: {share:.0%} of all answer tokens, "
                  "which are not learned", "most answer tokens are learned",
                  (share > MOST_REPEATED, "most answer tokens are lost", "sample some answers (distill.temperatures), "
                   "lower distill.max_new_tokens, or take other prompts (prompts.path)"))


def _lengths(case: Case, data: DataSample) -> Finding:
    """Rows that are too short for the draft's steps, and labels after the end of a packed row."""
    steps, labels_T, batch = case.artifact.drafter.trained_steps, learned_tokens(data.shard), case.recipe("batch")
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


def _vocabulary(case: Case, data: DataSample) -> Iterator[Finding]:
    """Coverage of the answers by a reduced draft vocabulary, over all rows, by row, and of held-out answers."""
    shard, ids_Q = data.shard, case.artifact.drafter.token_ids_Q
    if ids_Q is None:
        return
    held_out = coverage(data.folder, ids_Q) if data.manifest.split("validation") else 1.0
    inside_T = torch.isin(shard.tokens_T, ids_Q.cpu().to(shard.tokens_T.dtype))
    places = [slice(*shard.span(row)) for row in range(shard.num_rows)]
    rows = [inside_T[place][shard.supervised_T[place]].float() for place in places]
    whole = float(torch.cat(rows).mean())
    poor = group(data.names, [row for row, found in enumerate(rows) if float(found.mean()) < LEAST_INSIDE_ROW])
    remedy = ("raise drafter.vocabulary_size (null for all tokens), and distil prompts of all kinds that are served "
              "(prompts.path)")
    yield judged("draft vocabulary", f"{len(ids_Q):,} tokens hold {whole:.1%} of the answers' tokens" + (
                      f", {held_out:.1%} in held-out ones" if held_out < 1 else ""),
                  "hardly a draft ends at a token outside",
                  (whole < LEAST_INSIDE, f"{1 - whole:.0%} of the answers' tokens can never be guessed", remedy),
                  (held_out < LEAST_INSIDE <= whole, f"{1 - held_out:.0%} of the tokens of other answers can never be "
                   "guessed: too few answers chose the vocabulary", f"raise distill.budget_tokens; or {remedy}"),
                  (poor, f"{poor} have more than a quarter outside: another language or kind of text", remedy))


TEXT_CHECKS = (_mask, _special, _ends, _repeated, _lengths, _temperature, _vocabulary)
