"""Runner of an evaluation: the target's own answers first, then every method on the same prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...modules import Drafter, Generation, Target, UserError
from .contention import ContentionProbe, rotated
from .lossless import compare, greedy_judge, sampled_judge
from .memory_traffic import target_bytes
from .methods import Answered, Method
from .reference_answers import References
from .results import Answer, Comparison, Timing
from .sampled_positions import positions
from .schedule import Entry, Schedule, spread
from .timed_decoding import Exchange, Records, Throughput, TimedDecoder, by_turn
from .tree_replay import Replays, replay_trees

WARM_UP_TOKENS = 8
"""Length of the answers decoded before anything is timed."""
PLAIN, GENERATE = "plain", "generate"
"""Decoding without drafts by this project's loop and by transformers: the two baselines of every timed group."""


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """Everything recorded of one method at one temperature and batch size."""

    method: Method
    """The method."""
    batch_size: int
    """Rows decoded at once where it was timed."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    answers: list[Answer]
    """Its answers, compared with the target's own."""
    timings: list[Timing]
    """Its timed groups."""
    target_calls: int
    """Forward calls of the target after the prompts'."""
    draft_share: float
    """Bytes of weights that drafting read for each byte that the target's verifying passes read."""
    replays: Replays
    """Its greedy answers replayed through smaller and larger trees."""


