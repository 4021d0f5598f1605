"""An answer with its accepted and rejected guesses marked: in colour, or with brackets where colours are unwelcome."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...modules.decoding.recorders import PROMPT_PASS, PassRecorder, WrittenToken
from ...modules.decoding.token_text import TokenText, visible


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Texts before and after accepted and rejected guesses of the draft, and their explanation."""

    guessed: tuple[str, str]
    rejected: tuple[str, str] | None  # None leaves these out
    legend: str


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
    """Colours on a terminal unless NO_COLOR is set, and anywhere where FORCE_COLOR is; brackets otherwise. An empty
    variable of the environment counts as not set."""
    able = environment.get("FORCE_COLOR") or (terminal and environment.get("TERM") != "dumb")
    return COLOURS if able and not environment.get("NO_COLOR") else BRACKETS


@dataclass
class MarkedAnswer:
    """The answer to one prompt as marked text, and the counts of its tokens."""

    tokenizer: Any
    marks: Marks
    recorder: PassRecorder  # The observer of the decoding loop
    index: int = 0  # The request's
    tokens: int = 0  # Tokens so far
    guessed: int = 0  # Accepted guesses among them

    def text(self, passes: Iterable[list[int]]) -> Iterator[str]:
        """The marked text of each pass, as it comes; the prompt's pass is the first."""
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
        before = visible(rejected, breaks=False).join(self.marks.rejected or ("", "")) if rejected else ""
        return before + (piece.join(self.marks.guessed) if written.guessed and piece else piece)
