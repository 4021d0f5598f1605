"""Prompt lookup: the longest and latest occurrence is copied, to the last token, and never from another row."""

import random

import pytest
import torch
from draftsmith.modules import Chain, PromptLookup, PromptLookupConfig, UserError
from support.observations import frontier, observe


def copied(text: list[int], *, shortest: int = 1, longest: int = 3, count: int = 4) -> list[int]:
    """Tokens that prompt lookup drafts after a text; empty where it has no guess."""
    drafter = PromptLookup(PromptLookupConfig(shortest=shortest, longest=longest, copied=count), torch.device("cpu"))
    state = drafter.start(1, 64)
    observe(drafter, state, [0], [text])
    tree = Chain(count).grow(drafter, state, torch.tensor([text[-1]]))
    assert bool(tree.real_BN.all())
    return tree.tokens_BN[0, 1:].tolist()


def plain_copy(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The slow plain reference."""
    for length in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[end + place])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize(("text", "sizes", "expected"), [
    pytest.param([1, 2, 3, 10, 11, 12, 13, 9, 3, 20, 1, 2, 3], {}, [10, 11, 12, 13], id="longest before later"),
    pytest.param([7, 8, 1, 1, 1, 7, 8, 2, 3, 4, 5, 7, 8], {}, [2, 3, 4, 5], id="latest of equal ones"),
    # A copy that reaches the end of the text continues with its own tokens.
    ([5, 6, 9, 5], {}, [6, 9, 5, 6]), ([5, 5], {}, [5, 5, 5, 5]),
    *((text, {}, []) for text in ([5], [5, 6], [5, 6, 7, 8], [0, 1])),
    # A suffix below the shortest is not copied.
    ([1, 2, 3, 4, 9, 2, 3, 4], {"shortest": 3, "longest": 16}, [9, 2, 3, 4]),
    ([1, 2, 3, 4, 9, 2, 3, 4], {"shortest": 4, "longest": 16}, []),
])
def test_what_is_copied(text: list[int], sizes: dict[str, int], expected: list[int]) -> None:
    assert copied(text, **sizes) == expected


def test_equals_the_plain_reference_on_random_texts() -> None:
    rng = random.Random(0)
    for _ in range(150):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        longest = rng.randrange(1, 6)
        shortest = rng.randrange(1, longest + 1)
        assert copied(text, shortest=shortest, longest=longest, count=5) == plain_copy(text, shortest, longest, 5), text


def test_rows_of_different_lengths_are_added_cleared_and_moved() -> None:
    drafter = PromptLookup(PromptLookupConfig(copied=3), torch.device("cpu"))
    state = drafter.start(3, 32)
    observe(drafter, state, [0, 1, 2], [[1, 2, 3, 1], [4, 5, 6, 7], [8, 9, 8]])
    tree = Chain(3).grow(drafter, state, torch.tensor([1, 7, 8]))
    assert tree.tokens_BN[[0, 2], 1:].tolist() == [[2, 3, 1], [9, 8, 9]]
    assert tree.real_BN.tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    # The former root comes back as the first of the new tokens; one row got more than another.
    observe(drafter, state, [0, 1, 2], [[1, 2], [7, 4, 5, 6, 7], [8, 3]])
    tree = Chain(3).grow(drafter, state, torch.tensor([2, 7, 3]))
    assert tree.tokens_BN[:2, 1:].tolist() == [[3, 1, 2], [4, 5, 6]]
    assert tree.real_BN[2].tolist() == [True, False, False, False]
    state.clear(torch.tensor([1]))
    observe(drafter, state, [1], [[4, 9, 4]])
    assert Chain(3).grow(drafter, state, torch.tensor([2, 4, 3])).tokens_BN[1, 1:].tolist() == [9, 4, 9]
    state.keep(torch.tensor([0, 2]))
    observe(drafter, state, [0, 1], [[2, 3], [3, 8]])
    assert Chain(3).grow(drafter, state, torch.tensor([3, 8])).tokens_BN[:, 1:].tolist() == [[1, 2, 3], [3, 8, 3]]


def test_a_token_0_in_the_padding_is_not_part_of_the_text() -> None:
    drafter = PromptLookup(PromptLookupConfig(copied=2), torch.device("cpu"))
    state = drafter.start(2, 32)
    observe(drafter, state, [0, 1], [[3, 4, 5, 6, 7, 0], [2, 0]])
    assert Chain(2).grow(drafter, state, torch.tensor([0, 0])).size == 1


def test_wrong_settings_and_calls_are_refused() -> None:
    with pytest.raises(UserError, match=r"shortest must be between 1 and longest \(3\), got 4"):
        PromptLookupConfig(shortest=4)
    with pytest.raises(UserError, match="copied must be at least 1, got 0"):
        PromptLookupConfig(copied=0)
    drafter = PromptLookup(PromptLookupConfig(), torch.device("cpu"))
    with pytest.raises(ValueError, match="must have 1 node, got 2"):
        drafter.expand(drafter.start(1, 8), frontier([0, 1], [-1, 0], [[4, 4]]))
