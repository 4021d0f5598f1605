"""The bench of an evaluation: references first, then every way to decode takes its turn at the same prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...modules import DecodeResult, Generation, Request, Target, UserError, decode
from .contention import ContentionProbe, clock, rotated
from .lossless import compare, generate, greedy_judge, native_model, sampled_judge
from .memory_traffic import Meter, metered, target_bytes
from .methods import Answered, EvaluateConfig, Method, Question
from .reference_answers import References
from .results import Answer, Comparison, Timing

WARM_UP_TOKENS = 8
"""Length of the answers decoded before anything is timed."""
PLAIN, GENERATE = "plain", "generate"
"""The two baselines, as keys beside the methods' places."""
TURN_STREAMS = 1 << 32
"""Random streams between a question's turns: more than there are questions."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A question in its place: `number` names it, whatever else is decoded."""

    number: int
    prompt_set: str
    question: Question


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One turn of a question: its prompt, the same for all methods, and the target's own answer."""

    entry: Entry
    turn: int
    temperature: float
    prompt: tuple[int, ...]
    reference: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """The key of its random stream."""
        return self.entry.number + (self.turn - 1) * TURN_STREAMS


@dataclass(kw_only=True)
class Records:
    """What one method has produced."""

    generations: dict[int, Generation] = field(default_factory=dict)
    """By the exchange's index."""
    timings: list[Timing] = field(default_factory=list)
    target_calls: int = 0
    meter: Meter = field(default_factory=Meter)

    def note(self, result: DecodeResult) -> None:
        """Take in answers."""
        self.target_calls += result.stats.target_calls
        self.generations |= {one.request.index: one for one in result.generations}

    def beside(self, former: "Records") -> "Records":
        """These, and where there is no answer the former ones'."""
        return Records(generations={**former.generations, **self.generations}, timings=self.timings,
                       target_calls=former.target_calls + self.target_calls,
                       meter=Meter(drafted=former.meter.drafted + self.meter.drafted))


