"""Schedule of an evaluation: the questions to decode, those that are timed, their order, and what fits its minutes."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from ...modules import UserError
from ...modules.progress import ProgressLine
from .methods import EvaluateConfig, Method, PromptSets, Question

T = TypeVar("T")
UNTIMED_ROWS = 8
"""Rows decoded at once for prompts that are not timed; their number changes neither acceptance nor identity."""
CLOSING_SHARE = 0.1  # Share of the minutes that is kept for what follows decoding: comparisons and the report


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A question with its number, from which its random streams follow."""

    number: int  # Position among the questions of all prompt sets, whether or not a limit leaves some out; further
    # answers to them are numbered after all of these
    answer: int = 0  # Which of several answers to the question this is
    prompt_set: str
    question: Question


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that an evaluation decodes; checked before the first answer."""

    methods: tuple[Method, ...]  # The methods to measure, in the order of the report
    config: EvaluateConfig  # Settings of the evaluation
    entries: tuple[Entry, ...]  # The questions to decode: of each prompt set as many as `limit` allows, spread over it
    timed: frozenset[int]
    """Numbers of the timed questions, the same at every batch size: of each set they fill whole batches."""
    questions: int  # All questions of the prompt sets, by which the numbers of further answers are apart

    @classmethod
    def of(cls, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig) -> "Schedule":
        """Number the questions, choose those to decode and those to time. Raises UserError for what `evaluate` refuses,
        and if a policy was made for other temperatures or filters."""
        if not methods:
            raise UserError("an evaluation needs at least one method; give an artifact or a baseline")
        names = [method.name for method in methods]
        for method in methods:
            if names.count(method.name) > 1:
                raise UserError(f"{names.count(method.name)} methods are called {method.name!r}; name each artifact "
                                "and baseline once")
            # A policy for other answers is refused before the target has answered anything.
            for temperature in config.degrees:
                if (policy := method.policy_for(config.batches[0], temperature)) is not None:
                    policy.check_sampling(config.sampling(temperature))
        entries: list[Entry] = []
        number = 0
        for name, questions in prompt_sets.items():
            # Numbered before the limit applies: it changes no random stream.
            members = [Entry(number=number + place, prompt_set=name, question=question)
                       for place, question in enumerate(questions)]
            number += len(members)
            entries += spread(members, len(members) if config.limit is None else config.limit)
        if not entries:
            raise UserError("there is no prompt to evaluate on; give a file of prompts with at least one line")
        # All answers to a question one after another, so that one batch holds several of them.
        entries = [replace(entry, number=entry.number + answer * number, answer=answer)
                   for entry in entries for answer in range(config.answers)]
        timed: list[int] = []
        for name, members in by_prompt_set(entries).items():
            first = [entry for entry in members if entry.answer == 0]
            kept = {entry.number for entry in spread(first, config.timed(len(first)))}
            chosen = [entry for entry in members if entry.number - entry.answer * number in kept]
            if config.speed_prompts and not chosen:
                sizes = ", ".join(map(str, config.batches))
                raise UserError(f"batches of {sizes} rows cannot be timed on the same prompts: the set "
                                f"{name!r} has {len(first)}, whole batches of every size need at least "
                                f"{math.lcm(*config.batches)}; give more prompts, choose smaller batch_sizes or "
                                "ones that divide one another, or set speed_prompts to 0")
            timed += [entry.number for entry in chosen]
        return cls(methods=tuple(methods), config=config, entries=tuple(entries), timed=frozenset(timed),
                   questions=number)

    @property
    def answers(self) -> int:
        """Answers to be decoded in all, those of the target alone included."""
        # Timed questions are decoded by every method at every batch size; others once for each tree.
        # The answers of the target alone to timed questions are those of a baseline.
        counts = {entry.number: entry.question.turns for entry in self.entries}
        timed = sum(counts[number] for number in self.timed)
        trees = sum(len(method.shapes(self.config.batches, temperature)) for method in self.methods
                    for temperature in self.config.degrees)
        others = sum(counts.values()) - timed
        once = others + (2 + len(self.methods)) * len(self.config.batches) * timed
        return len(self.config.degrees) * once + trees * others

    def groups(self, entries: Sequence[Entry], size: int) -> list[list[Entry]]:
        """The timed ones of some questions in batches of this many rows, each of one prompt set."""
        chosen = [[entry for entry in members if entry.number in self.timed]
                  for members in by_prompt_set(entries).values()]
        return [members[start : start + size] for members in chosen for start in range(0, len(members), size)]

    @property
    def bundles(self) -> list[list[Entry]]:
        """The questions in bundles, which are decoded as wholes: those of one set that fill timed batches of every
        size, or one batch of questions that are not timed; each question has all its answers in one bundle.

        The sets take turns, within a batch too, and every start of a set covers its categories evenly: whatever the
        minutes are there are figures of each. Each set's first bundle is timed if any is."""
        sets, answers = by_prompt_set(self.entries), self.config.answers
        groups = [self.groups(members, math.lcm(*self.config.batches) * answers) for members in sets.values()]
        timed = [group for turn in zip_longest(*groups) for group in turn if group]
        queues = list[list[list[Entry]]]()
        for members in sets.values():
            kinds: dict[str, list[list[Entry]]] = {}
            for start in range(0, len(members), answers):
                if members[start].number not in self.timed:
                    kinds.setdefault(members[start].question.category, []).append(members[start : start + answers])
            # By the middle of its share of a category: each start of this list has all categories in their proportion.
            queues.append([whole for _, whole in sorted((((place + 0.5) / len(kind), whole) for kind in kinds.values()
                                                         for place, whole in enumerate(kind)), key=lambda one: one[0])])
        others = [whole for turn in zip_longest(*queues) for whole in turn if whole]
        # The first timed bundle of each set stands before any batch that is not timed.
        placed = [(max(0, place + 1 - len(sets)) / len(timed), bundle) for place, bundle in enumerate(timed)]
        placed += [((start + UNTIMED_ROWS / 2) / len(others),
                    [entry for whole in others[start : start + UNTIMED_ROWS] for entry in whole])
                   for start in range(0, len(others), UNTIMED_ROWS)]
        return [bundle for _, bundle in sorted(placed, key=lambda one: one[0])]


