"""What an evaluation found, and its JSON."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """How the drafted answers compare with the reference."""

    prompts: int
    """Answers compared."""
    identical: int
    """Answers equal token by token."""
    near_tie_divergences: int
    """Answers whose first difference stands where the target itself is undecided."""
    max_logit_gap_at_divergence: float | None
    """Largest gap between the target's two best logits at a first difference; None when nothing differs."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What was measured on a group of prompts: all of them, a set, or a category."""

    prompts: int
    """Answers decoded."""
    new_tokens: int
    """Tokens of the answers."""
    target_passes: int
    """Target passes after the prompts', summed over answers."""
    accepted_length: float
    """Tokens emitted per target pass, the bonus included: a ratio of sums."""
    acceptance_by_position: tuple[float, ...]
    """Share of passes whose k-th drafted token was accepted (with all before it); accepted_length is 1 + their sum."""
    tokens_per_second: float | None
    """Drafted decoding, median over timed prompts; None when none of the group was timed."""
    plain_tokens_per_second: float | None
    """This project's loop without drafts."""
    generate_tokens_per_second: float | None
    """transformers' `generate`."""
    speedup: float | None
    """tokens_per_second over the faster of the two baselines."""
    draft_time_share: float | None
    """Share of the drafted seconds that went into drafting."""
    repetition_rate: float
    """Share of answers in which over 30 % of the 4-grams occurred before."""
    truncation_rate: float
    """Share of answers cut by the length limit."""
    lossless: Lossless
    """Identity with the reference."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One method on all prompts."""

    name: str
    """The method's name."""
    family: str
    """Its family."""
    target: str
    """Name of the target."""
    batch_size: int
    """Rows decoded at once where speed was measured."""
    temperature: float
    """0 is greedy."""
    contended: bool
    """True when the machine was busy with something else: speeds are then not to be trusted."""
    target_calls: int
    """Forward calls of the target after the prompts': with a batch, fewer than the passes of its rows."""
    overall: Measures
    """All prompts."""
    by_prompt_set: dict[str, Measures]
    """Each prompt set."""
    by_category: dict[str, Measures]
    """Each category of each set that has categories."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """Everything measured in one process: the methods share its baselines."""

    header: dict[str, Any]
    """Machine, dtype, threads, versions, settings."""
    evaluations: tuple[Evaluation, ...]
    """One for each method, in the order given."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON: header and first method at the top level, further methods under "others"."""
        raise NotImplementedError
