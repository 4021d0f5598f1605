"""Runner of an evaluation: the target's own answers first, then every method on the same prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...modules import Generation, Target, UserError
from ...modules.interfaces.optional_parts import Remembers
from .contention import ContentionProbe, rotated
from .course import Course
from .lossless import compare, greedy_judge, sampled_judge
from .memory_traffic import target_bytes
from .methods import Answered, Method
from .reference_answers import References
from .results import Answer, Comparison, Timing
from .sampled_positions import positions
from .schedule import Entry, Schedule
from .timed_decoding import Exchange, Records, Throughput, TimedDecoder, by_turn
from .tree_replay import Replays, TreeReplay
from .work_plan import GENERATE, PLAIN, REFERENCES, REPLAYS, TIMED, UNTIMED, Kind

WARM_UP_TOKENS = 8
"""Length of the answers decoded before anything is timed."""


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
    graph_refusal: str
    """Why some of its work was not replayed as CUDA graphs; empty where all was, or none was to be."""
    replays: Replays
    """Its greedy answers replayed through smaller and larger trees."""


@dataclass(kw_only=True)
class Decoded:
    """Everything that was decoded at one temperature so far."""

    temperature: float
    """Sampling temperature; 0 is greedy."""
    exchanges: list[Exchange]
    """Turns with the target's own answers."""
    timed: dict[int, list[Records]]
    """Records of the timed questions, of each method, by batch size."""
    untimed: dict[tuple[str, tuple[int, ...]], Records]
    """Records of the others, by method and shape of its trees."""

    @classmethod
    def empty(cls, schedule: Schedule, temperature: float) -> "Decoded":
        """Nothing yet."""
        return cls(temperature=temperature, exchanges=[],
                   timed={size: [Records() for _ in schedule.methods] for size in schedule.groups},
                   untimed={(method.name, shape): Records() for method in schedule.methods
                            for shape in method.shapes(schedule.config.batches, temperature)})


