"""The text of single tokens: together they are the answer's text, whatever a character is made of."""

from typing import Any

import pytest
from draftsmith.modules import Target
from draftsmith.modules.decoding.requests import TokenText
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


def test_a_guess_inside_a_character_is_not_shown(byte_tokenizer: Any) -> None:
    assert TokenText(byte_tokenizer).guess(byte_tokenizer.encode("世")[0]) == ""


def test_pieces_of_words_and_bytes_with_a_special_token_between_them() -> None:
    """Like SentencePiece: a word has its space in front, which the first loses; other characters are bytes."""
    names = ["<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    model = models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[("▁", "a"), ("▁", "b")],
                       unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    tokens = [names.index(name) for name in ("▁a", "<s>", "▁b")]
    tokens += [names.index(f"<0x{byte:02X}>") for byte in "🙂世🙂".encode()] + [names.index("▁a")]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text == "a b🙂世🙂 a"
    assert [piece for piece in pieces(tokenizer, tokens) if piece] == ["a", " b", "🙂", "世", "🙂", " a"]


@pytest.mark.long
def test_pieces_of_the_real_tokenizer(real_target: Target) -> None:
    tokens = real_target.tokenizer.encode(TEXT * 3)
    assert "".join(pieces(real_target.tokenizer, [*tokens, *real_target.eos_ids])) == TEXT * 3