class Runner:
    """Carries out a schedule.

    Args:
        target: the model that answers, and verifies.
        schedule: what is decoded and what is timed.
        references: answers of the target alone, known from other runs and added to.
        advance: called with the number of answers done.
        warn: called with a sentence if the machine is busy before anything is timed.
    """

    def __init__(self, target: Target, schedule: Schedule, references: References,
                 advance: Callable[[int], object], warn: Callable[[str], object]) -> None:
        self.target, self.schedule, self.references, self.advance, self.warn = (
            target, schedule, references, advance, warn)
        self.decoder = TimedDecoder(target, schedule.config)
        self.probe = ContentionProbe(target)
        self.target_bytes = target_bytes(target)

    def run(self) -> list[MethodRecord]:
        """Decode everything: one record for each temperature, batch size and method, the methods changing fastest.

        Raises:
            UserError: if a prompt is empty, or with its answer exceeds the context.
        """
        if self.schedule.timed and (warning := self.probe.warning()) is not None:
            self.warn(warning)
        return [record for temperature in self.schedule.config.degrees for record in self._at(temperature)]

    def _at(self, temperature: float) -> list[MethodRecord]:
        """Every batch size and method at one temperature."""
        exchanges = self._references(temperature)
        timed = {size: self._time(exchanges, size) for size in self.schedule.groups}
        # Their answers depend on the tree, but on no batch size: they are decoded once for each tree.
        untimed = self._finish([one for one in exchanges if one.entry.number not in self.schedule.timed], temperature)
        replays = [self._replay(method, exchanges) for method in self.schedule.methods]
        return [
            self._record(method, size, exchanges, records.with_untimed(others[method.shape(size, temperature)]), replay)
            for size, found in timed.items()
            for method, records, others, replay in zip(self.schedule.methods, found, untimed, replays, strict=True)
        ]

    # The target alone ------------------------------------------------------------------------------------------------

    def _references(self, temperature: float) -> list[Exchange]:
        """Let the target answer all questions alone, turn by turn, so that every method continues the same texts.

        Greedy answers are transformers' `generate`'s, sampled ones this project's plain loop's.
        """
        entries = self.schedule.entries
        answers: dict[int, list[tuple[int, ...]]] = {entry.number: [] for entry in entries}
        found: list[Exchange] = []
        for turn in range(1, 1 + max(entry.question.turns for entry in entries)):
            asked = [self._ask(entry, turn, temperature, answers[entry.number]) for entry in entries
                     if entry.question.turns >= turn]
            for answered in self._answered(asked):
                answers[answered.entry.number].append(answered.reference)
                found.append(answered)
            self.references.save()
        return sorted(found, key=lambda exchange: (exchange.entry.number, exchange.turn))

    def _ask(self, entry: Entry, turn: int, temperature: float, answers: Answered) -> Exchange:
        prompt = tuple(entry.question.prompt(answers))
        where = f"a prompt of the set {entry.prompt_set!r}" + (f" (turn {turn})" if turn > 1 else "")
        if not prompt:
            raise UserError(f"{where} has no tokens; remove it")
        longest = self.schedule.config.max_new_tokens
        if len(prompt) + longest > self.target.context_length:
            raise UserError(f"{where} has {len(prompt)} tokens; with max_new_tokens {longest} it exceeds the target's "
                            f"context of {self.target.context_length}; shorten the prompt or lower max_new_tokens")
        return Exchange(entry=entry, turn=turn, temperature=temperature, prompt=prompt)

    def _answered(self, asked: Sequence[Exchange]) -> Iterator[Exchange]:
        known = {one.index: self.references.find(one.prompt, one.temperature, one.index) for one in asked}
        for exchange in asked:
            if (found := known[exchange.index]) is not None:
                self.advance(1)
                yield replace(exchange, reference=found)
        for group in self.decoder.batches([exchange for exchange in asked if known[exchange.index] is None]):
            if group[0].temperature == 0:
                answers = self.decoder.generate(group)[0]
            else:
                answers = [one.tokens for one in self.decoder.decode(group, None, len(group))[0].generations]
            self.advance(len(group))
            for exchange, answer in zip(group, answers, strict=True):
                self.references.add(exchange.prompt, exchange.temperature, exchange.index, tuple(answer))
                yield replace(exchange, reference=tuple(answer))

    # The methods -----------------------------------------------------------------------------------------------------

    def _time(self, exchanges: Sequence[Exchange], batch_size: int) -> list[Records]:
        """Time the groups of one batch size: the records of each method."""
        turns: dict[int, list[Exchange]] = {}
        for exchange in exchanges:
            turns.setdefault(exchange.entry.number, []).append(exchange)
        groups = [[exchange for entry in group for exchange in turns[entry.number]]
                  for group in self.schedule.groups[batch_size]]
        found = [Records() for _ in self.schedule.methods]
        if groups:
            self._warm_up(groups[0], batch_size)
        for place, group in enumerate(groups):
            self.probe.sample()
            self._time_group(group, batch_size, found, place)
        if groups:
            self.probe.sample()
        return found

    def _warm_up(self, group: Sequence[Exchange], batch_size: int) -> None:
        opening = [exchange for exchange in group if exchange.turn == 1]
        for method in (None, *self.schedule.methods):
            self.decoder.decode(opening, method, batch_size, tokens=WARM_UP_TOKENS)
        self.decoder.generate(opening, tokens=WARM_UP_TOKENS)
        self._forget()

    def _time_group(self, group: Sequence[Exchange], batch_size: int, found: Sequence[Records], place: int) -> None:
        """Decode a group turn by turn with every method and both baselines, each of which goes first in turn."""
        names = [PLAIN, GENERATE, *map(str, range(len(self.schedule.methods)))]
        measured = {name: Throughput() for name in names}
        for turn, asked in enumerate(by_turn(group)):
            for name in rotated(names, place + turn):
                self._measure(measured[name], name, asked, batch_size, found)
            self.advance(len(asked) * len(names))
        categories = {exchange.entry.question.category for exchange in group}
        for number, records in enumerate(found):
            drafted = measured[str(number)]
            records.timings.append(Timing(
                prompt_set=group[0].entry.prompt_set, category=min(categories) if len(categories) == 1 else None,
                drafted=drafted.speed, plain=measured[PLAIN].speed, generate=measured[GENERATE].speed,
                seconds=drafted.seconds, draft_seconds=drafted.draft_seconds,
            ))

    def _measure(self, throughput: Throughput, name: str, asked: Sequence[Exchange], batch_size: int,
                 found: Sequence[Records]) -> None:
        """Decode one turn of a group with a method or baseline and add its tokens and seconds."""
        if name == GENERATE:
            answers, seconds = self.decoder.generate(asked)
            throughput.tokens += sum(map(len, answers))
        else:
            records = None if name == PLAIN else found[int(name)]
            method = None if name == PLAIN else self.schedule.methods[int(name)]
            result, seconds = self.decoder.decode(asked, method, batch_size, records=records)
            throughput.tokens += sum(len(generation.tokens) for generation in result.generations)
            throughput.draft_seconds += result.stats.draft_seconds
        throughput.seconds += seconds

    def _finish(self, exchanges: Sequence[Exchange], temperature: float) -> list[dict[tuple[int, ...], Records]]:
        """Decode what is not timed, many rows at once: the records of each method, by the shape of its trees.

        Batch sizes with the same tree share them: how many rows are decoded at once changes no answer.
        """
        ordered = [exchange for group in self.decoder.batches(exchanges) for exchange in group]
        return [{shape: self._untimed(ordered, method, batch_size)
                 for shape, batch_size in method.shapes(self.schedule.config.batches, temperature).items()}
                for method in self.schedule.methods]

    def _untimed(self, ordered: Sequence[Exchange], method: Method, batch_size: int) -> Records:
        """Decode with the tree of `batch_size` rows, however many are decoded at once."""
        self._forget()
        records = Records()
        if ordered:
            self.decoder.decode(ordered, method, batch_size, rows=self.schedule.config.untimed_batch_size,
                                records=records, on_tokens=self._on_tokens)
        return records

    def _on_tokens(self, _generation: Generation, _tokens: list[int], finished: bool) -> None:
        if finished:
            self.advance(1)

    def _forget(self) -> None:
        """Drafters that remember earlier text must not profit from the texts of other measurements."""
        for method in self.schedule.methods:
            if method.drafter is not None:
                method.drafter.forget()

    # The records -----------------------------------------------------------------------------------------------------

    def _record(self, method: Method, batch_size: int, exchanges: Sequence[Exchange], records: Records,
                replays: Replays) -> MethodRecord:
        """Compare every answer with its reference."""
        temperature = exchanges[0].temperature
        compared = method.comparable(batch_size, temperature)
        return MethodRecord(
            method=method, batch_size=batch_size, temperature=temperature, timings=records.timings,
            answers=[replace(self._answer(exchange, records.generations[exchange.index], compared),
                             guessed_by=method.guessed_by(records.parts.get(exchange.index, ())))
                     for exchange in exchanges],
            target_calls=records.target_calls, replays=replays,
            draft_share=records.meter.drafted / max(1, records.target_calls * self.target_bytes),
        )

    def _answer(self, exchange: Exchange, generation: Generation, compared: bool) -> Answer:
        entry = exchange.entry
        return Answer(question=entry.number, turn=exchange.turn, prompt_set=entry.prompt_set,
                      category=entry.question.category, tokens=tuple(generation.tokens),
                      emitted=tuple(generation.emitted), truncated=generation.finish == "length",
                      comparison=self._compare(exchange, generation) if compared else None,
                      positions=() if compared else positions(self.target, generation.request, generation.tokens,
                                                              self.schedule.config.settings(1)))

    def _compare(self, exchange: Exchange, generation: Generation) -> Comparison:
        settings = self.schedule.config.settings(1)
        if exchange.temperature > 0:
            return compare(exchange.prompt, generation.tokens, exchange.reference,
                           sampled_judge(self.target, settings, generation.request))
        # The reference came from a padded batch, which may flip a near-tie by itself.
        return compare(exchange.prompt, generation.tokens, exchange.reference, greedy_judge(self.target, settings),
                       again=lambda: self.decoder.generate([exchange])[0][0])

    def _replay(self, method: Method, exchanges: Sequence[Exchange]) -> Replays:
        """Replay some greedy answers of each prompt set through prefixes of the method's tree."""
        if not isinstance(method.drafter, Drafter) or method.trees is None or exchanges[0].temperature > 0:
            return Replays()
        rows: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
        for exchange in exchanges:
            rows.setdefault(exchange.entry.prompt_set, []).append((exchange.prompt, exchange.reference))
        chosen = {name: spread(members, self.schedule.config.tree_prompts) for name, members in rows.items()}
        return replay_trees(self.target, method.drafter, method.trees,
                            {name: members for name, members in chosen.items() if members})
