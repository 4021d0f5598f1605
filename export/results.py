"""What an evaluation found: records of single answers and timings, their summary by group, and its JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..modules import repeats_itself


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A drafted answer beside its reference."""

    divergence: int | None
    """First index at which they differ; None when they are equal."""
    gap: float | None = None
    """Target logits there: the best one minus the lower of the two tokens that were chosen; None when equal."""
    near_tie: bool = False
    """True when that gap is within the rounding of the number format, so that the target itself is undecided."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt answered by one method."""

    prompt_set: str
    """Set of the prompt."""
    category: str
    """Its category; "" for none."""
    tokens: tuple[int, ...]
    """The answer."""
    emitted: tuple[int, ...]
    """Tokens emitted by each target pass after the prompt's."""
    truncated: bool
    """Whether the length limit cut it."""
    comparison: Comparison
    """How it compares with the reference."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A timed group of prompts (a single one at batch size 1), decoded by three ways one after the other."""

    prompt_set: str
    """Set of the prompts."""
    category: str | None
    """Their category; None when they have several."""
    drafted: float
    """Tokens per second with drafts."""
    plain: float
    """Tokens per second of this project's loop without drafts."""
    generate: float
    """Tokens per second of transformers' `generate`."""
    seconds: float
    """Seconds of the drafted run."""
    draft_seconds: float
    """Seconds of it spent drafting."""


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """How the drafted answers compare with the reference."""

    prompts: int
    """Answers compared."""
    identical: int
    """Answers equal token by token."""
    near_tie_divergences: int
    """Answers whose first difference stands where the target itself is undecided."""
    max_logit_gap_at_divergence: float | None
    """Largest gap between the target's logits of the tokens at a first difference; None when nothing differs."""

    @property
    def different(self) -> int:
        """Answers that differ where the target was not undecided: drafting changed a word."""
        return self.prompts - self.identical - self.near_tie_divergences


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What was measured on a group of prompts: all of them, a set, or a category."""

    prompts: int
    """Answers decoded."""
    new_tokens: int
    """Tokens of the answers."""
    target_passes: int
    """Target passes after the prompts', summed over answers."""
    accepted_length: float
    """Tokens emitted per target pass, the bonus included: a ratio of sums."""
    acceptance_by_position: tuple[float, ...]
    """Share of passes whose k-th drafted token was accepted (with all before it); accepted_length is 1 + their sum."""
    tokens_per_second: float | None
    """Drafted decoding, median over timed prompts; None when none of the group was timed."""
    plain_tokens_per_second: float | None
    """This project's loop without drafts."""
    generate_tokens_per_second: float | None
    """transformers' `generate`."""
    speedup: float | None
    """tokens_per_second over the faster of the two baselines."""
    draft_time_share: float | None
    """Share of the drafted seconds that went into drafting."""
    repetition_rate: float
    """Share of answers in which over 30 % of the 4-grams occurred before."""
    truncation_rate: float
    """Share of answers cut by the length limit."""
    lossless: Lossless
    """Identity with the reference."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One method on all prompts."""

    name: str
    """The method's name."""
    family: str
    """Its family."""
    target: str
    """Name of the target."""
    batch_size: int
    """Rows decoded at once where speed was measured."""
    temperature: float
    """0 is greedy."""
    contended: bool
    """True when the machine was busy with something else: speeds are then not to be trusted."""
    target_calls: int
    """Forward calls of the target after the prompts': with a batch, fewer than the passes of its rows."""
    overall: Measures
    """All prompts."""
    accepted_length_by_tree_size: dict[str, dict[str, float]]
    """Exact accepted length of smaller and larger trees on replayed answers, by prompt set and nodes; may be empty."""
    by_prompt_set: dict[str, Measures]
    """Each prompt set."""
    by_category: dict[str, Measures]
    """Each category that occurs."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON of one method; groups repeat the measured keys."""
        fixed = {key: getattr(self, key) for key in
                 ("name", "family", "target", "batch_size", "temperature", "contended", "target_calls")}
        return {
            **fixed,
            **asdict(self.overall),
            "accepted_length_by_tree_size": self.accepted_length_by_tree_size,
            "by_prompt_set": {name: asdict(measures) for name, measures in self.by_prompt_set.items()},
            "by_category": {name: asdict(measures) for name, measures in self.by_category.items()},
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """Everything measured in one process: the methods share its baselines."""

    header: dict[str, Any]
    """Machine, dtype, threads, versions, settings, contention."""
    evaluations: tuple[Evaluation, ...]
    """One for each method, in the order given."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON: the first method at the top level beside "header", further methods under "others"."""
        first, *others = self.evaluations
        return {"header": self.header, **first.to_dict(), "others": [other.to_dict() for other in others]}


def summarise(answers: Sequence[Answer], timings: Sequence[Timing]) -> Measures:
    """Reduce records to measures: acceptance as ratios of sums, speeds as medians over timed prompts."""
    emitted = [count for answer in answers for count in answer.emitted]
    passes = len(emitted)
    drafted, plain, generate = (_median(timings, way) for way in
                                (lambda t: t.drafted, lambda t: t.plain, lambda t: t.generate))
    baseline = max(plain, generate) if plain is not None and generate is not None else None
    seconds = sum(timing.seconds for timing in timings)
    return Measures(
        prompts=len(answers),
        new_tokens=sum(len(answer.tokens) for answer in answers),
        target_passes=passes,
        accepted_length=sum(emitted) / max(1, passes),
        acceptance_by_position=acceptance_by_position(emitted),
        tokens_per_second=drafted,
        plain_tokens_per_second=plain,
        generate_tokens_per_second=generate,
        speedup=drafted / baseline if drafted is not None and baseline else None,
        draft_time_share=sum(timing.draft_seconds for timing in timings) / seconds if seconds else None,
        repetition_rate=sum(repeats_itself(answer.tokens) for answer in answers) / max(1, len(answers)),
        truncation_rate=sum(answer.truncated for answer in answers) / max(1, len(answers)),
        lossless=_lossless([answer.comparison for answer in answers]),
    )


def acceptance_by_position(emitted: Sequence[int]) -> tuple[float, ...]:
    """Share of passes that emitted more than 1, 2, 3 ... tokens; their sum is the mean accepted length minus one.

    A pass emits its accepted drafts and one token of the target's own, the bonus.
    """
    return tuple(sum(count > position for count in emitted) / len(emitted)
                 for position in range(1, max(emitted, default=1)))


def _median(timings: Sequence[Timing], way: Callable[[Timing], float]) -> float | None:
    return median(way(timing) for timing in timings) if timings else None


def _lossless(comparisons: Sequence[Comparison]) -> Lossless:
    gaps = [comparison.gap for comparison in comparisons if comparison.gap is not None]
    return Lossless(
        prompts=len(comparisons),
        identical=sum(comparison.divergence is None for comparison in comparisons),
        near_tie_divergences=sum(comparison.near_tie for comparison in comparisons),
        max_logit_gap_at_divergence=max(gaps, default=None),
    )
