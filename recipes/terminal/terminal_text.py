"""Text for terminals: control characters, which could move the cursor or hide words, are written as their codes.

Everything that the commands print passes here, since names of models, files and prompts come from others.
"""

import os
import re
import sys
from typing import TextIO

LONGEST = 200  # Characters of a word that a sentence shows; of a longer one, its ends
LONGEST_SENTENCE = 500  # Characters of a sentence; of a longer one the middle is left out, since its end is a remedy


def printable(text: str, keep: str = "") -> str:
    """The text with each character that is not printable as its code: \\x1b, \\u202e, \\ud800; those of `keep`, such as
    line breaks, stay."""
    if text.isprintable():
        return text
    shown = []
    for letter in text:
        number = ord(letter)
        # As in Python's own strings.
        code = f"x{number:02x}" if number < 0x100 else f"u{number:04x}" if number < 0x10000 else f"U{number:08x}"
        shown.append(letter if letter.isprintable() or letter in keep else f"\\{code}")
    return "".join(shown)


def one_sentence(text: str) -> str:
    """The text as one printable line; of words that no terminal could show, such as 5,000 digits, only the ends."""
    line = printable(" ".join(text.split()))
    line = re.sub(rf"\S{{{LONGEST + 1},}}", lambda word: (
        f"{word[0][: LONGEST // 2]}...({len(word[0]):,} characters)...{word[0][-LONGEST // 4:]}"), line)
    half = (LONGEST_SENTENCE - len(" [...] ")) // 2
    return line if len(line) <= LONGEST_SENTENCE else f"{line[:half]} [...] {line[-half:]}"


def stage_line(text: str, file: TextIO | None = None) -> None:
    """Print a sentence under the title of a run's stage."""
    say(f"     {text}", file=file)


def say(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print at once; line breaks and tabs stay, other control characters are written as their codes.

    Of the processes that torchrun has started the first one speaks for all; each reports its own errors.
    """
    if file is None and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        return
    print(printable(text, keep="\n\t"), end=end, file=sys.stdout if file is None else file, flush=True)
