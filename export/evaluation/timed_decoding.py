"""Decoding of questions with drafts, without drafts and by transformers' `generate`, with the seconds each takes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...modules import DecodeResult, Generation, Request, Target, decode
from ...modules.decoding.part_counter import PartCounter
from .contention import clock
from .lossless import generate, native_model
from .memory_traffic import Meter, metered
from .methods import EvaluateConfig, Method
from .results import Timing
from .schedule import Entry

TURN_STREAMS = 1 << 32
"""Distance between the random streams of a question's turns: more than there are questions."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One turn of a question: its prompt, the same for all methods, and the target's own answer."""

    entry: Entry
    """The question."""
    turn: int
    """Its turn, from 1."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    prompt: tuple[int, ...]
    """Tokens of the conversation up to this turn's answer."""
    reference: tuple[int, ...] = ()
    """The answer of the target alone."""

    @property
    def index(self) -> int:
        """Number of its random stream."""
        return self.entry.number + (self.turn - 1) * TURN_STREAMS


@dataclass(kw_only=True)
class Records:
    """Answers, timings and target calls of one method."""

    generations: dict[int, Generation] = field(default_factory=dict)
    """Answers by `Exchange.index`."""
    timings: list[Timing] = field(default_factory=list)
    """One for each timed group."""
    target_calls: int = 0
    """Forward calls of the target after the prompts'."""
    meter: Meter = field(default_factory=Meter)
    """Bytes of weights that drafting read."""
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Accepted guesses of each drafter of an ensemble, by `Exchange.index`; empty with a single drafter."""
    graph_refusal: str = ""
    """Why some work was not replayed as CUDA graphs; empty where all was, or none was to be."""

    def add(self, result: DecodeResult, parts: dict[int, tuple[int, ...]]) -> None:
        """Add the answers of one call of `decode`, with the guesses of each part."""
        self.parts |= parts
        self.graph_refusal = self.graph_refusal or result.stats.graph_refusal
        self.target_calls += result.stats.target_calls
        self.generations |= {one.request.index: one for one in result.generations}

    def with_untimed(self, untimed: "Records") -> "Records":
        """These timed records and those of the questions that were not timed."""
        return Records(generations={**untimed.generations, **self.generations}, timings=self.timings,
                       target_calls=untimed.target_calls + self.target_calls,
                       meter=Meter(drafted=untimed.meter.drafted + self.meter.drafted),
                       parts={**untimed.parts, **self.parts},
                       graph_refusal=untimed.graph_refusal or self.graph_refusal)


@dataclass(kw_only=True)
class Throughput:
    """Tokens and seconds of one group of questions decoded in one manner."""

    tokens: int = 0
    """Tokens of the answers."""
    passes: int = 0
    """Target passes of their rows, the prompts' included; counted by this project's loop."""
    seconds: float = 0.0
    """Seconds that decoding took."""
    draft_seconds: float = 0.0
    """Seconds of them spent on drafting."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """Tokens per target pass."""
        return self.tokens / self.passes


class TimedDecoder:
    """Decodes exchanges in one call and measures it.

    Args:
        target: the model that answers, and verifies.
        config: length of the answers, sampling filters and seed.
    """

    def __init__(self, target: Target, config: EvaluateConfig) -> None:
        self.target, self.config = target, config

    def decode(self, asked: Sequence[Exchange], method: Method | None, batch_size: int, *, rows: int | None = None,
               tokens: int | None = None, records: Records | None = None,
               on_tokens: Callable[[Generation, list[int], bool], None] | None = None) -> tuple[DecodeResult, float]:
        """This project's loop: its answers, and the seconds it took.

        Args:
            asked: all of one temperature.
            method: drafts; None decodes with the target alone.
            batch_size: rows for which the method chooses its tree.
            rows: rows decoded at once; None for `batch_size`.
            tokens: longest answer; None for the config's.
            records: takes the answers and counts of the method; None keeps none.
            on_tokens: called with new tokens, as in `decode`.
        """
        requests = [Request(tokens=exchange.prompt, index=exchange.index, temperature=exchange.temperature,
                            max_new_tokens=tokens or self.config.max_new_tokens) for exchange in asked]
        drafter = method.drafter if method else None
        policy = method.policy_for(batch_size, asked[0].temperature) if method and method.policy_for else None
        families = method.parts if method else ()
        counter = PartCounter() if len(families) > 1 else None
        with metered(drafter, records.meter if records else Meter()):
            started = clock(self.target)
            result = decode(self.target, requests, self.config.settings(rows or batch_size), drafter=drafter,
                            policy=policy, on_tokens=on_tokens, observer=counter)
            seconds = clock(self.target) - started
        if records is not None:
            records.add(result, counter.counts(result.generations, len(families)) if counter else {})
        return result, seconds

    def generate(self, asked: Sequence[Exchange], *, tokens: int | None = None) -> tuple[list[list[int]], float]:
        """transformers' `generate` on all exchanges as one batch: its answers, and the seconds it took."""
        with native_model(self.target) as model:
            started = clock(self.target)
            answers = generate(model, self.target, [exchange.prompt for exchange in asked],
                               max_new_tokens=tokens or self.config.max_new_tokens,
                               temperature=asked[0].temperature, settings=self.config.settings(1))
            return answers, clock(self.target) - started

    def batches(self, exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
        """Batches for exchanges that are not timed, those of similar lengths together: less is padded."""
        ordered, size = sorted(exchanges, key=lambda one: len(one.prompt)), self.config.untimed_batch_size
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def by_turn(exchanges: Iterable[Exchange]) -> list[list[Exchange]]:
    """The exchanges of each turn, the first turn first."""
    found: dict[int, list[Exchange]] = {}
    for exchange in exchanges:
        found.setdefault(exchange.turn, []).append(exchange)
    return [found[turn] for turn in sorted(found)]
