"""Measure drafts against the target alone: acceptance, speed, and whether a single word changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..modules import Drafter, Policy, Target
from .artifact import Artifact
from .results import EvaluationRun

PromptSets = Mapping[str, Sequence[tuple[str, Sequence[int]]]]
"""Prompts by the name of their set, each (category, tokens); a category of "" stands for none."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is decoded and what is timed."""

    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 1
    """Rows decoded at once where speed is measured."""
    temperature: float = 0.0
    """0 is greedy; above it, identity is checked against this project's plain loop under the same random stream."""
    top_k: int = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: float = 1.0
    """Sample within this share of the probability."""
    seed: int = 0
    """Seed of the random streams of the answers."""
    speed_prompts: int = 8
    """Prompts of each set whose decoding is timed (each by drafts, plainly and by `generate`); 0 times none."""
    limit: int | None = None
    """Use at most this many prompts of each set; None uses all."""
    untimed_batch_size: int = 8
    """Rows decoded at once for the prompts that are not timed; acceptance and identity do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to draft that takes part in an evaluation; several may enter the same one."""

    name: str
    """How the report calls it."""
    family: str
    """Its family, such as medusa."""
    drafter: Drafter | None
    """What drafts; None decodes with the target alone."""
    policy: Policy | None
    """How the tree grows; None for the target alone."""

    @classmethod
    def of(cls, artifact: Artifact, *, name: str | None = None, tree_size: int | None = None) -> "Method":
        """The method an artifact stands for, with its tuned tree unless `tree_size` says otherwise."""
        raise NotImplementedError


def evaluate(target: Target, methods: Sequence[Method], prompt_sets: PromptSets, config: EvaluateConfig, *,
             progress: bool = True) -> EvaluationRun:
    """Decode every prompt with every method and compare with the target alone.

    Raises:
        UserError: if there is no method or no prompt, or a prompt and its answer exceed the target's context.
    """
    raise NotImplementedError
