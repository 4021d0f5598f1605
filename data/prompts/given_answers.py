"""Answers that a source gives, as the target would write them.

There is one way for all templates: a given answer is what rendering it adds to the rendering of its prompt, up to the
token that ends the turn. What a template puts around an answer is learned from an answer of characters that no template
has, and compared with every row. Of the text of a conversation only the two ends of an answer are looked at: data sets
hold answers with their thoughts before the words, and with end tokens after them."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...modules import UserError
from ...modules.files.json_records import shortened
from .chat import EMPTY_THOUGHT, PROBE, REASONING, ChatTemplate
from .prompt import Message

THOUGHT = "\ue001"  # A private character like `PROBE`: the thought of an answer in a trial
CALL = "000000000"  # Id of a tool call in a trial; Mistral takes nine letters or digits
REMEDY = "change target.chat_template, or let the target answer (distill.answered_by: target)"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer with the tokens before it."""

    prompt: list[int]  # Everything before the answer, the generation prompt included
    answer: list[int]  # Tokens of the assistant, the token that ends its turn included


@dataclass(frozen=True, kw_only=True)
class GivenText:
    """The text of one answer and all before it."""

    prompt: str  # Everything before the answer, the generation prompt included
    answer: str  # The answer as the target would write it
    ended: bool  # True if no end token has to follow: it is there, or the answer was cut before it
    thoughtless: bool = False  # True where the template has no place for the thought that the source gives


@dataclass(frozen=True, kw_only=True)
class AnswerShape:
    """Text of the template around answers of one kind, after the generation prompt."""

    lead: str  # Before the answer
    given: str
    """First part of the lead, up to the end of an empty thought that the template puts there: the target is given it,
    and writes the rest of the lead itself."""
    between: str | None  # Between thought and words; None where the template drops the thought
    thinks: bool  # True where the model writes thoughts, though the template may drop them
    after: str  # After the answer
    closing: str  # End of the answer as the target writes it, in place of `after`: up to the token that ends its turn
    end: str | None  # This token; None where the template has none


