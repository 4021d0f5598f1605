"""The text of each single token of an answer, and the stop texts that end it."""

import unicodedata
from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # Last character of a text that ends inside a character
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Bidirectional classes of characters that change the order of what follows them."""
_CONTEXT = 8  # Tokens decoded ahead of those that may hold a stop text


class TokenText:
    """Splits the text of an answer among its tokens, as they come; the pieces together are the text. A token that ends
    inside a character has an empty piece, and the token that completes the character has all of it. Special tokens,
    such as the end of the text, are left out."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        # Text up to `_read` has been given out. Decoding starts one piece earlier: whether a token's leading space is
        # text depends on a token before it.
        self._start = self._read = 0

    def add(self, token: int) -> str:
        """The piece of the next token."""
        self._tokens.append(token)
        piece = self._unread()
        if piece.endswith(_INCOMPLETE):
            return ""
        # After a special token alone, a decoder would take the next word for the first, which has no space.
        if piece:
            self._start, self._read = self._read, len(self._tokens)
        return piece

    def guess(self, token: int) -> str:
        """The piece that a token would have if it were the next one: the name of a special token, and nothing for one
        that ends inside a character."""
        if token in self.tokenizer.all_special_ids:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        self._tokens.append(token)
        piece = self._unread()
        self._tokens.pop()
        return "" if piece.endswith(_INCOMPLETE) else piece

    def rest(self) -> str:
        """The piece of a character that the answer leaves incomplete; empty for any other answer."""
        piece = self._unread()
        self._start = self._read = len(self._tokens)
        return piece

    def _unread(self) -> str:
        # Both texts are decoded from the same token on, so that what the tokens before them change cancels out.
        shown, whole = (str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
                        for tokens in (self._tokens[self._start : self._read], self._tokens[self._start :]))
        return whole[len(shown) :]


def visible(text: str, *, breaks: bool = True) -> str:
    """The text with its control characters, which could move the cursor or change colours, as visible signs. Without
    `breaks` tabs are among them, and a line break is an arrow."""
    found = ""
    for letter in text:
        code = ord(letter)
        if breaks and letter in "\n\t":
            found += letter
        elif letter == "\n":
            found += "↵"
        elif code < 0x20:
            # Unicode has a picture of each of these, in their order.
            found += chr(0x2400 + code)
        elif code == 0x7F:
            found += "\N{SYMBOL FOR DELETE}"
        elif unicodedata.category(letter) == "Cc" or unicodedata.bidirectional(letter) in DIRECTIONS:
            found += f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        else:
            found += letter
    return found


def first_stop(tokenizer: Any, before: Sequence[int], new: Sequence[int], stops: Sequence[str],
               prompt: Sequence[int] = ()) -> int | None:
    """The number of new tokens of an answer that complete the first stop text, or None. A stop text may begin in
    `prompt`, where that is given, but not end there.

    Only the end of the answer is decoded: as many tokens as hold a character more than the longest stop text, and a few
    for those whose text depends on the token before. Where a stop text seems to be there, the whole answer decides."""
    longest = max(map(len, stops))
    # A character may have four tokens.
    prompt = prompt[-(_CONTEXT + 4 * longest) :]
    before = [*prompt, *before]
    window = _CONTEXT + longest
    while window < len(before):
        if len(tokenizer.decode(list(before[len(before) - window + _CONTEXT :]), skip_special_tokens=False)) > longest:
            break
        window *= 2
    window = min(window, len(before))
    for count in range(1, len(new) + 1):
        for start in (len(before) - window, 0):
            text = tokenizer.decode([*before[start:], *new[:count]], skip_special_tokens=False)
            asked = len(tokenizer.decode(list(prompt[start:]), skip_special_tokens=False).rstrip(_INCOMPLETE))
            if not any(stop in text[max(0, asked - len(stop) + 1) :] for stop in stops):
                break
        else:
            return count
    return None
