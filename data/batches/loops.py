"""Answers that end in a loop: a phrase that repeats itself up to the end.

Small models fall into them when they answer greedily. A loop is easy to draft: it lifts every measured length, and
says little about other text.
"""

from collections.abc import Iterator, Sequence

import torch

from ..store.token_store import TokenShard

LONGEST_PERIOD = 64
"""Longest phrase whose repetition is looked for, in tokens."""
LEAST_REPEATED = 16
"""Fewest repeated tokens of a loop; also at least two repetitions of the phrase."""


def loop_start(answer: Sequence[int]) -> int | None:
    """Tokens of an answer before the first repetition of the phrase that it repeats to its end; None without a loop.

    The last token may be another one, such as that of the end. Of several phrases that fit, such as one and twice the
    same, the one with the earliest repetition counts.
    """
    starts = [end - repeated for end in (len(answer), len(answer) - 1)
              for period in range(1, min(LONGEST_PERIOD, end // 3) + 1)
              if (repeated := _repeated(answer, end, period)) >= max(LEAST_REPEATED, 2 * period)]
    return min(starts, default=None)


def _repeated(answer: Sequence[int], end: int, period: int) -> int:
    """Tokens before `end` that are the same as `period` tokens before them, without a break."""
    place = end
    while place > period and answer[place - 1] == answer[place - 1 - period]:
        place -= 1
    return end - place


def loops(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
    """(row, first repeated token, end of the answer) of every answer that ends in a loop, by place in the shard."""
    for row, start, stop in answers(shard):
        kept = loop_start(shard.tokens_T[start:stop].tolist())
        if kept is not None:
            yield row, start + kept, stop


def answers(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
    """(row, first token, end) of every unbroken run of supervised tokens, by place in the shard."""
    for row in range(shard.num_rows):
        start, stop = shard.span(row)
        flags_N = shard.supervised_T[start:stop].to(torch.int8)
        edges = torch.diff(flags_N, prepend=flags_N.new_zeros(1), append=flags_N.new_zeros(1)).nonzero()[:, 0].tolist()
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            yield row, start + first, start + end
