"""The outcome of one cell of the lossless campaign."""

from dataclasses import dataclass

from draftsmith.modules import DecodeResult


@dataclass
class Outcome:
    """Counts of one cell."""

    tokens: int = 0  # Tokens compared, or sampled
    divergences: int = 0  # Answers that differ and must not, or sampled answers that the target cannot give
    drafted: int = 0  # Tokens of passes after the prompts'
    passes: int = 0  # Such passes of single rows
    p: float | None = None  # Probability of a G as large by chance; None where nothing is left to chance
    seconds: float = 0.0  # Wall-clock time
    note: str = ""  # Description of the fault; empty where there is none

    @property
    def wrong(self) -> bool:
        """True if an answer differs."""
        return self.divergences > 0

    def count(self, result: DecodeResult) -> None:
        """Add the tokens and passes of a run."""
        self.tokens += sum(len(generation.tokens) for generation in result.generations)
        self.drafted += sum(sum(generation.emitted) for generation in result.generations)
        self.passes += sum(generation.passes for generation in result.generations)