def spread(members: Sequence[T], count: int) -> list[T]:
    """At most `count` members at equal distances, so that every category of an ordered set is represented."""
    count = min(count, len(members))
    return [members[place * len(members) // count] for place in range(count)]


def require_context(prompt_sets: PromptSets, config: EvaluateConfig, context_length: int) -> None:
    """Refuse questions whose turns and longest answers together do not fit the target's context, before anything is
    answered: the answers of one turn are in the prompt of the next. Raises UserError naming the first."""
    for name, questions in prompt_sets.items():
        for question in spread(questions, len(questions) if config.limit is None else config.limit):
            size, room = answer_room(question, context_length)
            if not size:
                raise UserError(f"a question of the set {name!r} has no tokens; leave it out")
            texts = max(map(len, question.references), default=0), len(question.draft_tokens)
            if max(texts[0], texts[1] + config.max_new_tokens) > context_length:
                raise UserError(f"a question of the set {name!r} ({question.text[:40]!r}) has a reference of "
                                f"{texts[0]:,} tokens and a draft_prompt of {texts[1]:,}, and the target's context "
                                f"holds {context_length:,}, answers included; shorten them")
            if room < config.max_new_tokens:
                remedy = f"lower max_new_tokens to {room}" if room > 0 else "leave it out, or choose another target"
                answers = f"{question.turns} answer{'s' * (question.turns > 1)}"
                raise UserError(f"a question of the set {name!r} ({question.text[:40]!r}) has {size:,} tokens; with "
                                f"{answers} of evaluate.max_new_tokens {config.max_new_tokens} it exceeds the target's "
                                f"context of {context_length:,}; {remedy}")


def answer_room(question: Question, context_length: int) -> tuple[int, int]:
    """(tokens of a question with all its turns, tokens that a context leaves for each of its answers)."""
    size = len(question.prompt([()] * (question.turns - 1)))
    return size, (context_length - size) // question.turns


def by_prompt_set(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The entries of each prompt set, in their order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.prompt_set, []).append(entry)
    return found


class Budget:
    """Minutes of an evaluation from now on, None for no limit, by a monotonic clock; and the line that shows how much
    is done."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = math.inf if minutes is None else 60 * minutes  # Seconds of the whole evaluation
        self.clock, self.started = clock, clock()
        self.line = ProgressLine("evaluate", None, "answer", shown=False)  # Counts answers
        self.emitted = self.passes = 0  # Tokens of drafted answers after the first, and the passes that emitted them

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    def count(self, answers: int, drafted: Sequence[Sequence[int]] = ()) -> None:
        """Count answers on the line; of `drafted` ones each has the tokens that its passes emitted."""
        self.emitted, self.passes = self.emitted + sum(map(sum, drafted)), self.passes + sum(map(len, drafted))
        self.line.figures = f"accepted {self.emitted / self.passes:.2f}" if self.passes else ""
        self.line.advance(answers)

    def fitting(self, pieces: Sequence[T], *, least: int, share: float = 1.0,
                sort: Callable[[T], Hashable] = lambda _: None) -> Iterator[T]:
        """Yield the pieces, what matters most first, until the next one would not end within a share of the minutes;
        `least` are done whatever time it is.

        The caller works on a piece before it asks for the next one; the mean seconds of those so far, of the same sort,
        are expected of the next. So the work ends one piece before or after the limit, however the machine's speed
        changes on the way."""
        seconds: dict[Hashable, list[float]] = {}
        for place, piece in enumerate(pieces):
            # The first of a sort also warms up caches and compilers, for minutes perhaps: it says little of the next.
            known = seconds.setdefault(sort(piece), [])[1:]
            expected = sum(known) / len(known) if known else 0.0
            if place >= least and self.elapsed + expected > share * self.limit:
                return
            started = self.elapsed
            yield piece
            seconds[sort(piece)].append(self.elapsed - started)
