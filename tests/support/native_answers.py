"""Requests, and the answers of transformers' own `generate` to them."""

import random
from weakref import WeakKeyDictionary

import torch
from draftsmith.modules import Request, Target

_KEPT: WeakKeyDictionary[Target, dict[tuple[object, ...], list[int]]] = WeakKeyDictionary()
"""Answers of each target by what they follow from. Weights that were written since have another version."""


def native_greedy(target: Target, prompt: tuple[int, ...], count: int, *, eos: bool = False,
                  penalty: float = 1.0) -> list[int]:
    """The answer of `generate`, which tests of a target ask for again and again: a shorter one is the start of a longer
    one, unless an end token may end it."""
    weights = tuple((weight.data_ptr(), weight._version) for weight in target.model.parameters())
    kept = _KEPT.setdefault(target, {})
    asked = (tuple(prompt), penalty, (count, *target.eos_ids) if eos else (), weights)
    if len(kept.get(asked, ())) < count and not (eos and asked in kept):
        kept[asked] = _generated(target, prompt, count, eos=eos, penalty=penalty)
    return kept[asked][:count]


def greedy_answers(target: Target, requests: list[Request], penalty: float = 1.0) -> list[list[int]]:
    return [native_greedy(target, one.tokens, one.max_new_tokens, penalty=penalty) for one in requests]


def texts_of(requests: list[Request], answers: list[list[int]]) -> list[list[int]]:
    """Prompts with their answers."""
    return [[*request.tokens, *answer] for request, answer in zip(requests, answers, strict=True)]


def _generated(target: Target, prompt: tuple[int, ...], count: int, *, eos: bool, penalty: float) -> list[int]:
    with target.native() as model:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, repetition_penalty=penalty,
                             pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                             eos_token_id=list(target.eos_ids) if eos else None)
    return out[0, len(prompt) :].tolist()


def requests_for(target: Target, count: int, new_tokens: int, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(1)
    return [Request(tuple(rng.randrange(4, target.vocab_size) for _ in range(rng.randrange(2, 12))), index,
                    new_tokens + rng.randrange(8), temperature) for index in range(count)]
