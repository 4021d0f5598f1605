"""Runner of an evaluation: the target's own answers first, then every method on the same prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ...modules import Generation, Request, SamplingSetting, StaticTree, Target, UserError
from ...modules.decoding.recorders import PassRecorder
from ..measured_files import DECODED, measurements
from .contention import ContentionProbe, rotated
from .lossless import Judge, first_divergence, positions
from .methods import SEED, Method
from .results import Answer, Comparison, Evaluation, Measures, SampleAnswer, Timing
from .schedule import CLOSING_SHARE, UNTIMED_ROWS, Budget, Entry, Schedule, by_prompt_set
from .summary import rounding, sample_answers, summarise
from .timed_answers import Exchange, Records, References, TimedDecoder, untimed_batches

WARM_UP_TOKENS = 8  # Length of the answers decoded before anything is timed
PLAIN, GENERATE = "plain", "generate"  # Baselines without drafts: this project's loop, and transformers'


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
        self.samples: tuple[SampleAnswer, ...] = ()  # Three answers of the first evaluation
        self.graph_refusals = dict[str, None]()  # Why some work was not replayed as CUDA graphs
        self._warm: set[tuple[int, float]] = set()

    def run(self, budget: Budget) -> tuple[Evaluation, ...]:
        """Decode as many questions as fit: one evaluation for each temperature, batch size and method, the methods
        changing fastest. Raises UserError if a prompt with its answer exceeds the context."""
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
        return tuple(
            self._evaluation(method, size, decoded, records.with_untimed(
                decoded.untimed[method.name, method.shape(size, decoded.temperature)]))
            for decoded in found for size, timed in decoded.timed.items()
            for method, records in zip(schedule.methods, timed, strict=True))

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
                    # Whole answers on a device, which records the rounds of all their lengths.
                    short = WARM_UP_TOKENS if self.target.device.type == "cpu" else None
                    self.decoder.decode(opening, method, size, tokens=short)
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
        """One turn of some questions after the target's `answers` to the turns before it, by number of the question."""
        found = [Exchange(entry=entry, turn=turn, temperature=temperature,
                          prompt=tuple(entry.question.prompt(answers.get(entry.number, ()))))
                 for entry in entries if entry.question.turns >= turn]
        for one in found:
            # An answer may take more tokens when a later turn reads it than when it was written.
            request = Request(one.prompt, one.index, self.schedule.config.max_new_tokens, temperature)
            if fault := request.fault(self.target):
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
        """Let the target answer questions that are not timed alone, many rows at once: greedy answers are transformers'
        `generate`'s, sampled ones this project's plain loop's."""
        def answer(asked: Sequence[Exchange], _turn: int) -> dict[int, Sequence[int]]:
            missing = [one for one in asked if self.references.find(one.prompt, temperature, one.index) is None]
            budget.count(len(asked) - len(missing))
            found: dict[int, Sequence[int]] = {}
            for group in untimed_batches(missing):
                made = (self.decoder.generate(group)[0] if temperature == 0 else
                        [one.tokens for one in self.decoder.decode(group, None, len(group))[0].generations])
                found |= zip((one.index for one in group), made, strict=True)
                budget.count(len(group))
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
            drafted: list[Sequence[int]] = []
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
                    drafted += [generation.emitted for generation in result.generations if name != PLAIN]
                tokens[name] += sum(map(len, made[name]))
                seconds[name] += taken
            budget.count(len(names) * len(asked), drafted)
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
        trees: answers depend on that, but not on how many rows are decoded at once, so that batch sizes share them."""
        ordered = [exchange for group in untimed_batches(exchanges) for exchange in group]

        def count(generation: Generation, _tokens: list[int], finished: bool) -> None:
            if finished:
                budget.count(1, [generation.emitted])

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

    # The results -----------------------------------------------------------------------------------------------------

    def _evaluation(self, method: Method, batch_size: int, decoded: Decoded, records: Records) -> Evaluation:
        """The summary of all answers and of groups of them."""
        temperature, config = decoded.temperature, self.schedule.config
        policy, shape = method.policy_for(batch_size, temperature), method.shape(batch_size, temperature)
        # Where drafts were drawn, answers are equal in distribution alone; all others must be so token by token.
        drawn = temperature > 0 and policy is not None and policy.samples and policy.max_size > 1
        exact = self._exact(method, batch_size, decoded) if config.lossy else {}
        answers = self._compared(method, decoded, records, drawn=drawn and not exact, exact=exact)
        self.graph_refusals |= {records.graph_refusal: None} if records.graph_refusal else {}
        if records.recorder is not None:
            first = [one for one, exchange in zip(answers, decoded.exchanges, strict=True) if not exchange.entry.answer]
            self.samples = sample_answers(self.target.tokenizer, first, records.generations, records.recorder,
                                          {one.entry.number: one.entry.question.text for one in decoded.exchanges})

        measures = partial(summarise, seed=SEED, rounding=rounding(self.target.dtype, temperature))

        def by(key: str, least: int = 1) -> dict[str, Measures]:
            """The measures of each group, if there are so many."""
            names = dict.fromkeys(getattr(answer, key) for answer in answers if getattr(answer, key))
            return {str(name): measures([answer for answer in answers if getattr(answer, key) == name],
                                        # A question is timed as a whole, so a turn has no speed of its own.
                                        [timing for timing in records.timings if getattr(timing, key, None) == name])
                    for name in names if len(names) >= least}

        sampling, acceptance = config.sampling(temperature), list[dict[str, Any]]()
        # What a lossy rule accepts must not be taken for what an exact one would.
        if policy is not None and policy.max_size > 1 and not config.lossy:
            static = isinstance(policy, StaticTree)
            depth = policy.topology.depth if isinstance(policy, StaticTree) else max(
                (max(answer.emitted, default=1) for answer in answers), default=1) - 1
            acceptance = measurements([one for answer in answers for one in answer.passes], {
                "method": method.name, "chain": static and depth == policy.max_size - 1, "nodes": policy.max_size,
                **asdict(sampling), "batch_size": batch_size, "answers": len(answers), "source": DECODED}, depth)
        return Evaluation(
            name=method.name, family=method.family, target=self.target.identity.name, batch_size=batch_size,
            temperature=temperature, lossy=config.lossy, nodes=shape[0], tree_nodes=shape[-1],
            partners=method.parts[:-1], contended=self.probe.contended, target_calls=records.target_calls,
            # The expected lengths were estimated without filters, which change what is accepted.
            prediction=method.prediction(batch_size, temperature) if sampling == SamplingSetting(
                temperature=temperature) else None,
            overall=measures(answers, records.timings), by_prompt_set=by("prompt_set"), by_category=by("category"),
            by_turn=by("turn", 2), by_mode=by("mode", 2), acceptance=tuple(acceptance))

    def _exact(self, method: Method, batch_size: int, decoded: Decoded) -> dict[int, Sequence[int]]:
        """The answers of a method by exact verification, with the same drafts and random numbers."""
        self._forget()
        return {one.request.index: one.tokens for group in untimed_batches(decoded.exchanges) for one in
                self.decoder.decode(group, method, batch_size, rows=UNTIMED_ROWS, exact=True)[0].generations}

    def _compared(self, method: Method, decoded: Decoded, records: Records, *, drawn: bool,
                  exact: Mapping[int, Sequence[int]]) -> list[Answer]:
        """The answers, each compared with its reference; where drafts were drawn, with the target's distribution; where
        a lossy rule accepted them, with the `exact` ones."""
        temperature, settings = decoded.temperature, self.schedule.config.settings(1)
        answers = []
        for exchange in decoded.exchanges:
            entry, generation = exchange.entry, records.generations[exchange.index]
            # Greedy references came from a padded batch, which may flip a near-tie by itself.
            again = (lambda one=exchange: self.decoder.generate([one])[0][0]) if temperature == 0 else None
            # The loop's law is held against transformers' even where all drafts were drawn: by the answers without.
            found = (Comparison(divergence=first_divergence(generation.tokens, exact[exchange.index])) if exact else
                     self.judge.compare(generation.request, exchange.reference if drawn else generation.tokens,
                                        exchange.reference, again=again))
            answers.append(Answer(
                question=entry.number - entry.answer * self.schedule.questions, turn=exchange.turn,
                prompt_set=entry.prompt_set,
                category=entry.question.category, mode=entry.question.mode, prompt_tokens=len(exchange.prompt),
                tokens=tuple(generation.tokens), emitted=tuple(generation.emitted),
                truncated=generation.finish == "length", comparison=None if drawn else found,
                wrong_reference=drawn and found.divergence is not None,
                positions=positions(self.target, generation.request, generation.tokens, settings) if drawn else (),
                guessed_by=dict(zip(method.parts, records.parts.get(exchange.index, ()), strict=False))))
        return answers
