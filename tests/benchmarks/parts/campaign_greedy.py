"""Greedy cells of the lossless campaign: tiny targets in float64, and the embedded one in float32."""

import random
import zlib
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import cycle

from benchmarks.parts.campaign_drafters import (
    GUESSERS,
    OTHER_PROJECTIONS,
    POLICIES,
    VARIANTS,
    Helped,
    changes_target,
    fitting,
    make,
    takes_recurrent,
    verifier,
)
from benchmarks.parts.campaign_targets import ARCHITECTURES, RECURRENT_TARGETS, TRAIT_TARGETS, Outcome, target_of
from draftsmith.export.evaluation.lossless import Judge, generate, native_model
from draftsmith.modules import DecodeSettings, Request, Target, TargetConfig, decode, load_target
from support.answers import greedy_answers, requests_for, texts_of

REQUESTS, TOKENS = 10, 56  # Requests of a cell on a tiny target, and tokens of the shortest answer
BATCHES = {1: 1, 2: 3, 5: 8, REQUESTS: 8}
"""Batch sizes, by how often they are chosen: a pass of one row takes nearly as long as one of ten."""
EMBEDDED_PROMPTS, EMBEDDED_TOKENS, EMBEDDED_CELLS = 8, 56, 40
"""Prompts of a cell on the embedded target, most tokens of an answer, and cells."""
EMBEDDED_BATCHES = (1, 3, *[EMBEDDED_PROMPTS] * 5)  # Batch sizes in turn


def tiny_cells() -> dict[str, Callable[[], Outcome]]:
    """Every architecture and policy with one case of each family and the baselines; all other cases, policies by turns.

    Shuffled, so that a part of them covers all.
    """
    targets = (*ARCHITECTURES, *TRAIT_TARGETS)
    names = [(target, drafter, policy) for target in targets for drafter in GUESSERS for policy in POLICIES]
    for drafter in VARIANTS:
        policies = cycle(fitting(drafter))
        names += [(target, drafter, next(policies)) for target in targets
                  if not (changes_target(drafter) and target in OTHER_PROJECTIONS)]
    names += [(target, drafter, policy) for target in RECURRENT_TARGETS for drafter in GUESSERS for policy in POLICIES
              if takes_recurrent(drafter)]
    random.Random(0).shuffle(names)
    return {" ".join(name): partial(tiny, *name) for name in names}


@cache
def references(architecture: str, changed_for: str | None) -> tuple[Target, list[Request], list[list[int]]]:
    """A target, changed for a drafter where one is named, requests, and the answers of `generate`."""
    target = target_of(architecture)
    if changed_for is not None:
        target = verifier(changed_for, target)
    requests = requests_for(target, REQUESTS, TOKENS)
    return target, requests, greedy_answers(target, requests)


def tiny(architecture: str, drafter: str, policy: str) -> Outcome:
    """Decode the requests with a batch size and a chunk size that the names decide."""
    target, requests, expected = references(architecture, drafter if changes_target(drafter) else None)
    chance = random.Random(zlib.crc32(f"{architecture} {drafter} {policy}".encode()))
    texts = texts_of(requests, expected)
    proposer, growth = make(drafter, target), POLICIES[policy]
    helped = Helped(proposer, texts) if chance.random() < 0.75 else proposer
    batch_size, chunk = chance.choices(list(BATCHES), list(BATCHES.values()))[0], chance.choice((1, 3, 8, 512))
    settings = DecodeSettings(batch_size=batch_size, prefill_chunk=chunk, ignore_eos=True)
    result = decode(target, requests, settings, drafter=growth.drafter(helped, target), policy=growth.policy())
    outcome = Outcome()
    outcome.count(result)
    wrong = [generation.request.index for generation, answer in zip(result.generations, expected, strict=True)
             if generation.tokens != answer]
    outcome.divergences = len(wrong)
    outcome.note = f"answers {wrong} differ, batch {batch_size}, chunk {chunk}" if wrong else ""
    return outcome


@lru_cache(maxsize=1)
def embedded_target() -> Target:
    """The 135M model of the wheel."""
    return load_target(TargetConfig(device="cpu", dtype="float32"))


@lru_cache(maxsize=1)
def embedded_prompts() -> list[tuple[int, ...]]:
    """The handwritten prompts under its chat template."""
    from benchmarks.against_transformers import chat_prompts

    return chat_prompts(embedded_target(), EMBEDDED_PROMPTS * EMBEDDED_CELLS, 400)


def embedded_cells() -> dict[str, Callable[[], Outcome]]:
    """Groups of prompts, each continued with every drafter, the policies by turns."""
    return {f"prompts {number}": partial(embedded, number) for number in range(EMBEDDED_CELLS)}


def embedded(number: int) -> Outcome:
    """Continue some prompts with every drafter and compare with `generate`."""
    target, everything = embedded_target(), embedded_prompts()
    prompts = [everything[(number * EMBEDDED_PROMPTS + place) % len(everything)] for place in range(EMBEDDED_PROMPTS)]
    count = EMBEDDED_TOKENS if number * EMBEDDED_PROMPTS < len(everything) else EMBEDDED_TOKENS + 8
    with native_model(target) as model:
        expected = generate(model, target, prompts, max_new_tokens=count)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    requests = [Request(prompt, index, count) for index, prompt in enumerate(prompts)]
    outcome, policies, judge = Outcome(), list(POLICIES), Judge(target)
    for place, name in enumerate(GUESSERS):
        policy = policies[(number + place) % len(policies)]
        growth = POLICIES[policy]
        settings = DecodeSettings(batch_size=EMBEDDED_BATCHES[(number + place) % len(EMBEDDED_BATCHES)])
        drafter = growth.drafter(Helped(make(name, target), texts, 0.8), target)
        result = decode(target, requests, settings, drafter=drafter, policy=growth.policy())
        outcome.count(result)
        for generation, answer in zip(result.generations, expected, strict=True):
            prompt = generation.request.tokens
            found = judge.compare(generation.request, generation.tokens, answer,
                                  again=partial(alone, target, prompt, count))
            if found.divergence is not None and not found.near_tie:
                outcome.divergences += 1
                outcome.note += f"{name} {policy} prompt {generation.request.index}: gap {found.gap}; "
    return outcome


def alone(target: Target, prompt: tuple[int, ...], count: int) -> list[int]:
    """The reference of one prompt, unpadded."""
    with native_model(target) as model:
        return generate(model, target, [prompt], max_new_tokens=count)[0]