class Runner:
    """Carries out a schedule.

    Args:
        target: the model that answers, and verifies.
        schedule: what is decoded and what is timed.
        references: answers of the target alone, known from other runs and added to.
        probe: repeats passes of the target between timed groups.
    """

    def __init__(self, target: Target, schedule: Schedule, references: References, probe: ContentionProbe) -> None:
        self.target, self.schedule, self.references, self.probe = target, schedule, references, probe
        self.decoder = TimedDecoder(target, schedule.config)
        self.target_bytes = target_bytes(target)
        for entry in schedule.entries:
            # A prompt that cannot be asked is refused before anything is decoded.
            self._ask(entry, 1, schedule.config.degrees[0], [])

    def known(self, entry: Entry, temperature: float) -> bool:
        """True if the target's own answer to a question's first turn is known from other runs."""
        first = self._ask(entry, 1, temperature, [])
        return self.references.find(first.prompt, temperature, first.index) is not None

    def run(self, course: Course) -> list[MethodRecord]:
        """Decode what the course deals out: one record for each temperature, batch size and method, the methods
        changing fastest.

        Drafters that remember earlier text do so within a portion.

        Raises:
            UserError: if a prompt with its answer exceeds the context.
        """
        degrees = self.schedule.config.degrees
        found = {temperature: Decoded.empty(self.schedule, temperature) for temperature in degrees}
        while (portion := course.portion()) is not None:
            for temperature in degrees:
                self._decode(portion, course, found[temperature])
        replays = self._replays(course, [exchange for one in found.values() for exchange in one.exchanges])
        return [record for one in found.values() for record in self._records(one, replays)]

    def _decode(self, portion: Schedule, course: Course, found: Decoded) -> None:
        """Every batch size and method on a portion at one temperature."""
        exchanges = self._references(portion, course, found.temperature)
        found.exchanges += exchanges
        for size, groups in portion.groups.items():
            self._time(exchanges, size, groups, course, found.timed[size])
        # Their answers depend on the tree, but on no batch size: they are decoded once for each tree.
        self._finish([one for one in exchanges if one.entry.number not in portion.timed], course, found)

    def _records(self, found: Decoded, replays: dict[str, Replays]) -> list[MethodRecord]:
        exchanges = sorted(found.exchanges, key=lambda one: (one.entry.number, one.turn))
        return [
            self._record(method, size, exchanges,
                         records.with_untimed(found.untimed[method.name, method.shape(size, found.temperature)]),
                         replays[method.name] if found.temperature == 0 else Replays())
            for size, timed in found.timed.items()
            for method, records in zip(self.schedule.methods, timed, strict=True)
        ]

    # The target alone ------------------------------------------------------------------------------------------------

    def _references(self, portion: Schedule, course: Course, temperature: float) -> list[Exchange]:
        """Let the target answer all questions alone, turn by turn, so that every method continues the same texts.

        Greedy answers are transformers' `generate`'s, sampled ones this project's plain loop's.
        """
        entries = portion.entries
        answers: dict[int, list[tuple[int, ...]]] = {entry.number: [] for entry in entries}
        found: list[Exchange] = []
        for turn in range(1, 1 + max(entry.question.turns for entry in entries)):
            asked = [self._ask(entry, turn, temperature, answers[entry.number]) for entry in entries
                     if entry.question.turns >= turn]
            for answered in self._answered(asked, course):
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

    def _answered(self, asked: Sequence[Exchange], course: Course) -> Iterator[Exchange]:
        kind = Kind(REFERENCES, "", self.schedule.config.untimed_batch_size, asked[0].temperature)
        known = {one.index: self.references.find(one.prompt, one.temperature, one.index) for one in asked}
        for exchange in asked:
            if (found := known[exchange.index]) is not None:
                course.done(kind, exchange.entry)
                yield replace(exchange, reference=found)
        for group in self.decoder.batches([exchange for exchange in asked if known[exchange.index] is None]):
            if group[0].temperature == 0:
                answers = self.decoder.generate(group)[0]
            else:
                answers = [one.tokens for one in self.decoder.decode(group, None, len(group))[0].generations]
            for exchange, answer in zip(group, answers, strict=True):
                course.done(kind, exchange.entry)
                self.references.add(exchange.prompt, exchange.temperature, exchange.index, tuple(answer))
                yield replace(exchange, reference=tuple(answer))

    # The methods -----------------------------------------------------------------------------------------------------

    def _time(self, exchanges: Sequence[Exchange], batch_size: int, groups: Sequence[Sequence[Entry]], course: Course,
              found: Sequence[Records]) -> None:
        """Time the groups of one batch size, and add to the records of each method."""
        turns: dict[int, list[Exchange]] = {}
        for exchange in exchanges:
            turns.setdefault(exchange.entry.number, []).append(exchange)
        asked = [[exchange for entry in group for exchange in turns[entry.number]] for group in groups]
        if asked:
            self._warm_up(asked[0], batch_size)
        for group in asked:
            self.probe.sample()
            self._time_group(group, batch_size, found, course)
        if asked:
            self.probe.sample()

    def _warm_up(self, group: Sequence[Exchange], batch_size: int) -> None:
        opening = [exchange for exchange in group if exchange.turn == 1]
        for method in (None, *self.schedule.methods):
            self.decoder.decode(opening, method, batch_size, tokens=WARM_UP_TOKENS)
        self.decoder.generate(opening, tokens=WARM_UP_TOKENS)
        self._forget()

    def _time_group(self, group: Sequence[Exchange], batch_size: int, found: Sequence[Records],
                    course: Course) -> None:
        """Decode a group turn by turn with every method and both baselines, each of which goes first in turn."""
        names = [PLAIN, GENERATE, *map(str, range(len(self.schedule.methods)))]
        measured, place = {name: Throughput() for name in names}, len(found[0].timings)
        for turn, asked in enumerate(by_turn(group)):
            for name in rotated(names, place + turn):
                self._measure(measured[name], name, asked, batch_size, found)
                for exchange in asked:
                    course.done(self._kind(name, batch_size, exchange.temperature), exchange.entry)
        categories = {exchange.entry.question.category for exchange in group}
        for number, records in enumerate(found):
            drafted = measured[str(number)]
            records.timings.append(Timing(
                prompt_set=group[0].entry.prompt_set, category=min(categories) if len(categories) == 1 else None,
                drafted=drafted.speed, plain=measured[PLAIN].speed, generate=measured[GENERATE].speed,
                efficiency=drafted.efficiency, seconds=drafted.seconds, draft_seconds=drafted.draft_seconds,
            ))

    def _kind(self, name: str, batch_size: int, temperature: float) -> Kind:
        """The kind of work of a timed method or baseline."""
        if name in (PLAIN, GENERATE):
            return Kind(name, "", batch_size, temperature)
        return Kind(TIMED, self.schedule.methods[int(name)].name, batch_size, temperature)

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
            throughput.passes += sum(1 + len(generation.emitted) for generation in result.generations)
            throughput.draft_seconds += result.stats.draft_seconds
        throughput.seconds += seconds

    def _finish(self, exchanges: Sequence[Exchange], course: Course, found: Decoded) -> None:
        """Decode what is not timed, many rows at once, and add to the records of each method, by the shape of its
        trees.

        Batch sizes with the same tree share them: how many rows are decoded at once changes no answer.
        """
        ordered = [exchange for group in self.decoder.batches(exchanges) for exchange in group]
        entries = {exchange.index: exchange.entry for exchange in ordered}
        for method in self.schedule.methods:
            for shape, batch_size in method.shapes(self.schedule.config.batches, found.temperature).items():
                kind = Kind(UNTIMED, method.name, batch_size, found.temperature)

                def count(generation: Generation, _tokens: list[int], finished: bool, kind: Kind = kind) -> None:
                    if finished:
                        course.done(kind, entries[generation.request.index])

                # Drafters that remember earlier text must not profit from that of other measurements.
                self._forget()
                if ordered:
                    self.decoder.decode(ordered, method, batch_size, rows=self.schedule.config.untimed_batch_size,
                                        records=found.untimed[method.name, shape], on_tokens=count)

    def _forget(self) -> None:
        """Let drafters that remember earlier text forget it."""
        for method in self.schedule.methods:
            if isinstance(method.drafter, Remembers):
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
            target_calls=records.target_calls, graph_refusal=records.graph_refusal, replays=replays,
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

    def _replays(self, course: Course, exchanges: Sequence[Exchange]) -> dict[str, Replays]:
        """Replay some greedy answers of each prompt set through prefixes of each method's tree, until it is late."""
        found = {method.name: TreeReplay(self.target, method) for method in self.schedule.methods if method.replayed}
        turns: dict[int, list[Exchange]] = {}
        for exchange in exchanges:
            if exchange.temperature == 0:
                turns.setdefault(exchange.entry.number, []).append(exchange)
        seen: set[str] = set()
        for entry in course.plan.replayed([one for one in self.schedule.entries if one.number in turns]):
            if course.late and entry.prompt_set in seen:
                continue
            seen.add(entry.prompt_set)
            for name, replay in found.items():
                for exchange in turns[entry.number]:
                    replay.add(entry.prompt_set, exchange.prompt, exchange.reference)
                    course.done(Kind(REPLAYS, name), entry)
        return {method.name: found[method.name].found if method.name in found else Replays()
                for method in self.schedule.methods}
