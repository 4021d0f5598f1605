"""The target answers prompts, and what it said becomes shards of training tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..modules import Target, UserError
from .chat import ChatTemplate
from .prompts import PromptConfig
from .store import Manifest


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How much the target answers, and how."""

    shard_prompts: int = 128
    """Prompts of one shard: the unit that a killed run redoes."""
    slots: int = 32
    """Answers generated at once; a finished one makes room for the next prompt of its shard."""
    max_new_tokens: int = 192
    """Longest answer, in tokens; longer ones are cut and marked."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures of the answers, dealt to the prompts in turn; 0 is greedy."""
    top_k: int = 0
    """Draw from this many best tokens only; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the nucleus of this mass only."""
    budget_tokens: int | None = None
    """Stop after the shard that reaches this many answer tokens; None stops when the prompts are used up."""
    budget_minutes: float | None = None
    """Start no answer after this many minutes, interrupted runs included. Not repeatable: use tokens where bytes count."""
    validation_prompts: int = 32
    """Prompts answered greedily and held out to choose checkpoints by."""
    test_prompts: int = 0
    """Prompts held out for evaluation, written to test.jsonl."""
    seed: int = 0
    """Of the prompts the target writes and of sampled answers."""
    answers: Literal["target", "given"] = "target"
    """target: the target answers; given: the file's own answers are used as they are and marked off-policy."""


def distill(
    target: Target,
    prompts: PromptConfig,
    config: DistillConfig,
    template: ChatTemplate,
    out: str | Path,
    *,
    progress: bool = True,
) -> Manifest:
    """Make, or finish, the folder `out` of token shards."""
    raise NotImplementedError
