"""Sampled cells of the lossless campaign: the distribution of three tokens after the first, over several passes.

Shapes: V tokens of the vocabulary, S sampled answers.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.parts import campaign_drafters as campaign
from benchmarks.parts.campaign_drafters import VOCABULARY
from draftsmith.modules import DecodeSettings, DySpecTree, Policy, Proposer, Rejection, Request, decode
from draftsmith.modules.decoding.constraints import Grammar, GrammarRow
from draftsmith.modules.policies import trees
from draftsmith.modules.verification.acceptance_rules import Divergence
from references import wrong_rules
from scipy.special import xlogy
from support.policies import branching
from transformers import GenerationConfig

TEMPERATURES = (0.1, 0.3, 0.7, 1.0, 1.2)
FILTERS: dict[str, dict[str, Any]] = {"none": {}, "top-k": {"top_k": 5}, "top-p": {"top_p": 0.8},
                                      "min-p": {"min_p": 0.3}, "processor": {}, "grammar": {}}
DRAFTS: dict[str, Callable[[Proposer], Proposer]] = {
    "own": lambda proposer: proposer, "too sure": campaign.TooSure, "reduced": campaign.Reduced,
}
PROMPT, PLACES = (1, 4, 2), 4  # The request and the tokens of its answer; the first comes from the prompt's pass
ANSWERS, SIMULATED = 1000, 999
"""Sampled answers of a cell, and samples of the distribution itself that G is compared with."""


def masked(texts: Any, scores: Any) -> Any:
    """A processor: no token comes twice in a row, and every third text is moved towards high ids."""
    moved = scores + (texts.sum(-1, keepdim=True) % 3 == 0) * torch.linspace(0, 1, scores.shape[-1])
    return moved.scatter(1, texts[:, -1:], -torch.inf)


@cache
def grammar() -> Grammar:
    """A form over the eight tokens, in which some places are forced and some ends are allowed."""
    return Grammar("grammar", r"""root ::= ("!" [ \n\"] | " " [!\"] | "\n" [!\n \"] | "<pad>" "!" | "\"" any)*
any ::= [ !\n\"] | "<pad>" | "<unk>"
""")


def following(texts: Any, scores: Any) -> Any:
    """The grammar as a processor that reads each answer anew."""
    for text, scores_V in zip(texts.tolist(), scores, strict=True):
        target = campaign.enumerable_target(1.0)
        row = GrammarRow(grammar().compiled(target.tokenizer, VOCABULARY, target.eos_ids), target.tokenizer, VOCABULARY,
                         target.eos_ids)
        scores_V[~row.allowed(tuple(text[len(PROMPT) :]))] = -torch.inf
    return scores


RULES: dict[str, Callable[[], dict[str, Any]]] = {"processor": lambda: {"processors": (masked,)},
                                                  "grammar": lambda: {"grammar": grammar()}}


@cache
def law(temperature: float, filtered: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Probability of every triple of tokens after the first, [V^3], by transformers' model and processors."""
    kept = {"top_k": 0, "top_p": 1.0, "min_p": None} | FILTERS[filtered]
    settings = GenerationConfig(do_sample=True, temperature=temperature, **kept)  # type: ignore[no-untyped-call]
    prefixes, chances = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    tokens = torch.arange(VOCABULARY)
    with campaign.enumerable_target(temperature).native() as model, torch.no_grad():
        own = {"processor": [masked], "grammar": [following]}.get(filtered)
        processors = model._get_logits_processor(settings, logits_processor=own)
        for _ in range(PLACES):
            next_SV = processors(prefixes, model(prefixes, use_cache=False).logits[:, -1]).softmax(-1)
            chances = (chances[:, None] * next_SV).flatten()
            prefixes = torch.cat([prefixes.repeat_interleave(VOCABULARY, 0), tokens.repeat(len(prefixes))[:, None]], 1)
    return chances.view(VOCABULARY, -1).sum(0).numpy()


def g_statistic(counts: Any, probabilities: Any) -> Any:
    """G of each row of counts."""
    return 2 * xlogy(counts, counts / (counts.sum(-1, keepdims=True) * np.maximum(probabilities, 1e-300))).sum(-1)


def p_value(counts: Any, probabilities: Any, seed: int) -> float:
    """Rank of G among those of samples of the distribution itself, equal ones by lot: uniform if nothing is wrong."""
    chance = np.random.default_rng(seed)
    simulated = chance.multinomial(counts.sum(), probabilities / probabilities.sum(), SIMULATED)
    others = g_statistic(simulated, probabilities)
    own = g_statistic(counts, probabilities)
    above, equal = (others > own + 1e-9).sum(), (np.abs(others - own) <= 1e-9).sum()
    return float((above + chance.random() * (equal + 1)) / (SIMULATED + 1))


def sampled(name: str, drafter: str, growth: campaign.Growth, temperature: float, filtered: str, draft: str, *,
            inside: Callable[[], AbstractContextManager[Any]] = nullcontext, rule: Rejection | None = None,
            answers: int = ANSWERS) -> campaign.Outcome:
    """Sample answers and compare how often each triple occurs with its probability."""
    target, seed = campaign.enumerable_target(temperature), zlib.crc32(name.encode())
    more = RULES[filtered]() if filtered in RULES else {}
    requests = [Request(PROMPT, index, PLACES, temperature, **more) for index in range(answers)]
    settings = DecodeSettings(batch_size=500, ignore_eos=True, seed=seed, lossy=rule, **FILTERS[filtered])
    proposer = growth.drafter(DRAFTS[draft](campaign.make(drafter, target)), target)
    requests = campaign.with_texts(requests, proposer)
    with inside():
        result = decode(target, requests, settings, drafter=proposer, policy=growth.policy())
    outcome = campaign.Outcome()
    outcome.count(result)
    numbers = [(g.tokens[1] * VOCABULARY + g.tokens[2]) * VOCABULARY + g.tokens[3] for g in result.generations]
    counts, probabilities = np.bincount(numbers, minlength=VOCABULARY**3), law(temperature, filtered)
    outcome.p = p_value(counts, probabilities, seed)
    if impossible := int(counts[probabilities == 0].sum()):
        outcome.p, outcome.divergences = 0.0, impossible
        outcome.note = f"{impossible} answers that the target cannot give"
    return outcome


def right_cells() -> dict[str, Callable[[], campaign.Outcome]]:
    """Every drafter, policy, temperature and filter, the kinds of drafts by turns: as it is, too sure, or reduced."""
    found, drafts = {}, cycle(DRAFTS)
    for drafter in campaign.GUESSERS:
        for policy, growth in campaign.POLICIES.items():
            for temperature in TEMPERATURES:
                for filtered in FILTERS:
                    draft = next(drafts)
                    name = f"{drafter} {policy} T={temperature} {filtered} {draft}"
                    found[name] = partial(sampled, name, drafter, growth, temperature, filtered, draft)
    return found


def likeliest_as_samples() -> AbstractContextManager[Any]:
    """The likeliest tokens pass for samples of q."""
    return patch.object(trees, "sample", lambda log_q, nodes, width, draws: log_q.topk(width).indices)


def wrong_cells() -> dict[str, Callable[[], campaign.Outcome]]:
    """Every wrong rule where it shows: none of these may pass for right."""
    tree, static, by = campaign.POLICIES["sampled"].policy, campaign.POLICIES["static"].policy, wrong_rules.rejecting_by
    rules: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Policy, float, str]] = {
        "unchanged_q": (partial(by, wrong_rules.unchanged_q), tree(), 1.0, "own"),
        "one_entry_residual": (partial(by, wrong_rules.one_entry_residual), tree(), 1.0, "own"),
        "no_renormalisation": (partial(by, wrong_rules.no_renormalisation), static(), 1.0, "own"),
        "typical": (partial(by, wrong_rules.typical), static(), 1.0, "own"),
        "kl": (nullcontext, tree(), 1.0, "own"),
        "no_residual": (partial(by, wrong_rules.no_residual), tree(), 1.0, "own"),
        "underflowing_q": (partial(by, wrong_rules.underflowing_q), tree(), 0.1, "too sure"),
        "likeliest_as_samples": (likeliest_as_samples, tree(), 1.0, "own"),
        "inclusive_sums": (nullcontext, wrong_rules.InclusiveSums(4, 2, 3), 0.3, "too sure"),
        "drops_unlikely": (nullcontext, wrong_rules.DropsUnlikely(branching(2, 2), 0.12), 1.0, "own"),
        "drops_unlikely_dyspec": (nullcontext, wrong_rules.DropsUnlikely(DySpecTree(8, 2, 3), 0.12), 1.0, "own"),
    }
    return {name: partial(_wrong, name, *given) for name, given in rules.items()}


def _wrong(name: str, inside: Callable[[], AbstractContextManager[Any]], policy: Policy, temperature: float,
           draft: str) -> campaign.Outcome:
    # The loop judges where it rejects by a rule of these.
    rule = Divergence(nats=9.0) if name == "kl" else Rejection() if isinstance(inside, partial) else None
    outcome = sampled(name, "eagle3", campaign.Growth(lambda: policy), temperature, "none", draft, inside=inside,
                      rule=rule, answers=4 * ANSWERS)
    outcome.divergences, outcome.note = 0, ""
    return outcome
