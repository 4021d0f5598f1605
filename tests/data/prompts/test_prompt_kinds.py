"""Kinds of prompts: drawn alike by seed and number alone, and named as in the list."""

from collections import Counter

import pytest
from draftsmith.data.prompts.prompt_kinds import ALL_KINDS, OPENINGS, SYSTEM_PROMPTS, UNSTEERED, drawn, named_kinds
from draftsmith.modules import UserError
from draftsmith.recipes.chat_settings import handwritten_prompts


def test_every_kind_is_drawn_alike() -> None:
    kinds = named_kinds([ALL_KINDS])
    found = Counter(drawn(kinds, 5, number)[0] for number in range(2800))
    assert set(found) == set(kinds) == {*SYSTEM_PROMPTS, UNSTEERED}
    assert all(150 < count < 250 for count in found.values()), found


def test_a_kind_depends_on_seed_and_number_alone() -> None:
    kinds, numbers = ("math", "coding", UNSTEERED), range(20)
    first, again, other = ([drawn(kinds, seed, number)[0] for number in numbers] for seed in (0, 0, 1))
    assert first == again != other


def test_the_kinds_of_the_hand_written_prompts_are_known() -> None:
    asked = handwritten_prompts()
    assert {prompt.category for prompt in asked} <= set(SYSTEM_PROMPTS)
    turns = [message["content"] for prompt in asked for message in prompt.messages if "content" in message]
    assert not any(turn in text for turn in turns for text in SYSTEM_PROMPTS.values())


def test_every_kind_has_openings_and_each_is_drawn() -> None:
    assert set(OPENINGS) == set(SYSTEM_PROMPTS)
    for kind, openings in OPENINGS.items():
        assert len(openings) == len(set(openings)) >= 5
        assert all(opening == opening.strip() for opening in openings), kind
        assert {drawn((kind,), 3, number)[1] for number in range(300)} == set(openings)
    assert drawn((UNSTEERED,), 3, 0) == (UNSTEERED, "")


def test_no_opening_is_that_of_a_hand_written_prompt() -> None:
    """Drafts are judged by those prompts: two common words in a row is all that training may share with their start."""
    asked = [str(message["content"]).lower() for prompt in handwritten_prompts() for message in prompt.messages
             if "content" in message]
    longer = [opening.lower() for openings in OPENINGS.values() for opening in openings if len(opening.split()) > 2]
    assert not [(opening, turn) for opening in longer for turn in asked if turn.startswith(opening)]


@pytest.mark.parametrize("names", [[], ["poems"], ["math", "math"], ["all", "math"]])
def test_wrong_kinds_are_refused(names: list[str]) -> None:
    with pytest.raises(UserError, match=r"prompts\.own_kinds must be one or more different names among coding, .* any, "
                                        r"or all alone, got \["):
        named_kinds(names)
