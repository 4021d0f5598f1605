"""SpecDec++'s loss and labels one token at a time, every pass from the beginning."""

import math

import torch
from draftsmith.modules import DraftLM, Features, SamplingSetting, Target
from draftsmith.modules.verification.sampling import probabilities
from torch import Tensor


def weighted_loss(estimates: list[float], chances: list[float], accept: float, reject: float) -> float:
    """The mean of equation 3.3's terms, weighted."""
    total = weight = 0.0
    for estimate, chance in zip(estimates, chances, strict=True):
        total -= reject * (1 - chance) * math.log(1 - estimate) + accept * chance * math.log(estimate)
        weight += reject * (1 - chance) + accept * chance
    return total / weight


def draft_state(drafter: DraftLM, tokens: list[int]) -> Tensor:
    """The state of a draft language model at the last token of a text."""
    return drafter(Features.from_rows([(tokens, [True] * len(tokens))])).hidden_BLKD[0, -1, drafter.unrolls or 0]


def draft_probs(drafter: DraftLM, tokens: list[int], temperature: float) -> Tensor:
    """q of a draft language model after a text, over the target's vocabulary."""
    logits = drafter.project(draft_state(drafter, tokens), drafter.unrolls or 0).double() / temperature
    if drafter.token_ids_Q is None:
        return logits.softmax(-1)
    return torch.zeros(drafter.vocab_size).double().index_copy(0, drafter.token_ids_Q, logits.softmax(-1))


def chance(target: Target, drafter: DraftLM, before: list[int], token: int, setting: SamplingSetting) -> float:
    """The probability that the target accepts a token that was drafted after a text."""
    with target.native() as model:
        logits = model(torch.tensor([before])).logits[0, -1].double()
    if setting.temperature == 0:
        return float(int(logits.argmax()) == token)
    p = probabilities(logits, torch.tensor(setting.temperature), setting.top_k, setting.top_p, setting.min_p)
    return min(1.0, float(p[token] / draft_probs(drafter, before, setting.temperature)[token]))