class GivenAnswers:
    """Turns of given answers by a target's template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        tokenizer = template.tokenizer
        added = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        # Gemma adds runs of line breaks to its tokens, which end nothing.
        names = sorted((name for name in added if name.strip()), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._ends = {*tokenizer.convert_ids_to_tokens(list(template.ends))}
        last = "|".join(re.escape(name) for name in names if name in self._ends)
        self._ending = re.compile(rf"((?:{last})\s*)+\Z" if last else "(?!)")
        self._shapes: dict[tuple[bool, bool], AnswerShape] = {}

    def turn(self, before: Sequence[Message], answer: Message, tools: Sequence[Message] | None = None) -> Turn:
        """The tokens of an answer and its prompt. Raises UserError as `text` does."""
        text = self.text(before, answer, tools)
        tokens = self.template.encode_after(text.prompt, text.answer)
        if not text.ended and self.template.ends:
            own = self.template.tokenizer.eos_token_id
            tokens.append(own if own in self.template.ends else self.template.ends[0])
        return Turn(prompt=self.template.encode(text.prompt), answer=tokens)

    def text(self, before: Sequence[Message], answer: Message, tools: Sequence[Message] | None = None) -> GivenText:
        """An answer as the target would write it: after the prompt of thinking if it has a thought, of not thinking
        otherwise. What the template puts there in place of a thought is part of the prompt. One that is cut inside its
        thought has no end. Raises UserError if the template does not write the answer as it writes others."""
        before, message = [self._bare(one) for one in before], self._bare(answer)
        thought, calls = message.get(REASONING, ""), bool(message.get("tool_calls"))
        shape, (opening, end) = self._shape(bool(thought), calls), self.template.thought
        said, apart = (answer.get("content") or "").lstrip(), answer.get(REASONING) or answer.get("reasoning")
        # As text, or as servers return it: the thought apart, and no words.
        if cut := bool(end) and not calls and (not said if apart else said.startswith(opening) and end not in said):
            # Its words never came: others stand for them while the template writes the thought before them.
            message = {**message, "content": PROBE}
            if not (thought and shape.thinks):
                raise UserError(f"an answer is cut inside a thought, and none of it can be learned, got "
                                f"{shortened(said or apart)}; leave the row out")
        words = message["content"]
        if thought and not shape.thinks:
            without = {key: value for key, value in message.items() if key not in (REASONING, "reasoning")}
            return replace(self.text(before, without, tools), thoughtless=True)
        asked, rest, lost = self._added(before, message, tools)
        # A template may trim what it is given, and nothing else. Around calls, whose form is the template's, only the
        # ends are compared.
        starts = [shape.given if calls else shape.lead]
        if thought and shape.between is not None:
            starts = [shape.lead + one + shape.between for one in (thought, thought.strip(), thought.strip("\n"))]
        start = next((one for one in starts if rest.startswith(one) and rest[len(one) :].endswith(shape.after)), None)
        if start is None or not (calls or rest[len(start) : len(rest) - len(shape.after)].strip() == words.strip()):
            raise UserError(f"the chat template writes an answer otherwise than others, got {shortened(words)}; "
                            f"{REMEDY}")
        written, opened = rest[: len(rest) - len(shape.after)] + shape.closing, lost is not None and not lost["closed"]
        gap = "" if lost is not None and "\n" not in lost["gap"] else "\n"
        if not thought:
            written = written[len(shape.given) :]
            asked += f"{gap}{end}{2 * gap}" if opened else shape.given if lost is None else ""
        elif opened or shape.between is None:
            # The template loses the thought that the model writes all the same.
            written = written[len(shape.given if shape.between is None else start) :]
            written = f"{'' if opened else opening + gap}{thought}{gap}{end}{2 * gap}{written}"
        if cut:
            written = written.partition(end)[0].rstrip()
        if early := [one[0] for one in self._names.finditer(written)
                     if one[0] in self._ends and not (one.end() == len(written) and shape.end)]:
            raise UserError(f"an answer goes on after an end token of the target, got {early[0]} in "
                            f"{shortened(words)}; cut it there, or leave the row out")
        return GivenText(prompt=asked, answer=written, ended=cut or shape.end is not None)

    @property
    def end(self) -> str | None:
        """The token by which the template ends an answer; None where it has none, or writes no given answers."""
        try:
            return self._shape(False, False).end
        except UserError:
            return None

    def _bare(self, message: Message) -> Message:
        """A message as templates take it: an answer without an empty thought before it and end tokens after it."""
        if message["role"] != "assistant":
            return message
        words = EMPTY_THOUGHT.sub("", self._ending.sub("", message.get("content") or ""))
        # A thought stands after the prompt of thinking, whatever the mode of the recipe.
        return self.template.own({**message, "content": words}, True)

    def _added(self, before: Sequence[Message], answer: Message, tools: Sequence[Message] | None = None
               ) -> tuple[str, str, re.Match[str] | None]:
        """(the prompt; what rendering the answer adds; the thought at the end of the prompt, where that loses it)."""
        thinking = REASONING in answer
        asked = self.template.rendered(before, thinking, True, tools)
        whole = self.template.rendered([*before, answer], thinking, False, tools)
        if whole.startswith(asked):
            return asked, whole[len(asked) :], None
        lost = self.template.thought_at_end.search(asked)
        if lost is None or not whole.startswith(asked[: lost.start()]):
            raise UserError(f"before an answer the chat template writes a prompt otherwise than without one; {REMEDY}")
        return asked, whole[lost.start() :], lost

    def _shape(self, thinking: bool, calls: bool) -> AnswerShape:
        """Text around answers of one kind, by a trial. Raises UserError if the template does not write such answers."""
        if (thinking, calls) in self._shapes:
            return self._shapes[thinking, calls]
        function = {"name": PROBE, "arguments": {PROBE: PROBE}}
        answer = {"role": "assistant", "content": "" if calls else PROBE, **({REASONING: THOUGHT} if thinking else {}),
                  **({"tool_calls": [{"type": "function", "id": CALL, "function": function}]} if calls else {})}
        asked = {"role": "user", "content": "a"}
        prompt, rest, lost = self._added([asked], answer)
        kept, opened = THOUGHT in rest, self.template.thought_at_end.search(prompt)
        if PROBE not in rest or (calls and kept and lost is not None):
            raise UserError("the chat template does not write tool calls; set target.chat_template to one that does, "
                            "or leave such rows out" if calls else
                            f"the chat template does not write answers; {REMEDY}")
        first = rest.index(THOUGHT if kept else PROBE)
        lead, after = rest[:first], rest[rest.rindex(PROBE) + 1 :]
        given = re.match(rf".*{re.escape(self.template.thought[1])}\s*", lead, re.DOTALL)
        # Words may come before calls.
        between = "" if calls else rest[first + 1 : rest.index(PROBE)]
        # A token that ends answers ends the turn, also after others such as those of calls; but not one that stands at
        # the end of a whole text alone. GLM writes none: the first token of the next message is the end.
        ends, more = {*self._ends, *([self.end or ""] if calls else [])}, ""
        following = {"role": "tool", "content": "a", "tool_call_id": CALL} if calls else asked
        with suppress(UserError, ValueError):
            whole = self.template.rendered([asked, answer, following], thinking)
            more = whole[whole.rindex(PROBE) + 1 :]
        names = [one for one in self._names.finditer(after) if not calls or one[0] in ends]
        within = [one for one in names if one[0] in ends and (more or after).startswith(after[: one.end()])]
        later = re.match(rf"{re.escape(after)}(\s*({self._names.pattern}))", more)
        closing, end = "", None
        if not within and later is not None and later[2] in ends:
            after, closing, end = "", later[1], later[2]
        elif names:
            found = (within or names)[0]
            closing, end = after[: found.end()], found[0]
            if calls:
                after, closing = after[found.start() :], end
        elif calls:
            after = ""
        self._shapes[thinking, calls] = AnswerShape(
            lead=lead, given=given[0] if given and self.template.thought[1] else "", between=between if kept else None,
            thinks=kept or bool(self.template.thought[1] and not (opened and opened["closed"])), after=after,
            closing=closing, end=end)
        return self._shapes[thinking, calls]


def join_turns(turns: Sequence[Turn]) -> list[tuple[list[int], list[bool]]]:
    """Join turns into (tokens, supervised) rows.

    A turn whose prompt starts with exactly the row so far extends it; any other starts a row of its own. So every
    supervised token follows the same tokens as when it was decoded, whatever the template does to earlier turns."""
    rows: list[tuple[list[int], list[bool]]] = []
    for turn in turns:
        tokens, supervised = rows[-1] if rows else ([], [])
        if not rows or turn.prompt[: len(tokens)] != tokens:
            tokens, supervised = [], []
            rows.append((tokens, supervised))
        context = turn.prompt[len(tokens) :]
        tokens += context + turn.answer
        supervised += [False] * len(context) + [True] * len(turn.answer)
    return rows
