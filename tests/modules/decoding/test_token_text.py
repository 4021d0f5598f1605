"""The text of single tokens: together they are the answer's text, whatever a character is made of."""

from typing import Any

import pytest
from draftsmith.modules import Target
from draftsmith.modules.decoding.token_text import TokenText
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = "Grüße, 世界! 🙂🙂 a , b .\n\tend"


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte: most characters of TEXT are made of several tokens."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    text = TokenText(tokenizer)
    return [*(text.add(token) for token in tokens), text.rest()]


def test_pieces_of_bytes_make_the_text(byte_tokenizer: Any) -> None:
    found = pieces(byte_tokenizer, byte_tokenizer.encode(TEXT))
    assert "".join(found) == TEXT
    assert len(found) == len(TEXT.encode()) + 1
    assert [piece for piece in found if piece] == list(TEXT)


def test_a_character_cut_off_is_not_lost(byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer.encode("ab世")[:-1]
    assert pieces(byte_tokenizer, tokens) == ["a", "b", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_bytes_that_are_no_character_are_shown_when_the_next_is_known(byte_tokenizer: Any) -> None:
    broken, letter = byte_tokenizer.encode("世")[0], byte_tokenizer.encode("x")[0]
    assert pieces(byte_tokenizer, [broken, letter]) == ["", "\N{REPLACEMENT CHARACTER}x", ""]


def test_a_guess_is_not_taken(byte_tokenizer: Any) -> None:
    text = TokenText(byte_tokenizer)
    first, *others = byte_tokenizer.encode("é")
    assert text.add(first) == ""
    assert text.guess(others[0]) == "é"
    assert text.guess(byte_tokenizer.eos_token_id) == "<|end|>"
    assert text.add(others[0]) == "é"
    assert text.rest() == ""


@pytest.mark.long
def test_pieces_of_the_real_tokenizer(real_target: Target) -> None:
    tokens = real_target.tokenizer.encode(TEXT * 3)
    assert "".join(pieces(real_target.tokenizer, [*tokens, *real_target.eos_ids])) == TEXT * 3
