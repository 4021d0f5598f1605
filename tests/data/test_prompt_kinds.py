"""Kinds of prompts: drawn alike by seed and number alone, and named as in the list."""

from collections import Counter

import pytest
from draftsmith.data.prompt_kinds import ALL_KINDS, SYSTEM_PROMPTS, UNSTEERED, drawn_kind, drawn_turns, named_kinds
from draftsmith.modules import UserError
from draftsmith.recipes.chat_settings import handwritten_prompts


def test_every_kind_and_length_is_drawn_alike() -> None:
    kinds = named_kinds([ALL_KINDS])
    found = Counter(drawn_kind(kinds, 5, number) for number in range(2800))
    assert set(found) == set(kinds) == {*SYSTEM_PROMPTS, UNSTEERED}
    assert all(150 < count < 250 for count in found.values()), found
    lengths = Counter(drawn_turns(3, 5, number) for number in range(900))
    assert set(lengths) == {1, 2, 3}
    assert all(250 < count < 350 for count in lengths.values()), lengths


def test_a_kind_depends_on_seed_and_number_alone() -> None:
    kinds, numbers = ("math", "coding", UNSTEERED), range(20)
    first, again, other = ([drawn_kind(kinds, seed, number) for number in numbers] for seed in (0, 0, 1))
    assert first == again != other
    turns, others = ([drawn_turns(2, seed, number) for number in numbers] for seed in (0, 1))
    assert turns != others
    assert [turn == 1 for turn in turns] != [drawn_kind(("a", "b"), 0, number) == "a" for number in numbers]


def test_the_kinds_of_the_hand_written_prompts_are_known() -> None:
    asked = handwritten_prompts()
    assert {prompt.category for prompt in asked} <= set(SYSTEM_PROMPTS)
    assert not any(turn in text for prompt in asked for turn in prompt.turns for text in SYSTEM_PROMPTS.values())


@pytest.mark.parametrize("names", [[], ["poems"], ["math", "math"], ["all", "math"]])
def test_wrong_kinds_are_refused(names: list[str]) -> None:
    with pytest.raises(UserError, match=r"prompts\.own_kinds must be one or more different names among coding, .* any, "
                                        r"or all alone, got \["):
        named_kinds(names)
