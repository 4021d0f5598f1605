"""Repetitions are found where an answer repeats a phrase to its end, and nowhere else."""

import pytest
import torch
from draftsmith.data.batches.learned_tokens import (
    LEAST_REPEATED,
    LONGEST_PERIOD,
    LearnedTokens,
    answers,
    repetition_start,
    repetitions,
)
from draftsmith.data.prompts.chat import Surroundings
from draftsmith.data.store.token_store import Row, TokenShard

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]


def brute(answer: list[int]) -> int | None:
    """The same by comparing every tail with itself."""
    found = [start for end in (len(answer), len(answer) - 1) for period in range(1, LONGEST_PERIOD + 1)
             for start in range(period, end) if answer[start:end] == answer[start - period : end - period]
             and end - start >= max(LEAST_REPEATED, 2 * period)]
    return min(found, default=None)


@pytest.mark.parametrize(("answer", "kept"), [
    (TEXT, None),
    ([], None),
    ([7], None),
    (TEXT + [30] * 17, len(TEXT) + 1),
    (TEXT + [30] * 16, None),  # fifteen repetitions
    (TEXT + [30, 31, 32] * 7, len(TEXT) + 3),
    (TEXT + [30, 31, 32] * 6, None),  # fifteen repeated tokens
    (TEXT + [30, 31, 32] * 6 + [30, 31], len(TEXT) + 3),  # cut inside the phrase
    (TEXT + [30, 31, 32] * 7 + [0], len(TEXT) + 3),  # with an end token
    (TEXT + [30, 31, 32] * 7 + [0, 1], None),  # it has got out of the loop
    (list(range(100, 110)) * 3, 10),
    (list(range(100, 110)) * 2 + list(range(100, 109)), None),  # not twice repeated
    (TEXT + list(range(100, 110)) * 2 + list(range(100, 109)), None),  # nor after other text
    (list(range(64)) * 3, 64),
    (list(range(65)) * 3, None),
    ([5] * 40, 1)])
def test_a_loop_starts_after_the_phrase(answer: list[int], kept: int | None) -> None:
    assert repetition_start(answer) == kept == brute(answer)


def test_random_answers_agree_with_the_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(200):
        period, times, before = (int(torch.randint(1, most, (1,), generator=generator)) for most in (9, 9, 12))
        phrase = torch.randint(0, 3, (period,), generator=generator).tolist()
        answer = [*torch.randint(0, 3, (before,), generator=generator).tolist(), *phrase * times]
        assert repetition_start(answer) == brute(answer)
        found += repetition_start(answer) is not None
    assert 20 < found < 180


def shard() -> TokenShard:
    """A row with a loop in the first of two answers, one without, and one all of whose answer loops."""
    prompt, loop = [40, 41, 42], [50, 51] * 12
    rows = [(prompt + loop + prompt + TEXT, [False] * 3 + [True] * 24 + [False] * 3 + [True] * len(TEXT)),
            (prompt + TEXT, [False] * 3 + [True] * len(TEXT)),
            (prompt + TEXT + loop, [False] * 3 + [True] * (len(TEXT) + 24))]
    return TokenShard.from_rows([Row(tokens=tuple(tokens), supervised=tuple(flags), prompt=number)
                                 for number, (tokens, flags) in enumerate(rows)], [0, 1, 2])


def test_every_answer_of_a_row_is_looked_at() -> None:
    text = shard()
    first, second = text.span(1)[0], text.span(2)[0]
    assert list(answers(text)) == [(0, 3, 27), (0, 30, 62), (1, first + 3, first + 35), (2, second + 3, second + 59)]
    assert list(repetitions(text)) == [(0, 5, 27), (2, second + 37, second + 59)]


def test_the_repeated_part_of_an_answer_is_not_learned() -> None:
    text = shard()
    learned_T = LearnedTokens().of(text)
    assert [int(learned_T[slice(*text.span(row))].sum()) for row in range(3)] == [56 - 22, 32, 56 - 22]
    assert not (learned_T & ~text.supervised_T).any(), "a token that the assistant did not write is learned"
    assert learned_T[:5].tolist() == [False, False, False, True, True]
    assert learned_T[30:62].all(), "the second answer has no loop"


def test_prompts_between_their_surroundings_are_learned() -> None:
    text = shard()
    learned_T = LearnedTokens(around=Surroundings(before=(40,), after=(42,))).of(text)
    assert [int(learned_T[slice(*text.span(row))].sum()) for row in range(3)] == [35, 33, 35]
