"""Summary of answers and timings as measures, with bootstrap confidence intervals; and three answers to be shown.

The draws of the intervals depend only on the seed and the number of prompts, so that all figures and all methods of an
evaluation are drawn together: paired.

Shapes: R draws, Q questions, N timed groups of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...modules import Generation, TokenText
from ...modules.decoding.recorders import PassRecorder
from ...modules.decoding.requests import repeats_itself
from ...modules.tuning.trials import Drawn, draws, interval
from .results import Answer, Interval, Lossless, Measures, SampleAnswer, SampleToken, Timing
from .uniformity import distribution_of

Counts = NDArray[np.int_]
Floats = NDArray[np.float64]
CONFIDENCE = 0.95
SHORTEST = 16  # Answers with fewer tokens are not shown while there are three longer ones
BEST, MEDIAN, WORST = "best", "median", "worst"


def summarise(answers: Sequence[Answer], timings: Sequence[Timing], *, seed: int = 0,
              rounding: float = 0.0) -> Measures:
    """Reduce records to measures: acceptance as ratios of sums, speeds by medians over timed groups.

    Args:
        seed: of the intervals.
        rounding: distance between distributions that the number format explains.
    """
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

    A pass emits its accepted drafts and one token chosen by the target, the bonus.
    """
    return tuple(sum(count > position for count in emitted) / len(emitted)
                 for position in range(1, max(emitted, default=1)))


def sample_answers(tokenizer: Any, answers: Sequence[Answer], generations: Mapping[int, Generation],
                   recorder: PassRecorder, texts: Mapping[int, str]) -> tuple[SampleAnswer, ...]:
    """Three answers of a method with the author of each token.

    Args:
        tokenizer: the target's.
        answers: the method's, from which the best, the median and the worst are chosen.
        generations: the same by number of the question.
        recorder: the guesses of their passes.
        texts: the questions as they were written, by number; "" where only tokens are known.
    """
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
