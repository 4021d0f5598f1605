"""The slow plain twin of the confidence tallies: one pass, one path, one guess at a time."""

from collections.abc import Callable, Sequence
from math import prod

Judged = list[tuple[float, bool]]
"""Probability that the draft gave a guess, and whether it was right."""


def judged(text: list[int], start: int, paths: Sequence[tuple[int, ...]],
           children: Callable[[int, int], list[tuple[int, float]]]) -> tuple[Judged, Judged]:
    """(tokens, whole paths) that a static tree guessed of a text from `start` on; `children(token, depth)` by rank."""
    tokens, whole, place = [], [], start + 1
    while place < len(text):
        deepest = 0
        for path in paths:
            guess, chances = [text[place - 1]], [1.0]
            for depth, rank in enumerate(path):
                token, chance = children(guess[-1], depth)[rank]
                guess, chances = [*guess, token], [*chances, chance]
            truth, right = text[place - 1 : place + len(path)], guess == text[place - 1 : place + len(path)]
            if len(truth) == len(guess) and min(chances) > 0:
                tokens += [(chances[-1], right)] if guess[:-1] == truth[:-1] else []
                whole.append((prod(chances), right))
            deepest = max(deepest, len(path) * right)
        place += deepest + 1
    return tokens, whole
