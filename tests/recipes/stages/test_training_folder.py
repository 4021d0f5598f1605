"""Sentences on a training's curve: what ended it, what its draft lacks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import MeasuredStep
from draftsmith.recipes.stages.training_folder import outcome


def found(lengths: list[float], labels: int, *, max_steps: int | None = 400, steps: int = 400,
            budget: int | None = 14_000, start: str | None = None, held: int = 24) -> str:
    """The sentences on a curve whose measurements come every 100 steps, of a text of 14,000 labels."""
    curve = tuple(MeasuredStep(step=100 * place, accepted_length=length, labels=labels * place // (len(lengths) - 1))
                  for place, length in enumerate(lengths))
    # A draft that is continued may have been best before.
    best = max(curve[0 if start else 1:], key=lambda one: one.accepted_length)
    workspace: Any = SimpleNamespace(
        label_weights=torch.tensor([10_000, 4_000]),
        recipe=SimpleNamespace(train=SimpleNamespace(max_steps=max_steps, start=start),
                               distill=SimpleNamespace(budget_tokens=budget, budget_minutes=None,
                                                       validation_prompts=held)),
        manifest=lambda: SimpleNamespace(total=lambda *_: 14_000))
    result: Any = SimpleNamespace(curve=curve, step=best.step, steps=steps, accepted_length=best.accepted_length)
    return outcome(workspace, result)


@pytest.mark.parametrize(("lengths", "labels", "more", "said"), [
    ([1.0, 1.5, 1.7, 1.71, 1.7], 210_000, {},
     "Short of data: 14,000 tokens seen 15 times; more answers (distill.budget_tokens) will help. Best at step 300 of "
     "400: 1.71 tokens per pass of held-out text."),
    ([1.0, 1.5, 1.7, 1.71, 1.72], 210_000, {"budget": 20_000},
     "Short of data: 14,000 tokens seen 15 times; more prompts will help. Best at step 400 of 400: 1.72 tokens per "
     "pass of held-out text."),
    ([1.0, 1.5, 1.7, 1.71, 1.72], 210_000, {"budget": None},
     "Short of data: 14,000 tokens seen 15 times; more prompts will help. Best at step 400 of 400: 1.72 tokens per "
     "pass of held-out text."),
    ([1.0, 1.5, 1.7, 1.71, 1.72], 210_000, {"budget": 20_000, "held": 15_000},
     "Short of data: 14,000 tokens seen 15 times; more prompts, or a lower distill.validation_prompts, will help. Best "
     "at step 400 of 400: 1.72 tokens per pass of held-out text."),
    ([1.0, 1.2, 1.4, 1.6, 1.8], 28_000, {},
     "Still rising at the end: more steps (train.max_steps) will help. Best at step 400 of 400: 1.80 tokens per pass "
     "of held-out text, by 14,000 tokens seen 2 times."),
    ([1.0, 1.2, 1.4, 1.6, 1.8], 20_000, {"max_steps": None},
     "Still rising at the end: more minutes (train.max_minutes) will help. Best at step 400 of 400: 1.80 tokens per "
     "pass of held-out text, by 14,000 tokens, not seen twice."),
    ([1.0, 1.2, 1.4, 1.6, 1.8], 210_000, {"max_steps": 500},
     "Still rising at the end: more minutes (train.max_minutes) will help, and more answers (distill.budget_tokens) "
     "too. Best at step 400 of 400: 1.80 tokens per pass of held-out text, by 14,000 tokens seen 15 times."),
    ([1.0, 1.5, 1.7, 1.71, 1.7], 28_000, {},
     "Best at step 300 of 400: 1.71 tokens per pass of held-out text, by 14,000 tokens seen 2 times, and level by the "
     "end: more steps (train.max_steps) alone will hardly help."),
    ([1.3, 1.4, 1.5, 1.6, 1.8], 28_000, {"start": "runs/tiny/artifact"},
     "Still rising at the end: more steps (train.max_steps) will help. Best at step 400 of 400: 1.80 tokens per pass "
     "of held-out text, 1.30 before this training, by 14,000 tokens seen 2 times."),
    ([1.9, 1.4, 1.5], 28_000, {"start": "runs/tiny/artifact", "steps": 200},
     "Best at step 0 of 200: 1.90 tokens per pass of held-out text, 1.90 before this training, which has not made the "
     "drafter of train.start better; lower train.lr, or take more data."),
    ([1.0, 1.5], 210_000, {"steps": 100},
     "Best at step 100 of 100: 1.50 tokens per pass of held-out text; measured too seldom to say more "
     "(train.validate_every)."),
])
def test_a_curve_says_what_would_help(lengths: list[float], labels: int, more: dict[str, Any], said: str) -> None:
    assert found(lengths, labels, **more) == said
