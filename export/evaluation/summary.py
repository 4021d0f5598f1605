"""Summary of answers and timings as measures, with bootstrap confidence intervals; the uniformity of sampled tokens;
and three answers to be shown.

The draws of the intervals depend only on the seed and the number of prompts, so that all figures and all methods of an
evaluation are drawn together: paired.

Uniformity: let p be the target's distribution after a text, x the token that was emitted there, and v a uniform number.
If x was drawn from p, the position u = (sum of p over the tokens likelier than x) + v p(x) is uniform on [0, 1], and
independent of all positions before it (Rosenblatt, 1952). So the positions of all tokens of all answers are one sample
of the uniform distribution if drafting is exact, and lie too low or too high where it prefers some tokens.

Shapes: R draws, Q questions, N timed groups of them, or tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...modules import Generation, TokenText
from ...modules.decoding.recorders import PassRecorder
from ...modules.decoding.requests import repeats_itself
from ...modules.tuning.trials import Drawn, draws, interval
from .results import Answer, Distribution, Interval, Lossless, Measures, SampleAnswer, SampleToken, Timing

Counts = NDArray[np.int_]
Floats = NDArray[np.float64]
CONFIDENCE = 0.95
SHORTEST = 16  # Answers with fewer tokens are not shown while there are three longer ones
BEST, MEDIAN, WORST = "best", "median", "worst"
_UNLIKELY_DISTANCE = 1.9495  # Scaled distance of the p-value 0.001, below which sampled answers are in doubt
_TERMS = 100  # Terms of the limit distribution's series
ROUNDING = 2e-3
"""Distance by which half precision may move the positions at temperature 1; divided by the temperature below it. In
bfloat16 the positions of exact answers were about a third of it apart at temperatures from 0.03 to 0.1."""
GREATEST_ROUNDING = 0.03  # Its bound: what a token's rank can lose to rounding does not grow for ever


def summarise(answers: Sequence[Answer], timings: Sequence[Timing], *, seed: int = 0,
              rounding: float = 0.0) -> Measures:
    """Reduce records to measures: acceptance as ratios of sums, speeds by medians over timed groups. The seed is that
    of the intervals, `rounding` the distance between distributions that the number format explains."""
    emitted = [count for answer in answers for count in answer.emitted]
    passes, tokens = len(emitted), sum(len(answer.tokens) for answer in answers)
    seconds = sum(timing.seconds for timing in timings)
    comparisons = [answer.comparison for answer in answers if answer.comparison is not None]
    # Questions are drawn, each with all its turns: answers of one conversation resemble one another.
    emitted_Q, passes_Q = _by_question(answers, lambda one: (sum(one.emitted), len(one.emitted)))

    return Measures(
        prompts=len(answers),
        new_tokens=tokens,
        target_passes=passes,
        accepted_length=sum(emitted) / max(1, passes),
        accepted_length_interval=interval(len(emitted_Q), lambda drawn_RQ: np.asarray(
            emitted_Q[drawn_RQ].sum(1) / np.maximum(1, passes_Q[drawn_RQ].sum(1))), CONFIDENCE, seed),
        # The target reads every prompt once.
        block_efficiency=tokens / max(1, passes + len(answers)),
        acceptance_by_position=acceptance_by_position(emitted),
        **_speeds(timings, answers, seed),
        draft_time_share=sum(timing.draft_seconds for timing in timings) / seconds if seconds else None,
        repetition_rate=sum(repeats_itself(answer.tokens) for answer in answers) / max(1, len(answers)),
        truncation_rate=sum(answer.truncated for answer in answers) / max(1, len(answers)),
        lossless=Lossless(prompts=len(comparisons),
                          identical=sum(comparison.divergence is None for comparison in comparisons),
                          near_tie_divergences=sum(comparison.near_tie for comparison in comparisons),
                          max_logit_gap=max((one.gap for one in comparisons if one.gap is not None), default=None),
                          rounding=max((one.slack for one in comparisons if one.slack is not None), default=None),
                          wrong_references=sum(answer.wrong_reference for answer in answers)),
        distribution=distribution_of([position for answer in answers for position in answer.positions], rounding),
        guessed_by={name: sum(answer.guessed_by.get(name, 0) for answer in answers)
                    for name in dict.fromkeys(name for answer in answers for name in answer.guessed_by)},
    )


def _by_question(answers: Sequence[Answer], counts: Callable[[Answer], tuple[int, int]]) -> tuple[Counts, Counts]:
    """Two counts of an answer, each summed over the turns of a question, [Q]."""
    sums: dict[int, tuple[int, int]] = {}
    for answer in answers:
        first, second = sums.get(answer.question, (0, 0))
        more = counts(answer)
        sums[answer.question] = first + more[0], second + more[1]
    return np.array([first for first, _ in sums.values()]), np.array([second for _, second in sums.values()])


def _speeds(timings: Sequence[Timing], answers: Sequence[Answer], seed: int) -> dict[str, Any]:
    """The three speeds, the speed-up over the faster baseline, and their intervals."""
    if not timings:
        return dict.fromkeys(("tokens_per_second", "tokens_per_second_interval", "plain_tokens_per_second",
                              "generate_tokens_per_second", "speedup", "speedup_interval"))
    drafted_N, plain_N, generate_N, efficiency_N = (
        np.array([getattr(timing, name) for timing in timings])
        for name in ("drafted", "plain", "generate", "efficiency"))
    passes_per_second_N = drafted_N / efficiency_N
    tokens_Q, passes_Q = _by_question(answers, lambda one: (len(one.tokens), 1 + len(one.emitted)))

    def drafted(groups_RN: Drawn, questions_RQ: Drawn) -> Floats:
        efficiency_R = tokens_Q[questions_RQ].sum(1) / passes_Q[questions_RQ].sum(1)
        return np.asarray(np.median(passes_per_second_N[groups_RN], axis=1) * efficiency_R)

    # The three speeds of a group are drawn together: a slow prompt slows all of them.
    def gain(groups_RN: Drawn, questions_RQ: Drawn) -> Floats:
        plain_R, generate_R = (np.median(speeds_N[groups_RN], axis=1) for speeds_N in (plain_N, generate_N))
        return np.asarray(drafted(groups_RN, questions_RQ) / np.maximum(plain_R, generate_R))

    def spread(figure: Callable[[Drawn, Drawn], Floats]) -> Interval | None:
        return interval(len(timings), lambda groups_RN: figure(groups_RN, draws(len(tokens_Q), seed)),
                        CONFIDENCE, seed)

    every = np.arange(len(timings))[None], np.arange(len(tokens_Q))[None]
    return {
        "tokens_per_second": float(drafted(*every)[0]),
        "tokens_per_second_interval": spread(drafted),
        "plain_tokens_per_second": float(np.median(plain_N)),
        "generate_tokens_per_second": float(np.median(generate_N)),
        "speedup": float(gain(*every)[0]),
        "speedup_interval": spread(gain),
    }


def acceptance_by_position(emitted: Sequence[int]) -> tuple[float, ...]:
    """Share of passes that emitted more than 1, 2, 3 ... tokens; their sum is the mean accepted length minus one.

    A pass emits its accepted drafts and one token chosen by the target, the bonus."""
    return tuple(sum(count > position for count in emitted) / len(emitted)
                 for position in range(1, max(emitted, default=1)))


# Uniformity of sampled tokens -----------------------------------------------------------------------------------------


def distribution_of(found: Sequence[float], rounding: float = 0.0) -> Distribution | None:
    """The Kolmogorov-Smirnov test of positions against the uniform distribution, where the arithmetic explains the
    distance `rounding`; None where there are none. Positions above 1 are tokens without probability, counted apart."""
    if not found:
        return None
    every_N = np.asarray(found)
    ordered_N, count = np.sort(every_N.clip(max=1.0)), len(found)
    steps_N = np.arange(count + 1) / count
    distance = float(max((steps_N[1:] - ordered_N).max(), (ordered_N - steps_N[:-1]).max()))
    return Distribution(tokens=count, distance=distance, p_value=p_value(distance, count),
                        visible=max(rounding, visible_distance(count)), impossible=int((every_N > 1.0).sum()))


def p_value(distance: float, count: int) -> float:
    """Probability of a distance at least as large by chance: Kolmogorov's limit, corrected for small samples
    (Stephens, 1970)."""
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    # The series converges slowly there, and the probability is 1 to ten digits.
    if scaled < 0.2:
        return 1.0
    terms = ((-1.0) ** (k - 1) * 2 * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _TERMS))
    return min(1.0, max(0.0, sum(terms)))


def visible_distance(count: int) -> float:
    """The smallest distance whose p-value is at most 0.001."""
    return _UNLIKELY_DISTANCE / (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))


def rounding(dtype: torch.dtype, temperature: float) -> float:
    """The distance between distributions that the rounding of a number format explains; none in float32 and wider."""
    if dtype in (torch.float32, torch.float64) or temperature == 0:
        return 0.0
    return min(GREATEST_ROUNDING, ROUNDING / min(1.0, temperature))


# Answers to be shown --------------------------------------------------------------------------------------------------


def sample_answers(tokenizer: Any, answers: Sequence[Answer], generations: Mapping[int, Generation],
                   recorder: PassRecorder, texts: Mapping[int, str]) -> tuple[SampleAnswer, ...]:
    """The best, the median and the worst of a method's answers with the author of each token: `generations` are the
    same answers by number of the question, and `texts` the questions as they were written, "" where only tokens are
    known."""
    samples = []
    for rank, answer in _chosen(answers).items():
        one, pieces, tokens = generations[answer.question], TokenText(tokenizer), list[SampleToken]()
        for written in recorder.written(one):
            # The guesses are read before the token is taken. One that ends inside a character cannot be shown.
            rejected = tuple(filter(None, map(pieces.guess, written.rejected)))
            tokens.append(SampleToken(text=pieces.add(written.token), guessed=written.guessed, rejected=rejected))
        # A character whose last token is missing still waits for it: it belongs to the last token there is.
        if tokens and (rest := pieces.rest()):
            tokens[-1] = replace(tokens[-1], text=rest)
        prompt = texts[answer.question] or str(tokenizer.decode(list(one.request.tokens), skip_special_tokens=True))
        samples.append(SampleAnswer(rank=rank, prompt_set=answer.prompt_set, prompt=prompt, tokens=tuple(tokens),
                                    accepted_length=sum(one.emitted) / max(1, one.passes)))
    return tuple(samples)


def _chosen(answers: Sequence[Answer]) -> dict[str, Answer]:
    """The first turns with the most, the middle and the fewest tokens per pass; fewer where there are not three."""
    known = [answer for answer in answers if answer.turn == 1 and answer.emitted]
    long = [answer for answer in known if len(answer.tokens) >= SHORTEST]
    # In a very short answer one accepted guess decides the rank.
    ordered = sorted(long if len(long) >= 3 else known,
                     key=lambda answer: (-sum(answer.emitted) / len(answer.emitted), answer.question))
    places = {BEST: 0, MEDIAN: len(ordered) // 2, WORST: len(ordered) - 1}
    found: dict[str, Answer] = {}
    for rank, place in places.items():
        if ordered and ordered[place] not in found.values():
            found[rank] = ordered[place]
    return found
