"""Schedule of an evaluation: the questions to decode, the groups that are timed, and the order under a time budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from ...modules import UserError
from .methods import EvaluateConfig, Method, PromptSets, Question

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A question with its number, from which its random streams follow."""

    number: int
    """Position among the questions of all prompt sets, whether or not a limit leaves some out."""
    prompt_set: str
    """Name of its prompt set."""
    question: Question
    """The question."""


Groups = dict[int, tuple[tuple[Entry, ...], ...]]
"""Entries that are decoded together while they are timed, by batch size."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that an evaluation decodes; checked before the first answer."""

    methods: tuple[Method, ...]
    """The methods to measure, in the order of the report."""
    config: EvaluateConfig
    """Settings of the evaluation."""
    entries: tuple[Entry, ...]
    """The questions to decode: of each prompt set as many as `limit` allows, spread over it."""
    groups: Groups
    """The timed groups: full batches only, of the same questions at every batch size."""

    @classmethod
    def of(cls, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig) -> "Schedule":
        """Number the questions, choose those to decode and group those to time.

        Raises:
            UserError: if there is no method or no prompt, two methods share a name, or a prompt set has too few prompts
                for whole timed batches of every size; if a policy was made for other temperatures or filters.
        """
        _check(methods)
        _check_sampling(methods, config)
        entries = _entries(prompt_sets, config)
        return cls(methods=tuple(methods), config=config, entries=entries, groups=_groups(entries, config))

    @cached_property
    def timed(self) -> frozenset[int]:
        """Numbers of the timed questions, the same at every batch size."""
        return frozenset(entry.number for members in self.groups.values() for group in members for entry in group)

    @property
    def answers(self) -> int:
        """Answers to be decoded in all, those of the target alone included."""
        turns = {entry.number: entry.question.turns for entry in self.entries}
        timed = sum(turns[number] for number in self.timed)
        trees = sum(len(method.shapes(self.config.batches, temperature)) for method in self.methods
                    for temperature in self.config.degrees)
        once = sum(turns.values()) + (2 + len(self.methods)) * len(self.groups) * timed
        return len(self.config.degrees) * once + trees * (sum(turns.values()) - timed)

    @cached_property
    def bundles(self) -> tuple[tuple[Entry, ...], ...]:
        """The questions in an order of which every start covers all prompt sets and categories evenly.

        A bundle is decoded as a whole: questions of one set that fill timed batches of every size, or one that is not
        timed. Each set's first timed bundle comes first.
        """
        least = math.lcm(*self.config.batches)
        placed = []
        for members in self.prompt_sets.values():
            timed = [entry for entry in members if entry.number in self.timed]
            bundles = [tuple(timed[start : start + least]) for start in range(0, len(timed), least)]
            placed += [(place / len(bundles), bundle) for place, bundle in enumerate(bundles)]
            kinds: dict[str, list[Entry]] = {}
            for entry in members:
                if entry.number not in self.timed:
                    kinds.setdefault(entry.question.category, []).append(entry)
            placed += [((place + 0.5) / len(kind), (entry,)) for kind in kinds.values()
                       for place, entry in enumerate(kind)]
        return tuple(bundle for _, bundle in sorted(placed, key=lambda one: one[0]))

    def only(self, entries: Sequence[Entry]) -> "Schedule":
        """The part with these questions: whole bundles, so that their timed groups are complete."""
        numbers = {entry.number for entry in entries}
        groups = {size: tuple(group for group in groups if group[0].number in numbers)
                  for size, groups in self.groups.items()}
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number in numbers), groups=groups)

    @property
    def prompt_sets(self) -> dict[str, list[Entry]]:
        """The entries of each prompt set, in order."""
        return _by_prompt_set(self.entries)


def spread(members: Sequence[T], count: int) -> list[T]:
    """At most `count` members at equal distances, so that every category of an ordered set is represented."""
    count = min(count, len(members))
    return [members[place * len(members) // count] for place in range(count)]


def _check(methods: Sequence[Method]) -> None:
    if not methods:
        raise UserError("an evaluation needs at least one method; give an artifact or a baseline")
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{names.count(name)} methods are called {name!r}; name each artifact and baseline once")


def _check_sampling(methods: Sequence[Method], config: EvaluateConfig) -> None:
    """Refuse a policy for other answers before the target has answered anything. Raises UserError."""
    for policy_for in (method.policy_for for method in methods if method.policy_for is not None):
        for temperature in config.degrees:
            policy_for(config.batches[0], temperature).check_sampling(config.sampling(temperature))


def _entries(prompt_sets: PromptSets, config: EvaluateConfig) -> tuple[Entry, ...]:
    """The questions to decode, numbered before the limit applies: it changes no random stream."""
    entries: list[Entry] = []
    number = 0
    for name, questions in prompt_sets.items():
        members = [Entry(number=number + place, prompt_set=name, question=question)
                   for place, question in enumerate(questions)]
        number += len(members)
        entries += spread(members, len(members) if config.limit is None else config.limit)
    if not entries:
        raise UserError("there is no prompt to evaluate on; give a file of prompts with at least one line")
    return tuple(entries)


def _groups(entries: Sequence[Entry], config: EvaluateConfig) -> Groups:
    """Full batches of the same questions for every batch size.

    Raises:
        UserError: if a set has too few questions to fill whole batches of every size.
    """
    found: Groups = dict.fromkeys(config.batches, ())
    for name, members in _by_prompt_set(entries).items():
        chosen = spread(members, config.timed(len(members)))
        if config.speed_prompts and not chosen:
            sizes = ", ".join(map(str, config.batches))
            raise UserError(f"batches of {sizes} rows cannot be timed on the same prompts: the set "
                            f"{name!r} has {len(members)}, whole batches of every size need at least "
                            f"{math.lcm(*config.batches)}; give more prompts, choose smaller batch_sizes or "
                            "ones that divide one another, or set speed_prompts to 0")
        for size in found:
            found[size] += tuple(tuple(chosen[start : start + size]) for start in range(0, len(chosen), size))
    return found


def _by_prompt_set(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.prompt_set, []).append(entry)
    return found
