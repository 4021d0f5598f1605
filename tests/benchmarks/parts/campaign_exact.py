"""Exact cells of the lossless campaign: greedy ones on tiny targets in float64 and on the embedded one in float32, and
fuzzed ones, random requests in random batches against plain decoding one by one."""

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import cycle, product

from benchmarks.parts import campaign_drafters as campaign
from draftsmith.export.evaluation.lossless import Judge, generate, native_model
from draftsmith.modules import BASELINES, DecodeSettings, Proposer, Request, Target, TargetConfig, decode, load_target
from support.answers import greedy_answers, native_greedy, requests_for, texts_of

REQUESTS, TOKENS = 10, 56  # Requests of a cell on a tiny target, and tokens of the shortest answer
BATCHES = {1: 1, 2: 3, 5: 8, REQUESTS: 8}
"""Batch sizes, by how often they are chosen: a pass of one row takes nearly as long as one of ten."""
EMBEDDED_PROMPTS, EMBEDDED_TOKENS, EMBEDDED_CELLS = 8, 56, 40
"""Prompts of a cell on the embedded target, most tokens of an answer, and cells."""
EMBEDDED_BATCHES = (1, 3, *[EMBEDDED_PROMPTS] * 5)  # Batch sizes in turn


def tiny_cells() -> dict[str, Callable[[], campaign.Outcome]]:
    """Every architecture and policy with one case of each family and the baselines; all other cases, policies by turns.

    Shuffled, so that a part of them covers all.
    """
    targets = (*campaign.ARCHITECTURES, *campaign.TRAIT_TARGETS)
    names = [*product(targets, campaign.GUESSERS, campaign.POLICIES)]
    for drafter in campaign.VARIANTS:
        policies = cycle(campaign.fitting(drafter))
        names += [(target, drafter, next(policies)) for target in targets if campaign.fits(drafter, target)]
    names += product(campaign.RECURRENT_TARGETS, filter(campaign.takes_recurrent, campaign.GUESSERS), campaign.POLICIES)
    names = [name for name in names if campaign.fits(name[1], name[0])]
    random.Random(0).shuffle(names)
    return {" ".join(name): partial(tiny, *name) for name in names}


@cache
def references(architecture: str, changed_for: str | None) -> tuple[Target, list[Request], list[list[int]]]:
    """A target, changed for a drafter where one is named, requests, and the answers of `generate`."""
    target = campaign.target_of(architecture)
    if changed_for is not None:
        target = campaign.verifier(changed_for, target)
    requests = requests_for(target, REQUESTS, TOKENS)
    return target, requests, greedy_answers(target, requests)


def tiny(architecture: str, drafter: str, policy: str) -> campaign.Outcome:
    """Decode the requests with a batch size and a chunk size that the names decide."""
    target, requests, expected = references(architecture, drafter if campaign.changes_target(drafter) else None)
    chance = random.Random(zlib.crc32(f"{architecture} {drafter} {policy}".encode()))
    texts = texts_of(requests, expected)
    proposer, growth = campaign.make(drafter, target), campaign.POLICIES[policy]
    helped = campaign.Helped(proposer, texts) if chance.random() < 0.75 else proposer
    batch_size, chunk = chance.choices(list(BATCHES), list(BATCHES.values()))[0], chance.choice((1, 3, 8, 512))
    settings = DecodeSettings(batch_size=batch_size, prefill_chunk=chunk, ignore_eos=True)
    proposed = growth.drafter(helped, target)
    result = decode(target, campaign.with_texts(requests, proposed), settings, drafter=proposed,
                    policy=growth.policy())
    outcome = campaign.Outcome()
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
    from benchmarks.parts.shapes import chat_prompts

    return chat_prompts(embedded_target(), EMBEDDED_PROMPTS * EMBEDDED_CELLS, 400)


def embedded_cells() -> dict[str, Callable[[], campaign.Outcome]]:
    """Groups of prompts, each continued with every drafter, the policies by turns."""
    return {f"prompts {number}": partial(embedded, number) for number in range(EMBEDDED_CELLS)}


def embedded(number: int) -> campaign.Outcome:
    """Continue some prompts with every drafter and compare with `generate`."""
    target, everything = embedded_target(), embedded_prompts()
    prompts = [everything[(number * EMBEDDED_PROMPTS + place) % len(everything)] for place in range(EMBEDDED_PROMPTS)]
    count = EMBEDDED_TOKENS if number * EMBEDDED_PROMPTS < len(everything) else EMBEDDED_TOKENS + 8
    with native_model(target) as model:
        expected = generate(model, target, prompts, max_new_tokens=count)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    requests = [Request(prompt, index, count) for index, prompt in enumerate(prompts)]
    outcome, policies, judge = campaign.Outcome(), list(campaign.POLICIES), Judge(target)
    for place, name in enumerate(campaign.GUESSERS):
        policy = policies[(number + place) % len(policies)]
        growth = campaign.POLICIES[policy]
        settings = DecodeSettings(batch_size=EMBEDDED_BATCHES[(number + place) % len(EMBEDDED_BATCHES)])
        drafter = growth.drafter(campaign.Helped(campaign.make(name, target), texts, 0.8), target)
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


# Fuzzed cells --------------------------------------------------------------------------------------------------------

INDICES = (0, 1, 7, 2**31, 2**32, 2**32 + 1, 5 << 32, 2**53 + 1, 2**63 - 1)
CELLS = 1000  # Fuzzed cases


def fuzzed_cells() -> dict[str, Callable[[], campaign.Outcome]]:
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


def fuzzed(seed: int) -> campaign.Outcome:
    """One batch, each answer compared."""
    chance = random.Random(seed)
    architecture = chance.choice(list(campaign.ARCHITECTURES))
    target = campaign.target_of(architecture)
    requests, settings = random_requests(chance, target.vocab_size), random_settings(chance, target)
    name = chance.choice((*campaign.GUESSERS, *campaign.VARIANTS))
    if not campaign.fits(name, architecture):
        name = campaign.GUESSERS[0]
    policy = chance.choice(campaign.fitting(name))
    target, growth = campaign.verifier(name, target), campaign.POLICIES[policy]
    wrapped = chance.choice((campaign.TooSure, campaign.Reduced, None, None, None))
    proposer = campaign.make(name, target)
    drafter = growth.drafter(proposer if wrapped is None else wrapped(proposer), target)
    requests = campaign.with_texts(requests, drafter)
    result = decode(target, requests, settings, drafter=drafter, policy=growth.policy())
    outcome = campaign.Outcome()
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
             growth: campaign.Growth) -> tuple[list[int], str]:
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
