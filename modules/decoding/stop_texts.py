"""Stop texts: the end of an answer where its text holds one of several given texts."""

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8
"""Tokens decoded ahead of those that may hold a stop text."""


def first_stop(tokenizer: Any, before: Sequence[int], new: Sequence[int], stops: Sequence[str]) -> int | None:
    """The number of new tokens that complete the first stop text, or None.

    Only the end of the answer is decoded: as many tokens as hold a character more than the longest stop text, and a
    few for those whose text depends on the token before. Where a stop text seems to be there, the whole answer decides.
    """
    window = _tail(tokenizer, before, max(map(len, stops)))
    for count in range(1, len(new) + 1):
        for start in (len(before) - window, 0):
            text = tokenizer.decode([*before[start:], *new[:count]], skip_special_tokens=False)
            if not any(stop in text for stop in stops):
                break
        else:
            return count
    return None


def _tail(tokenizer: Any, tokens: Sequence[int], characters: int) -> int:
    """The number of last tokens that surely hold more than so many characters; all where none do."""
    count = _CONTEXT + characters
    while count < len(tokens):
        text = tokenizer.decode(list(tokens[len(tokens) - count + _CONTEXT :]), skip_special_tokens=False)
        if len(text) > characters:
            return count
        count *= 2
    return len(tokens)