@dataclass(kw_only=True)
class Spent:
    """What one way took for a group of questions."""

    tokens: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """Decodes with all methods and without any.

    Args:
        advance: told how many answers are done, for the progress bar.
        references: what the target answered in other runs.
    """

    def __init__(self, target: Target, methods: Sequence[Method], config: EvaluateConfig,
                 advance: Callable[[int], object], references: References) -> None:
        self.target, self.methods, self.config, self.advance = target, methods, config, advance
        self.references = references
        self.probe = ContentionProbe(target)
        self.target_bytes = target_bytes(target)
        self.first: list[Answer] = []
        """Answers of the first method at the first temperature and batch size."""

    # References ------------------------------------------------------------------------------------------------------

    def refer(self, entries: Sequence[Entry], temperature: float) -> list[Exchange]:
        """Let the target answer all questions alone, turn by turn, so that every method continues the same texts.

        Greedy answers are transformers' `generate`'s, sampled ones this project's plain loop's.

        Raises:
            UserError: if a prompt is empty, or with its answer exceeds the context.
        """
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
        total = len(prompt) + self.config.max_new_tokens
        if total > self.target.context_length:
            raise UserError(f"{where} has {len(prompt)} tokens; with max_new_tokens {self.config.max_new_tokens} it "
                            f"exceeds the target's context of {self.target.context_length}; shorten the prompt or "
                            "lower max_new_tokens")
        return Exchange(entry=entry, turn=turn, temperature=temperature, prompt=prompt)

    def _answered(self, asked: Sequence[Exchange]) -> Iterator[Exchange]:
        known = {one.index: self.references.find(one.prompt, one.temperature, one.index) for one in asked}
        for exchange in asked:
            if (found := known[exchange.index]) is not None:
                self.advance(1)
                yield replace(exchange, reference=found)
        for group in self._batches([exchange for exchange in asked if known[exchange.index] is None]):
            if group[0].temperature == 0:
                answers = self._generate(group)[0]
            else:
                answers = [one.tokens for one in self._decode(group, None, len(group))[0].generations]
            self.advance(len(group))
            for exchange, answer in zip(group, answers, strict=True):
                self.references.note(exchange.prompt, exchange.temperature, exchange.index, tuple(answer))
                yield replace(exchange, reference=tuple(answer))

    def _batches(self, exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
        # Similar lengths together: a padded batch then wastes little.
        ordered, size = sorted(exchanges, key=lambda one: len(one.prompt)), self.config.untimed_batch_size
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    # Methods ---------------------------------------------------------------------------------------------------------

    def time(self, groups: Sequence[Sequence[Exchange]], batch_size: int) -> list[Records]:
        """Decode groups of at most `batch_size` questions by every way in turn, timing each: records of each method."""
        found = [Records() for _ in self.methods]
        if groups:
            self._warm_up(groups[0], batch_size)
        for place, group in enumerate(groups):
            self.probe.sample()
            self._time_group(group, batch_size, found, place)
        if groups:
            self.probe.sample()
        return found

    def finish(self, exchanges: Sequence[Exchange], temperature: float) -> list[dict[int, Records]]:
        """Decode what is not timed, many at once: records of each method, by the nodes of the tree it drafted.

        Batch sizes with the same tree share them: how many rows are decoded at once changes no answer.
        """
        ordered = [exchange for group in self._batches(exchanges) for exchange in group]
        return [{nodes: self._finish(ordered, method, batch_size)
                 for nodes, batch_size in method.tree_sizes(self.config.batches, temperature).items()}
                for method in self.methods]

    def _finish(self, ordered: Sequence[Exchange], method: Method, batch_size: int) -> Records:
        """Decode with the tree of `batch_size` rows, however many are decoded at once."""
        self._forget()
        records = Records()
        if ordered:
            rows = self.config.untimed_batch_size
            records.note(self._decode(ordered, method, batch_size, rows=rows, records=records, watch=True)[0])
        return records

    def answers(self, exchanges: Sequence[Exchange], records: Records, *, compared: bool) -> list[Answer]:
        """A method's answers, each held against its reference where they can be compared."""
        return [self._answer(exchange, records.generations[exchange.index], compared) for exchange in exchanges]

    def draft_share(self, records: Records) -> float:
        """Bytes of weights that drafting read for each byte that the target's verifying passes read."""
        return records.meter.drafted / max(1, records.target_calls * self.target_bytes)

    def _forget(self) -> None:
        """Those that remember earlier text must not draw on what other measurements taught them."""
        for method in self.methods:
            if method.drafter is not None:
                method.drafter.forget()

    def _warm_up(self, group: Sequence[Exchange], batch_size: int) -> None:
        opening = [exchange for exchange in group if exchange.turn == 1]
        for method in (None, *self.methods):
            self._decode(opening, method, batch_size, tokens=WARM_UP_TOKENS)
        self._generate(opening, tokens=WARM_UP_TOKENS)
        self._forget()

    def _time_group(self, group: Sequence[Exchange], batch_size: int, found: Sequence[Records], place: int) -> None:
        ways = [PLAIN, GENERATE, *map(str, range(len(self.methods)))]
        spent = {way: Spent() for way in ways}
        for turn, asked in enumerate(by_turn(group)):
            for way in rotated(ways, place + turn):
                self._spend(spent[way], way, asked, batch_size, found)
            self.advance(len(asked) * len(ways))
        categories = {exchange.entry.question.category for exchange in group}
        for number, records in enumerate(found):
            mine = spent[str(number)]
            records.timings.append(Timing(
                prompt_set=group[0].entry.prompt_set, category=min(categories) if len(categories) == 1 else None,
                drafted=mine.speed, plain=spent[PLAIN].speed, generate=spent[GENERATE].speed, seconds=mine.seconds,
                draft_seconds=mine.draft_seconds,
            ))

    def _spend(self, spent: Spent, way: str, asked: Sequence[Exchange], batch_size: int,
               found: Sequence[Records]) -> None:
        """Decode one turn of a group by one way and add what it took."""
        if way == GENERATE:
            answers, seconds = self._generate(asked)
            spent.tokens += sum(map(len, answers))
        else:
            records = None if way == PLAIN else found[int(way)]
            method = None if way == PLAIN else self.methods[int(way)]
            result, seconds = self._decode(asked, method, batch_size, records=records)
            if records is not None:
                records.note(result)
            spent.tokens += sum(len(generation.tokens) for generation in result.generations)
            spent.draft_seconds += result.stats.draft_seconds
        spent.seconds += seconds

    def _decode(self, asked: Sequence[Exchange], method: Method | None, batch_size: int, *, rows: int | None = None,
                tokens: int | None = None, records: Records | None = None,
                watch: bool = False) -> tuple[DecodeResult, float]:
        """Decode with the tree of `batch_size` rows, as many or `rows` at once; also the seconds it took."""
        requests = [Request(tokens=exchange.prompt, index=exchange.index, temperature=exchange.temperature,
                            max_new_tokens=tokens or self.config.max_new_tokens) for exchange in asked]
        drafter = method.drafter if method else None
        policy = method.policy_for(batch_size, asked[0].temperature) if method and method.policy_for else None
        with metered(drafter, records.meter if records else Meter()):
            started = clock(self.target)
            result = decode(self.target, requests, self.config.settings(rows or batch_size), drafter=drafter,
                            policy=policy, on_tokens=self._on_tokens if watch else None)
            return result, clock(self.target) - started

    def _on_tokens(self, _generation: Generation, _tokens: list[int], finished: bool) -> None:
        if finished:
            self.advance(1)

    def _generate(self, asked: Sequence[Exchange], *, tokens: int | None = None) -> tuple[list[list[int]], float]:
        with native_model(self.target) as model:
            started = clock(self.target)
            answers = generate(model, self.target, [exchange.prompt for exchange in asked],
                               max_new_tokens=tokens or self.config.max_new_tokens,
                               temperature=asked[0].temperature, top_k=self.config.top_k, top_p=self.config.top_p)
            return answers, clock(self.target) - started

    def _answer(self, exchange: Exchange, generation: Generation, compared: bool) -> Answer:
        entry = exchange.entry
        return Answer(question=entry.number, turn=exchange.turn, prompt_set=entry.prompt_set,
                      category=entry.question.category, tokens=tuple(generation.tokens),
                      emitted=tuple(generation.emitted), truncated=generation.finish == "length",
                      comparison=self._compare(exchange, generation) if compared else None)

    def _compare(self, exchange: Exchange, generation: Generation) -> Comparison:
        if exchange.temperature > 0:
            return compare(exchange.prompt, generation.tokens, exchange.reference,
                           sampled_judge(self.target, self.config.settings(1), generation.request))
        # The reference came from a padded batch, which may flip a near-tie by itself.
        return compare(exchange.prompt, generation.tokens, exchange.reference, greedy_judge(self.target),
                       again=lambda: self._generate([exchange])[0][0])


def by_turn(exchanges: Iterable[Exchange]) -> list[list[Exchange]]:
    """The exchanges of each turn, the first turn first."""
    found: dict[int, list[Exchange]] = {}
    for exchange in exchanges:
        found.setdefault(exchange.turn, []).append(exchange)
    return [found[turn] for turn in sorted(found)]


def by_prompt_set(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    """The entries of each prompt set, in order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.prompt_set, []).append(entry)
    return found
