"""Prompt tokens: one copy over the whole vocabulary, and an ensemble of two over a reduced one."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from draftsmith.modules import PromptTokens, PromptTokensConfig, Target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.trainers import draft_module, train_config
from support.cases import IDS, Case, case, cycle_rows, cycle_target


@cache
def _guessing_weights() -> dict[str, Any]:
    """Weights of a tiny model that guesses ahead after certain embeddings, which are not kept: trained with them.

    A few embeddings cannot make a random model guess: a real one has seen text from which it can.
    """
    target = cycle_target()
    module = draft_module(PromptTokens)(target, train_config(PromptTokens)(objective="hard", seed=1))
    module.configure_model()
    start_SD = module.drafter.prompts.data
    start_SD += 0.15 * torch.randn(start_SD.shape, generator=torch.Generator().manual_seed(9))
    target.model.requires_grad_(True)
    trained = [*target.model.parameters(), module.drafter.prompts]
    optimizer, steps = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0), 300
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10, 1.02 - step / steps))
    for step in range(steps):
        optimizer.zero_grad()
        loss = module.loss(cycle_rows(step, rows=4)).total
        loss.backward()
        optimizer.step()
        schedule.step()
    weights: dict[str, Any] = target.model.state_dict()
    return weights


def guessing_target() -> Target:
    """A target of which a few embeddings after a token can make guesses."""
    model = tiny_model()
    model.load_state_dict(_guessing_weights())
    return Target(model, tiny_tokenizer(), name="tiny-guessing")


def _prompts(config: PromptTokensConfig, ids: torch.Tensor | None = None) -> Case:
    # The cycle is not the target's own text: its distributions do not help.
    made = case(PromptTokens, config, ids, objective="hard")
    return replace(made, steps=200, lr=2e-2, teacher=guessing_target)


CASES = {
    "prompt-tokens": _prompts(PromptTokensConfig()),
    "prompt-tokens-copies": _prompts(PromptTokensConfig(num_tokens=2, copies=2, vocabulary_size=len(IDS)), IDS),
}
