"""Runner of an evaluation: the target's own answers first, then every method on the same prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...modules import Generation, Request, Target, UserError
from ...modules.decoding.recorders import PassRecorder
from .contention import ContentionProbe, rotated
from .lossless import Judge, positions
from .methods import Method
from .reference_answers import References
from .results import Answer, SampleAnswer, Timing
from .schedule import CLOSING_SHARE, UNTIMED_ROWS, Budget, Entry, Schedule, by_prompt_set
from .summary import sample_answers
from .timed_decoding import Exchange, Records, TimedDecoder, untimed_batches

WARM_UP_TOKENS = 8  # Length of the answers decoded before anything is timed
PLAIN, GENERATE = "plain", "generate"  # Baselines without drafts: this project's loop, and transformers'


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """Everything recorded of one method at one temperature and batch size."""

    method: Method  # The method
    batch_size: int  # Rows decoded at once where it was timed
    temperature: float  # Sampling temperature; 0 is greedy
    answers: list[Answer]  # Its answers, compared with the target's own
    records: Records  # Its timed groups and counts
    samples: tuple[SampleAnswer, ...]  # Three of its answers, of the first record


@dataclass(kw_only=True)
class Decoded:
    """Everything that was decoded at one temperature so far."""

    temperature: float  # Sampling temperature; 0 is greedy
    exchanges: list[Exchange]  # Turns with the target's own answers
    timed: dict[int, list[Records]]  # Records of the timed questions, of each method, by batch size
    untimed: dict[tuple[str, tuple[int, ...]], Records]  # Records of the others, by method and shape of its trees


class Runner:
    """Carries out a schedule, adds the answers of the target alone to `references`, and lets `probe` repeat its passes
    between timed groups."""

    def __init__(self, target: Target, schedule: Schedule, references: References, probe: ContentionProbe) -> None:
        self.target, self.schedule, self.references, self.probe = target, schedule, references, probe
        self.decoder = TimedDecoder(target, schedule.config)
        self.judge = Judge(target, schedule.config.settings(1))
        self.taken: list[Entry] = []  # The questions that were decoded
        self._warm: set[tuple[int, float]] = set()

    def run(self, budget: Budget) -> list[MethodRecord]:
        """Decode as many questions as fit: one record for each temperature, batch size and method, the methods changing
        fastest.

        Raises:
            UserError: if a prompt with its answer exceeds the context.
        """
        schedule, config = self.schedule, self.schedule.config
        found = [
            Decoded(temperature=temperature, exchanges=[],
                    timed={size: [Records() for _ in schedule.methods] for size in config.batches},
                    untimed={(method.name, shape): Records() for method in schedule.methods
                             for shape in method.shapes(config.batches, temperature)})
            for temperature in config.degrees
        ]
        # Three answers of the first method are shown with the author of each token.
        first, shape = found[0], schedule.methods[0].shape(config.batches[0], config.degrees[0])
        recorder = PassRecorder()
        first.timed[config.batches[0]][0].recorder = first.untimed[schedule.methods[0].name, shape].recorder = recorder
        # Without a limit everything is one bundle: a row is filled again as soon as an answer ends, and drafters that
        # remember earlier text, which they do within a bundle, have all of it.
        bundles = [list(schedule.entries)] if config.budget_minutes is None else schedule.bundles
        for bundle in budget.fitting(bundles, least=len(by_prompt_set(schedule.entries)), share=1 - CLOSING_SHARE,
                                     sort=lambda bundle: bundle[0].number in schedule.timed):
            self.taken += bundle
            for decoded in found:
                self._decode(bundle, decoded, budget)
        for decoded in found:
            decoded.exchanges.sort(key=lambda one: (one.entry.number, one.turn))
        return [
            self._record(method, size, decoded,
                         records.with_untimed(decoded.untimed[method.name, method.shape(size, decoded.temperature)]))
            for decoded in found for size, timed in decoded.timed.items()
            for method, records in zip(schedule.methods, timed, strict=True)
        ]

    def _decode(self, bundle: Sequence[Entry], found: Decoded, budget: Budget) -> None:
        """Every batch size and method on some questions at one temperature."""
        exchanges: dict[int, Exchange] = {}
        for size, records in found.timed.items():
            groups = self.schedule.groups(bundle, size)
            if groups and (size, found.temperature) not in self._warm:
                # In short: the first pass of a batch size compiles and fills caches, which is no part of decoding.
                self._warm.add((size, found.temperature))
                opening = self._asked(groups[0], 1, {}, found.temperature)
                for method in (None, *self.schedule.methods):
                    self.decoder.decode(opening, method, size, tokens=WARM_UP_TOKENS)
                self.decoder.generate(opening, tokens=WARM_UP_TOKENS)
            if groups:
                self._forget()
            for group in groups:
                self.probe.sample()
                timed = self._time_group(group, size, found.temperature, records, budget)
                exchanges |= {one.index: one for one in timed}
            if groups:
                self.probe.sample()
        found.exchanges += exchanges.values()
        if others := [entry for entry in bundle if entry.number not in self.schedule.timed]:
            untimed = self._references(others, found.temperature, budget)
            found.exchanges += untimed
            self._untimed(untimed, found, budget)
        self.references.save()

    # The target alone ------------------------------------------------------------------------------------------------

    def _asked(self, entries: Sequence[Entry], turn: int, answers: Mapping[int, Sequence[Sequence[int]]],
               temperature: float) -> list[Exchange]:
        """One turn of some questions, after the target's `answers` to the turns before it, by number of the question.

        Raises:
            UserError: if a prompt with its answer exceeds the context.
        """
        found = [Exchange(entry=entry, turn=turn, temperature=temperature,
                          prompt=tuple(entry.question.prompt(answers.get(entry.number, ()))))
                 for entry in entries if entry.question.turns >= turn]
        for one in found:
            # An answer may take more tokens when a later turn reads it than when it was written.
            request = Request(one.prompt, one.index, self.schedule.config.max_new_tokens, temperature)
            if fault := request.fault(self.target.context_length, self.target.vocab_size):
                raise UserError(fault)
        return found

    def _answered(self, entries: Sequence[Entry], temperature: float,
                  answer: Callable[[Sequence[Exchange], int], Mapping[int, Sequence[int]]]) -> list[Exchange]:
        """All turns of some questions with the target's own answers, so that every method continues the same texts;
        `answer` gives those of a turn by `Exchange.index`, at least where they are not known yet."""
        answers: dict[int, list[tuple[int, ...]]] = {entry.number: [] for entry in entries}
        found: list[Exchange] = []
        for turn in range(1, 1 + max(entry.question.turns for entry in entries)):
            asked = self._asked(entries, turn, answers, temperature)
            made = answer(asked, turn)
            for one in asked:
                reference = self.references.find(one.prompt, temperature, one.index)
                if reference is None:
                    reference = tuple(made[one.index])
                    self.references.add(one.prompt, temperature, one.index, reference)
                answers[one.entry.number].append(reference)
                found.append(replace(one, reference=reference))
        return sorted(found, key=lambda exchange: (exchange.entry.number, exchange.turn))

    def _references(self, entries: Sequence[Entry], temperature: float, budget: Budget) -> list[Exchange]:
        """Let the target answer questions that are not timed alone, many rows at once.

        Greedy answers are transformers' `generate`'s, sampled ones this project's plain loop's.
        """
        def answer(asked: Sequence[Exchange], _turn: int) -> dict[int, Sequence[int]]:
            missing = [one for one in asked if self.references.find(one.prompt, temperature, one.index) is None]
            budget.answered(len(asked) - len(missing))
            found: dict[int, Sequence[int]] = {}
            for group in untimed_batches(missing):
                made = (self.decoder.generate(group)[0] if temperature == 0 else
                        [one.tokens for one in self.decoder.decode(group, None, len(group))[0].generations])
                found |= zip((one.index for one in group), made, strict=True)
                budget.answered(len(group))
            return found

        return self._answered(entries, temperature, answer)

    # The methods -----------------------------------------------------------------------------------------------------

    def _time_group(self, group: Sequence[Entry], batch_size: int, temperature: float, records: Sequence[Records],
                    budget: Budget) -> list[Exchange]:
        """Decode a group turn by turn with every method and both baselines, each of which goes first in turn; a
        baseline's answers are the references, as of questions that are not timed."""
        methods = {str(number): method for number, method in enumerate(self.schedule.methods)}
        names, place = [PLAIN, GENERATE, *methods], len(records[0].timings)
        tokens, passes, seconds, draft_seconds = (dict.fromkeys(names, 0), dict.fromkeys(names, 0),
                                                  dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0))

        def answer(asked: Sequence[Exchange], turn: int) -> dict[int, Sequence[int]]:
            made: dict[str, list[list[int]]] = {}
            for name in rotated(names, place + turn - 1):
                if name == GENERATE:
                    made[name], taken = self.decoder.generate(asked)
                else:
                    result, taken = self.decoder.decode(asked, methods.get(name), batch_size,
                                                        records=None if name == PLAIN else records[int(name)])
                    made[name] = [generation.tokens for generation in result.generations]
                    # The pass over the prompt emits the first token.
                    passes[name] += sum(1 + len(generation.emitted) for generation in result.generations)
                    draft_seconds[name] += result.stats.draft_seconds
                tokens[name] += sum(map(len, made[name]))
                seconds[name] += taken
            budget.answered(len(names) * len(asked))
            return dict(zip((one.index for one in asked), made[PLAIN if temperature else GENERATE], strict=True))

        exchanges = self._answered(group, temperature, answer)
        speeds = {name: tokens[name] / seconds[name] for name in names}
        categories, modes = ({getattr(entry.question, name) for entry in group} for name in ("category", "mode"))
        for name, record in zip(methods, records, strict=True):
            record.timings.append(Timing(
                prompt_set=group[0].prompt_set, category=min(categories) if len(categories) == 1 else None,
                mode=min(modes) if len(modes) == 1 else None, drafted=speeds[name], plain=speeds[PLAIN],
                generate=speeds[GENERATE], efficiency=tokens[name] / passes[name], seconds=seconds[name],
                draft_seconds=draft_seconds[name]))
        return exchanges

    def _untimed(self, exchanges: Sequence[Exchange], found: Decoded, budget: Budget) -> None:
        """Decode what is not timed, many rows at once, and add to the records of each method, by the shape of its
        trees.

        Answers depend on the tree, but not on how many rows are decoded at once: batch sizes with the same tree share
        them.
        """
        ordered = [exchange for group in untimed_batches(exchanges) for exchange in group]

        def count(_generation: Generation, _tokens: list[int], finished: bool) -> None:
            if finished:
                budget.answered(1)

        for method in self.schedule.methods:
            for shape, batch_size in method.shapes(self.schedule.config.batches, found.temperature).items():
                # Drafters that remember earlier text must not profit from that of other measurements.
                self._forget()
                self.decoder.decode(ordered, method, batch_size, rows=UNTIMED_ROWS,
                                    records=found.untimed[method.name, shape], on_tokens=count)

    def _forget(self) -> None:
        """Let drafters that remember earlier text forget it."""
        for method in self.schedule.methods:
            if method.drafter is not None:
                method.drafter.forget()

    # The records -----------------------------------------------------------------------------------------------------

    def _record(self, method: Method, batch_size: int, decoded: Decoded, records: Records) -> MethodRecord:
        """Compare every answer with its reference; where drafts were sampled, with the target's distribution."""
        temperature, settings = decoded.temperature, self.schedule.config.settings(1)
        policy = None if method.policy_for is None else method.policy_for(batch_size, temperature)
        # Where drafts were drawn, answers are equal in distribution alone; all others must be so token by token.
        compared = temperature == 0 or policy is None or not policy.samples or policy.max_size == 1
        answers = []
        for exchange in decoded.exchanges:
            entry, generation = exchange.entry, records.generations[exchange.index]
            # Greedy references came from a padded batch, which may flip a near-tie by itself.
            again = partial(self._generated_alone, exchange) if temperature == 0 else None
            # The loop's law is held against transformers' even where all drafts were drawn: by the answers without.
            found = self.judge.compare(generation.request, generation.tokens if compared else exchange.reference,
                                       exchange.reference, again=again)
            answers.append(Answer(
                question=entry.number, turn=exchange.turn, prompt_set=entry.prompt_set,
                category=entry.question.category, mode=entry.question.mode, prompt_tokens=len(exchange.prompt),
                tokens=tuple(generation.tokens), emitted=tuple(generation.emitted),
                truncated=generation.finish == "length", comparison=found if compared else None,
                wrong_reference=not compared and found.divergence is not None,
                positions=() if compared else positions(self.target, generation.request, generation.tokens, settings),
                guessed_by=dict(zip(method.parts, records.parts.get(exchange.index, ()), strict=False))))
        return MethodRecord(
            method=method, batch_size=batch_size, temperature=temperature, answers=answers, records=records,
            samples=() if records.recorder is None else sample_answers(
                self.target.tokenizer, answers, records.generations, records.recorder,
                {one.entry.number: one.entry.question.text for one in decoded.exchanges}),
        )

    def _generated_alone(self, exchange: Exchange) -> list[int]:
        return self.decoder.generate([exchange])[0][0]
