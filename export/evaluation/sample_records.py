"""Records of sample answers: their tokens, each with its author."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SampleToken:
    """One token of an answer and its author."""

    text: str
    """Its text; empty for a special token, and for one that ends inside a character."""
    guessed: bool
    """True for an accepted guess of the draft, False for a token that the target chose itself."""
    rejected: tuple[str, ...] = ()
    """Texts of the guesses that the target rejected for the same place."""


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """One answer, decoded again with the author of each token recorded."""

    rank: str
    """Its place among all answers by tokens per target pass: best, median or worst."""
    prompt_set: str
    """Set of its question."""
    prompt: str
    """Text of the question."""
    accepted_length: float
    """Tokens added per target pass."""
    tokens: tuple[SampleToken, ...]
    """The answer; the texts of its tokens together are its text."""

    @property
    def guessed(self) -> int:
        """Tokens that the draft guessed."""
        return sum(token.guessed for token in self.tokens)
