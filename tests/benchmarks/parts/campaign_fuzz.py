"""Fuzzed cells of the lossless campaign: random requests in random batches, against plain decoding one by one."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.parts.campaign_drafters import (
    GUESSERS,
    OTHER_PROJECTIONS,
    POLICIES,
    VARIANTS,
    Growth,
    Reduced,
    TooSure,
    changes_target,
    fitting,
    make,
    verifier,
)
from benchmarks.parts.campaign_targets import ARCHITECTURES, Outcome, target_of
from draftsmith.modules import BASELINES, DecodeSettings, Proposer, Request, Target, decode
from support.answers import native_greedy

INDICES = (0, 1, 7, 2**31, 2**32, 2**32 + 1, 5 << 32, 2**53 + 1, 2**63 - 1)
CELLS = 1000  # Fuzzed cases


def cells() -> dict[str, Callable[[], Outcome]]:
    """The cases, each named by its seed."""
    return {f"seed {seed}": partial(fuzzed, seed) for seed in range(CELLS)}


def random_requests(chance: random.Random, vocab_size: int) -> list[Request]:
    """Prompts, limits, temperatures and indices by chance."""
    indices = chance.sample([*INDICES, *range(100, 120)], chance.randint(1, 9))
    shared = [chance.randrange(vocab_size) for _ in range(chance.choice((0, 0, 12)))]
    return [Request((*shared,
                     *(chance.randrange(vocab_size) for _ in range(chance.choice((1, 2, 30, chance.randint(1, 30)))))),
                    index, chance.randint(1, 40), chance.choice((0.0, 0.0, 0.001, 0.1, 0.7, 1.2, 1000.0)))
            for index in indices]


def random_settings(chance: random.Random, target: Target) -> DecodeSettings:
    """Batch, chunks, filters, seeds, stop texts and penalties by chance."""
    characters = [target.tokenizer.decode([chance.randrange(4, target.vocab_size - 1)]) for _ in range(2)]
    return DecodeSettings(batch_size=chance.choice((1, 2, 3, 8)), prefill_chunk=chance.choice((1, 2, 5, 512)),
                          top_k=chance.choice((0, 0, 1, 5, 60)), top_p=chance.choice((1.0, 1.0, 0.9, 0.3)),
                          min_p=chance.choice((0.0, 0.0, 0.1)), seed=chance.choice((0, 3, -1, 2**40, 2**63)),
                          stop=chance.choice(((), (), tuple(characters))), ignore_eos=chance.random() < 0.5,
                          repetition_penalty=chance.choice((1.0, 1.0, 1.3)))


def fuzzed(seed: int) -> Outcome:
    """One batch, each answer compared."""
    chance = random.Random(seed)
    architecture = chance.choice(list(ARCHITECTURES))
    target = target_of(architecture)
    requests, settings = random_requests(chance, target.vocab_size), random_settings(chance, target)
    name = chance.choice((*GUESSERS, *VARIANTS))
    if changes_target(name) and architecture in OTHER_PROJECTIONS:
        name = GUESSERS[0]
    policy = chance.choice(fitting(name))
    target, growth = verifier(name, target), POLICIES[policy]
    wrapped = chance.choice((TooSure, Reduced, None, None, None))
    proposer = make(name, target)
    drafter = growth.drafter(proposer if wrapped is None else wrapped(proposer), target)
    result = decode(target, requests, settings, drafter=drafter, policy=growth.policy())
    outcome = Outcome()
    outcome.count(result)
    for request, generation in zip(requests, result.generations, strict=True):
        # What a sampled answer owes to earlier requests of the same drafter cannot be repeated.
        if growth.samples and request.temperature > 0 and name in BASELINES:
            continue
        if (generation.tokens, generation.finish) != expected(target, request, settings, drafter, growth):
            outcome.divergences += 1
            outcome.note += f"{name} {policy} on {target.identity.name}: request {request.index} differs; "
    return outcome


def expected(target: Target, request: Request, settings: DecodeSettings, drafter: Proposer,
             growth: Growth) -> tuple[list[int], str]:
    """(tokens, why they end) of a request alone: by `generate` if greedy, else with the draft, if it matters."""
    if request.temperature == 0:
        penalty = settings.repetition_penalty
        free = native_greedy(target, request.tokens, request.max_new_tokens, penalty=penalty)
        return ended(target, free, settings)
    alone = replace(settings, batch_size=1, prefill_chunk=512)
    if growth.samples:
        result = decode(target, [request], alone, drafter=drafter, policy=growth.policy())
    else:
        result = decode(target, [request], alone)
    generation, = result.generations
    return generation.tokens, generation.finish


def ended(target: Target, tokens: list[int], settings: DecodeSettings) -> tuple[list[int], str]:
    """An answer cut where its first end token or stop text is complete."""
    for count in range(1, len(tokens) + 1):
        text = target.tokenizer.decode(tokens[:count], skip_special_tokens=False)
        if any(stop in text for stop in settings.stop):
            return tokens[:count], "stop"
        if not settings.ignore_eos and tokens[count - 1] in target.eos_ids:
            return tokens[:count], "eos"
    return tokens, "length"
