"""Measure drafts against the target alone: acceptance, speed, and whether a single word changed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tqdm import tqdm

from ..modules import (
    BASELINES,
    DecodeResult,
    DecodeSettings,
    Drafter,
    Generation,
    Policy,
    Proposer,
    Request,
    Target,
    Topology,
    UserError,
    baseline,
    decode,
)
from .artifact import Artifact
from .lossless import compare, generate, greedy_judge, native_model, sampled_judge
from .measure import ContentionProbe, clock, machine, rotated
from .results import Answer, Comparison, Evaluation, EvaluationRun, Measures, Timing, summarise
from .trees import accepted_length_by_tree_size

PromptSets = Mapping[str, Sequence[tuple[str, Sequence[int]]]]
"""Prompts by the name of their set, each (category, tokens); a category of "" stands for none."""
WARM_UP_TOKENS = 8
"""Length of the answers decoded before anything is timed."""
PLAIN, GENERATE = "plain", "generate"
"""The two baselines, as keys beside the methods' places."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is decoded and what is timed."""

    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 1
    """Rows decoded at once where speed is measured."""
    temperature: float = 0.0
    """0 is greedy; above it, identity is checked against this project's plain loop under the same random stream."""
    top_k: int = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: float = 1.0
    """Sample within this share of the probability."""
    seed: int = 0
    """Seed of the random streams of the answers."""
    speed_prompts: int = 8
    """Prompts of each set whose decoding is timed (each by drafts, plainly and by `generate`); 0 times none."""
    tree_prompts: int = 0
    """Prompts of each set whose greedy answers are replayed through smaller and larger trees; 0 replays none."""
    limit: int | None = None
    """Use at most this many prompts of each set, spread over it; None uses all."""
    baselines: tuple[str, ...] = ()
    """Drafters without training that are measured as well: prompt_lookup, suffix_match, recycling, ngrams, layer_skip,
    first_layers."""
    untimed_batch_size: int = 8
    """Rows decoded at once for prompts that are not timed, at least `batch_size`; it changes neither acceptance nor
    identity."""

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 2, "batch_size": 1, "untimed_batch_size": 1, "speed_prompts": 0, "tree_prompts": 0,
                 "top_k": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UserError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit must be at least 1, got {self.limit}; leave it out to use every prompt")
        for name in self.baselines:
            if name not in BASELINES:
                raise UserError(f"there is no baseline {name!r}; choose from {', '.join(BASELINES)}")
        if self.temperature < 0:
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def settings(self, batch_size: int) -> DecodeSettings:
        """The decoding loop's settings for a batch of this many rows."""
        return DecodeSettings(batch_size=batch_size, top_k=self.top_k, top_p=self.top_p, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to draft that takes part in an evaluation; several may enter the same one."""

    name: str
    """How the report calls it."""
    family: str
    """Its family, such as medusa."""
    drafter: Proposer | None
    """What drafts; None decodes with the target alone."""
    policy: Policy | None
    """How the tree grows; None for the target alone."""
    trees: Topology | None = None
    """A static tree, best node first, whose smaller and larger prefixes are compared too."""

    @classmethod
    def of(cls, artifact: Artifact, *, name: str | None = None, tree_size: int | None = None) -> "Method":
        """The method an artifact stands for, with its tuned tree unless `tree_size` says otherwise."""
        family = artifact.drafter.family
        return cls(name=name or family, family=family, drafter=artifact.drafter, policy=artifact.policy(tree_size),
                   trees=artifact.topology)


    @classmethod
    def of_baseline(cls, name: str, target: Target) -> "Method":
        """The drafter without training of this name, with nothing remembered."""
        drafter, policy = baseline(name, target)
        return cls(name=name, family=drafter.family, drafter=drafter, policy=policy)


@dataclass(frozen=True)
class _Prompt:
    """One prompt and its place: `index` is the key of its random stream, whatever else is decoded."""

    index: int
    prompt_set: str
    category: str
    tokens: tuple[int, ...]


@dataclass
class _Records:
    """What one method has produced so far."""

    generations: dict[int, Generation] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    target_calls: int = 0


def evaluate(target: Target, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig, *,
             progress: bool = True) -> EvaluationRun:
    """Decode every prompt with every method and compare with the target alone.

    Greedy answers are compared with transformers' `generate`, sampled ones with this project's own loop under the same
    random stream (the two cannot share one with `generate`).

    Raises:
        UserError: if there is no method or no prompt, or a prompt and its answer exceed the target's context.
    """
    methods = [*methods, *(Method.of_baseline(name, target) for name in config.baselines)]
    if not methods:
        raise UserError("an evaluation needs at least one method; give an artifact or a baseline")
    timed, rest = _choose(prompt_sets, config)
    _check_lengths(target, [*timed, *rest], config)
    with tqdm(total=(len(timed) + len(rest)) * (1 + len(methods)), desc="evaluate", unit=" answers",
              disable=not progress) as bar:
        bench = _Bench(target, methods, config, bar.update)
        bench.time(timed)
        bench.finish(rest)
        evaluations = bench.evaluations(sorted([*timed, *rest], key=lambda prompt: prompt.index))
    header = {**machine(target), "settings": asdict(config), "prompt_sets": _counts([*timed, *rest]),
              "timed_prompts": len(timed), "contention": bench.probe.to_dict()}
    return EvaluationRun(header=header, evaluations=evaluations)


class _Bench:
    """The running evaluation: references, records of each method, and the probe.

    Args:
        advance: told how many answers are done, for the progress bar.
    """

    def __init__(self, target: Target, methods: Sequence[Method], config: EvaluateConfig,
                 advance: Callable[[int], object]) -> None:
        self.target, self.methods, self.config, self.advance = target, methods, config, advance
        self.probe = ContentionProbe(target)
        self.references: dict[int, list[int]] = {}
        self.alone: set[int] = set()
        self.records = [_Records() for _ in methods]

    def time(self, prompts: Sequence[_Prompt]) -> None:
        """Decode groups of `batch_size` prompts by every way in turn, timing each."""
        groups = _grouped(prompts, self.config.batch_size)
        if groups:
            self._warm_up(groups[0])
        for turn, group in enumerate(groups):
            self.probe.sample()
            self._time_group(group, turn)
        if groups:
            self.probe.sample()

    def finish(self, prompts: Sequence[_Prompt]) -> None:
        """Decode the prompts that are not timed, many at once."""
        # Similar lengths together: a padded batch then wastes little.
        ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
        size = max(self.config.batch_size, self.config.untimed_batch_size)
        for group in [ordered[start : start + size] for start in range(0, len(ordered), size)]:
            self._note_reference(group, self._generate(group)[0] if self.config.temperature == 0 else
                                 [g.tokens for g in self._decode(group, None, size)[0].generations])
            self.advance(len(group))
        for method, records in zip(self.methods, self.records, strict=True):
            if ordered:
                result, _ = self._decode(ordered, method, size, watch=True)
                self._note(records, ordered, result)

    def evaluations(self, prompts: Sequence[_Prompt]) -> tuple[Evaluation, ...]:
        """Compare every answer with its reference and summarise, one evaluation for each method."""
        found = []
        for method, records in zip(self.methods, self.records, strict=True):
            answers = [self._answer(prompt, records.generations[prompt.index]) for prompt in prompts]
            found.append(Evaluation(
                name=method.name, family=method.family, target=self.target.identity.name,
                batch_size=self.config.batch_size, temperature=self.config.temperature,
                contended=self.probe.contended, target_calls=records.target_calls,
                overall=summarise(answers, records.timings),
                accepted_length_by_tree_size=self._by_tree_size(method, prompts),
                by_prompt_set=_by(answers, records.timings, lambda record: record.prompt_set),
                by_category=_by(answers, records.timings, lambda record: record.category or ""),
            ))
        return tuple(found)

    def _by_tree_size(self, method: Method, prompts: Sequence[_Prompt]) -> dict[str, dict[str, float]]:
        """Replay some greedy answers of each prompt set through prefixes of the method's tree."""
        if not isinstance(method.drafter, Drafter) or method.trees is None or self.config.temperature > 0:
            return {}
        count = self.config.tree_prompts
        answers = {
            name: [(prompt.tokens, self.references[prompt.index]) for prompt in _spread(members, count)]
            for name, members in _sets(prompts).items()
        }
        return accepted_length_by_tree_size(self.target, method.drafter, method.trees,
                                            {name: rows for name, rows in answers.items() if rows})

    def _warm_up(self, group: Sequence[_Prompt]) -> None:
        for method in (None, *self.methods):
            self._decode(group, method, self.config.batch_size, tokens=WARM_UP_TOKENS)
        self._generate(group, tokens=WARM_UP_TOKENS)
        for method in self.methods:
            if method.drafter is not None:
                # Those that remember earlier text must not be timed on what the warm-up taught them.
                method.drafter.forget()

    def _time_group(self, group: Sequence[_Prompt], turn: int) -> None:
        ways = [PLAIN, GENERATE, *map(str, range(len(self.methods)))]
        speeds: dict[str, float] = {}
        results: dict[str, tuple[DecodeResult, float]] = {}
        for way in rotated(ways, turn):
            if way == GENERATE:
                answers, seconds = self._generate(group)
                speeds[way] = sum(map(len, answers)) / seconds
                if self.config.temperature == 0:
                    self._note_reference(group, answers)
            else:
                result, seconds = self._decode(group, None if way == PLAIN else self.methods[int(way)],
                                               self.config.batch_size)
                speeds[way] = sum(len(generation.tokens) for generation in result.generations) / seconds
                results[way] = result, seconds
        if self.config.temperature > 0:
            self._note_reference(group, [generation.tokens for generation in results[PLAIN][0].generations])
        self._note_timings(group, results, speeds)
        self.advance(len(group) * (1 + len(self.methods)))

    def _note_timings(self, group: Sequence[_Prompt], results: Mapping[str, tuple[DecodeResult, float]],
                      speeds: Mapping[str, float]) -> None:
        categories = sorted({prompt.category for prompt in group})
        for place, records in enumerate(self.records):
            result, seconds = results[str(place)]
            self._note(records, group, result)
            records.timings.append(Timing(
                prompt_set=group[0].prompt_set, category=categories[0] if len(categories) == 1 else None,
                drafted=speeds[str(place)], plain=speeds[PLAIN], generate=speeds[GENERATE], seconds=seconds,
                draft_seconds=result.stats.draft_seconds,
            ))

    def _note(self, records: _Records, prompts: Sequence[_Prompt], result: DecodeResult) -> None:
        records.target_calls += result.stats.target_calls
        for prompt, generation in zip(prompts, result.generations, strict=True):
            records.generations[prompt.index] = generation

    def _note_reference(self, group: Sequence[_Prompt], answers: Sequence[Sequence[int]]) -> None:
        for prompt, answer in zip(group, answers, strict=True):
            self.references[prompt.index] = list(answer)
            if len(group) == 1:
                self.alone.add(prompt.index)

    def _decode(self, prompts: Sequence[_Prompt], method: Method | None, batch_size: int, *, tokens: int | None = None,
                watch: bool = False) -> tuple[DecodeResult, float]:
        requests = [Request(tokens=prompt.tokens, index=prompt.index, temperature=self.config.temperature,
                            max_new_tokens=tokens or self.config.max_new_tokens) for prompt in prompts]
        started = clock(self.target)
        result = decode(self.target, requests, self.config.settings(batch_size),
                        drafter=method.drafter if method else None, policy=method.policy if method else None,
                        on_tokens=self._on_tokens if watch else None)
        return result, clock(self.target) - started

    def _on_tokens(self, _generation: Generation, _tokens: list[int], finished: bool) -> None:
        if finished:
            self.advance(1)

    def _generate(self, prompts: Sequence[_Prompt], *, tokens: int | None = None) -> tuple[list[list[int]], float]:
        with native_model(self.target) as model:
            started = clock(self.target)
            answers = generate(model, self.target, [prompt.tokens for prompt in prompts],
                               max_new_tokens=tokens or self.config.max_new_tokens,
                               temperature=self.config.temperature, top_k=self.config.top_k, top_p=self.config.top_p)
            return answers, clock(self.target) - started

    def _answer(self, prompt: _Prompt, generation: Generation) -> Answer:
        return Answer(prompt_set=prompt.prompt_set, category=prompt.category, tokens=tuple(generation.tokens),
                      emitted=tuple(generation.emitted), truncated=generation.finish == "length",
                      comparison=self._compare(prompt, generation))

    def _compare(self, prompt: _Prompt, generation: Generation) -> Comparison:
        if self.config.temperature > 0:
            judge, again = sampled_judge(self.target, self.config.settings(1), generation.request), None
        else:
            judge = greedy_judge(self.target)
            again = None if prompt.index in self.alone else (lambda: self._generate([prompt])[0][0])
        return compare(prompt.tokens, generation.tokens, self.references[prompt.index], judge, again=again)


def _choose(prompt_sets: PromptSets, config: EvaluateConfig) -> tuple[list[_Prompt], list[_Prompt]]:
    """(timed, rest): those timed are spread over each set, so that every category of an ordered set has some."""
    timed: list[_Prompt] = []
    rest: list[_Prompt] = []
    index = 0
    for name, entries in prompt_sets.items():
        prompts = []
        for category, tokens in entries:
            prompts.append(_Prompt(index, name, category, tuple(tokens)))
            index += 1
        prompts = _spread(prompts, len(prompts) if config.limit is None else config.limit)
        chosen = _spread(prompts, config.speed_prompts)
        timed += chosen
        rest += [prompt for prompt in prompts if prompt not in chosen]
    if not timed and not rest:
        raise UserError("there is no prompt to evaluate on; give a file of prompts with at least one line")
    return timed, rest


def _spread(prompts: list[_Prompt], count: int) -> list[_Prompt]:
    count = min(count, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]


def _check_lengths(target: Target, prompts: Sequence[_Prompt], config: EvaluateConfig) -> None:
    for prompt in prompts:
        if not prompt.tokens:
            raise UserError(f"a prompt of the set {prompt.prompt_set!r} has no tokens; remove it")
        total = len(prompt.tokens) + config.max_new_tokens
        if total > target.context_length:
            raise UserError(f"a prompt of the set {prompt.prompt_set!r} has {len(prompt.tokens)} tokens; with "
                            f"max_new_tokens {config.max_new_tokens} it exceeds the target's context of "
                            f"{target.context_length}; shorten the prompt or lower max_new_tokens")


def _sets(prompts: Sequence[_Prompt]) -> dict[str, list[_Prompt]]:
    names = dict.fromkeys(prompt.prompt_set for prompt in prompts)
    return {name: [prompt for prompt in prompts if prompt.prompt_set == name] for name in names}


def _grouped(prompts: Sequence[_Prompt], size: int) -> list[list[_Prompt]]:
    """Groups of at most `size` prompts of one set, in order."""
    return [members[start : start + size] for members in _sets(prompts).values()
            for start in range(0, len(members), size)]


def _by(answers: Sequence[Answer], timings: Sequence[Timing],
        group_of: Callable[[Answer | Timing], str]) -> dict[str, Measures]:
    names = [name for name in dict.fromkeys(group_of(answer) for answer in answers) if name]
    return {name: summarise([answer for answer in answers if group_of(answer) == name],
                            [timing for timing in timings if group_of(timing) == name]) for name in names}


def _counts(prompts: Sequence[_Prompt]) -> dict[str, int]:
    names = [prompt.prompt_set for prompt in prompts]
    return {name: names.count(name) for name in dict.fromkeys(names)}
