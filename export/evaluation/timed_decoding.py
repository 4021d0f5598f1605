"""Decoding of questions with drafts, without drafts and by transformers' `generate`, with the seconds each takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...modules import Accepted, DecodeResult, Generation, Request, Target, TokenTree, decode
from ...modules.decoding.recorders import PartCounter, PassRecorder
from .contention import clock
from .lossless import generate, native_model
from .methods import EvaluateConfig, Method
from .results import Timing
from .schedule import UNTIMED_ROWS, Entry

TURN_STREAMS = 1 << 32  # Distance between the random streams of a question's turns: more than there are questions


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One turn of a question: its prompt, the same for all methods, and the target's own answer."""

    entry: Entry  # The question
    turn: int  # Its turn, from 1
    temperature: float  # Sampling temperature; 0 is greedy
    prompt: tuple[int, ...]  # Tokens of the conversation up to this turn's answer
    reference: tuple[int, ...] = ()  # The answer of the target alone

    @property
    def index(self) -> int:
        """Number of its random stream."""
        return self.entry.number + (self.turn - 1) * TURN_STREAMS


@dataclass(kw_only=True)
class Records:
    """Answers, timings and target calls of one method."""

    generations: dict[int, Generation] = field(default_factory=dict)  # Answers by `Exchange.index`
    timings: list[Timing] = field(default_factory=list)  # One for each timed group
    target_calls: int = 0  # Forward calls of the target after the prompts'
    recorder: PassRecorder | None = None  # The guesses of all passes, of the method whose answers are shown
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Accepted guesses of each drafter of an ensemble, by `Exchange.index`; empty with a single drafter."""
    graph_refusal: str = ""  # Why some work was not replayed as CUDA graphs; empty where all was, or none was to be

    def with_untimed(self, untimed: "Records") -> "Records":
        """These timed records and those of the questions that were not timed."""
        return Records(generations={**untimed.generations, **self.generations}, timings=self.timings,
                       target_calls=untimed.target_calls + self.target_calls,
                       recorder=self.recorder, parts={**untimed.parts, **self.parts},
                       graph_refusal=untimed.graph_refusal or self.graph_refusal)


class TimedDecoder:
    """Decodes exchanges in one call and measures it."""

    def __init__(self, target: Target, config: EvaluateConfig) -> None:
        self.target, self.config = target, config

    def decode(self, asked: Sequence[Exchange], method: Method | None, batch_size: int, *, rows: int | None = None,
               tokens: int | None = None, records: Records | None = None,
               on_tokens: Callable[[Generation, list[int], bool], None] | None = None) -> tuple[DecodeResult, float]:
        """This project's loop on exchanges of one temperature: its answers, and the seconds it took.

        The method, None for the target alone, chooses its tree for `batch_size` rows, while `rows` (None for as many)
        are decoded at once. `records` takes the answers and counts of the method.
        """
        requests = [Request(tokens=exchange.prompt, index=exchange.index, temperature=exchange.temperature,
                            max_new_tokens=tokens or self.config.max_new_tokens) for exchange in asked]
        drafter = method.drafter if method else None
        policy = method.policy_for(batch_size, asked[0].temperature) if method and method.policy_for else None
        families = method.parts if method else ()
        counter = PartCounter() if len(families) > 1 else None
        observers = [one for one in (counter, records.recorder if records else None) if one is not None]

        def observe(tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
            for one in observers:
                one(tree, accepted, generations)

        started = clock(self.target)
        result = decode(self.target, requests, self.config.settings(rows or batch_size), drafter=drafter,
                        policy=policy, on_tokens=on_tokens, observer=observe if observers else None)
        seconds = clock(self.target) - started
        if records is not None:
            records.parts |= counter.counts(result.generations, len(families)) if counter else {}
            records.graph_refusal = records.graph_refusal or result.stats.graph_refusal
            records.target_calls += result.stats.target_calls
            records.generations |= {one.request.index: one for one in result.generations}
        return result, seconds

    def generate(self, asked: Sequence[Exchange], *, tokens: int | None = None) -> tuple[list[list[int]], float]:
        """transformers' `generate` on all exchanges as one batch: its answers, and the seconds it took."""
        with native_model(self.target) as model:
            started = clock(self.target)
            answers = generate(model, self.target, [exchange.prompt for exchange in asked],
                               max_new_tokens=tokens or self.config.max_new_tokens,
                               temperature=asked[0].temperature, settings=self.config.settings(1))
            return answers, clock(self.target) - started


def untimed_batches(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Batches for exchanges that are not timed, those of similar lengths together: less is padded."""
    ordered = sorted(exchanges, key=lambda one: len(one.prompt))
    return [ordered[start : start + UNTIMED_ROWS] for start in range(0, len(ordered), UNTIMED_ROWS)]
