"""An answer with its accepted and rejected guesses marked: in colour, or with brackets where colours are unwelcome."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...modules.decoding.recorders import PROMPT_PASS, PassRecorder, WrittenToken
from ...modules.decoding.token_text import TokenText, visible


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Texts written before and after each kind of token."""

    guessed: tuple[str, str]
    """Around an accepted guess of the draft."""
    rejected: tuple[str, str] | None
    """Around a rejected guess; None leaves these out."""
    legend: str
    """Explanation of the marks."""


RESET = "\x1b[0m"
COLOURS = Marks(
    guessed=("\x1b[32m", RESET), rejected=("\x1b[2;9m", RESET),
    legend=f"\x1b[32mgreen{RESET}: guessed by the draft and accepted · uncoloured: written by the target itself · "
           f"\x1b[2;9mstruck through{RESET}: guessed and rejected",
)
"""Green for accepted guesses; rejected ones dim and struck through."""
BRACKETS = Marks(guessed=("[", "]"), rejected=("~", "~"),
                 legend="[ ]: guessed by the draft and accepted · unmarked: written by the target itself · "
                        "~ ~: guessed and rejected")
"""The same for files, pipes and terminals without colours."""


def marks_for(terminal: bool, environment: Mapping[str, str]) -> Marks:
    """Colours on a terminal unless NO_COLOR is set, and anywhere where FORCE_COLOR is; brackets otherwise.

    Args:
        terminal: whether the output is one.
        environment: the variables of the process; an empty one counts as not set.
    """
    if environment.get("NO_COLOR"):
        return BRACKETS
    if environment.get("FORCE_COLOR"):
        return COLOURS
    return COLOURS if terminal and environment.get("TERM") != "dumb" else BRACKETS


@dataclass
class MarkedAnswer:
    """The answer to one prompt as marked text, and the counts of its tokens.

    Args:
        tokenizer: the target's.
        marks: how guesses are set off.
        recorder: the observer of the decoding loop.
        index: the request's.
    """

    tokenizer: Any
    marks: Marks
    recorder: PassRecorder
    index: int = 0
    tokens: int = 0
    """Tokens so far."""
    guessed: int = 0
    """Accepted guesses among them."""

    def text(self, passes: Iterable[list[int]]) -> Iterator[str]:
        """The marked text of each pass, as it comes.

        Args:
            passes: the tokens of each pass, the prompt's first.
        """
        pieces = TokenText(self.tokenizer)
        for place, tokens in enumerate(passes):
            found = self.recorder.passes[self.index][place - 1] if place else PROMPT_PASS
            yield "".join(self._marked(one, pieces) for one in found.written(tokens))
        yield visible(pieces.rest())

    def summary(self) -> str:
        """The legend and the counts, in two lines."""
        return f"{self.marks.legend}\n{self.guessed} of {self.tokens} tokens were guessed"

    def _marked(self, written: WrittenToken, pieces: TokenText) -> str:
        """One token; before a token of the target's own, the first guess that was rejected for its place."""
        self.tokens += 1
        self.guessed += written.guessed
        # The guess is read before the token is taken.
        rejected = pieces.guess(written.rejected[0]) if written.rejected and self.marks.rejected else ""
        piece = visible(pieces.add(written.token))
        before = _around(self.marks.rejected or ("", ""), visible(rejected, breaks=False))
        return before + (_around(self.marks.guessed, piece) if written.guessed else piece)


def _around(pair: tuple[str, str], text: str) -> str:
    """The text between the two marks; nothing where there is no text."""
    return f"{pair[0]}{text}{pair[1]}" if text else ""
