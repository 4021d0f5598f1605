"""SpecDec++'s loss, labels and token mixing one token at a time, every pass from the beginning."""

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


def mixed(
    target: Target, drafter: DraftLM, tokens: list[int], first: int, setting: SamplingSetting, share: float,
    generator: torch.Generator,
) -> list[tuple[Tensor, float]]:
    """(state, chance) of the drafted tokens of a mixed text, whose places from `first` on are supervised."""
    size = drafter.vocab_size if drafter.token_ids_Q is None else len(drafter.token_ids_Q)
    noise = torch.empty(1, len(tokens) - 1, size)
    if setting.temperature:
        noise.exponential_(generator=generator)
    kept, mix, drafted = torch.rand(1, len(tokens), generator=generator)[0] < share, list(tokens), dict[int, int]()
    for place in range(first, len(tokens)):
        logits = drafter.project(draft_state(drafter, tokens[:place]), 0).float()
        scores = (logits / (setting.temperature or 1)).log_softmax(-1)
        scores = scores - noise[0, place - 1].log() if setting.temperature else scores
        entry = int(scores.argmax())
        drafted[place] = entry if drafter.token_ids_Q is None else int(drafter.token_ids_Q[entry])
        mix[place] = tokens[place] if kept[place] else drafted[place]
    return [(draft_state(drafter, mix[: place + 1]), chance(target, drafter, tokens[:place], token, setting))
            for place, token in drafted.items() if mix[place] == token]
