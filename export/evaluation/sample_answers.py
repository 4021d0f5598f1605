"""Three sample answers for the report, decoded again to record the author of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...modules import Request, Target, decode
from ...modules.decoding.recorders import PassRecorder
from ...modules.decoding.token_text import TokenText
from ...modules.interfaces.proposer import Remembers
from .methods import EvaluateConfig, Method, Question
from .results import Answer, SampleAnswer, SampleToken

SHORTEST = 16
"""Answers with fewer tokens are not chosen while there are three longer ones."""
BEST, MEDIAN, WORST = "best", "median", "worst"


def sample_answers(target: Target, method: Method, questions: Mapping[int, Question], answers: Sequence[Answer],
                   config: EvaluateConfig) -> tuple[SampleAnswer, ...]:
    """Decode three answers of a method once more, outside all timing, and record who wrote each token.

    Args:
        target: the model that verifies.
        method: the method, which drafts as at the first batch size and temperature.
        questions: the questions by their number.
        answers: the method's answers there, from which the best, the median and the worst are chosen.
        config: settings of the evaluation.
    """
    chosen = _chosen(answers)
    if not chosen:
        return ()
    requests = [Request(tokens=tuple(questions[answer.question].prompt(())), index=answer.question,
                        max_new_tokens=config.max_new_tokens, temperature=config.degrees[0])
                for answer in chosen.values()]
    recorder = PassRecorder()
    if isinstance(method.drafter, Remembers):
        method.drafter.forget()
    policy = method.policy_for(config.batches[0], config.degrees[0]) if method.policy_for else None
    found = decode(target, requests, config.settings(1), drafter=method.drafter, policy=policy, observer=recorder)
    samples = []
    for (rank, answer), one in zip(chosen.items(), found.generations, strict=True):
        pieces, tokens = TokenText(target.tokenizer), []
        for written in recorder.written(one):
            # The guesses are read before the token is taken. One that ends inside a character cannot be shown.
            rejected = tuple(filter(None, map(pieces.guess, written.rejected)))
            tokens.append(SampleToken(text=pieces.add(written.token), guessed=written.guessed, rejected=rejected))
        # A character whose last token is missing still waits for it: it belongs to the last token there is.
        if tokens and (rest := pieces.rest()):
            tokens[-1] = replace(tokens[-1], text=rest)
        prompt = questions[answer.question].text or str(
            target.tokenizer.decode(list(one.request.tokens), skip_special_tokens=True))
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
