"""Targets, drafters and policies of the lossless campaign: tiny random targets, one whose answers can be enumerated,
and every family, helped to be right more often or made too sure. And the outcome of a cell."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from draftsmith.modules import (
    BASELINES,
    DRAFTERS,
    BeamTree,
    Chain,
    DecodeResult,
    DraftState,
    DySpecTree,
    Eagle2Tree,
    Ensemble,
    Frontier,
    Observation,
    PathProbability,
    Policy,
    Proposer,
    Request,
    SampledChain,
    SampledTree,
    Scores,
    StaticTree,
    StoppedChain,
    Target,
    Topology,
    Union,
    UserError,
    baseline,
)
from draftsmith.modules.interfaces.proposer import VerifiedRows
from draftsmith.modules.policies.paid import PaidTree
from draftsmith.modules.policies.stopping_chains import EarlyExit
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from support.drafters import History, Wrapped
from support.families import CASES, Case, cases_of, randomised
from support.policies import FixedLength
from support.targets import random_model, random_trait, recurrent_model
from torch import Tensor


@dataclass
class Outcome:
    """Counts of one cell."""

    tokens: int = 0  # Tokens compared, or sampled
    divergences: int = 0  # Answers that differ and must not, or sampled answers that the target cannot give
    drafted: int = 0  # Tokens of passes after the prompts'
    passes: int = 0  # Such passes of single rows
    p: float | None = None  # Probability of a G as large by chance; None where nothing is left to chance
    seconds: float = 0.0  # Wall-clock time
    note: str = ""  # Description of the fault; empty where there is none

    @property
    def wrong(self) -> bool:
        """True if an answer differs."""
        return self.divergences > 0

    def count(self, result: DecodeResult) -> None:
        """Add the tokens and passes of a run."""
        self.tokens += sum(len(generation.tokens) for generation in result.generations)
        self.drafted += sum(sum(generation.emitted) for generation in result.generations)
        self.passes += sum(generation.passes for generation in result.generations)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Phi": {},
    "Phi3": {"sliding_window": None},
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPT2": {},
    "Olmo2": {},
    "StableLm": {},
    "Granite": {},
    "Cohere": {},
    "Starcoder2": {"sliding_window": None},
}
"""Names in transformers, and what differs from a Llama's configuration."""
RECURRENT_TARGETS = ("Qwen3_5Text", "NemotronH", "Lfm2", "KimiLinear")
"""Those with recurrent layers, in float32: their own code takes no other number format that is as wide."""
TRAIT_TARGETS = ("gpt-oss", "deepseek-v3", "gemma4", "llama4")
"""Those with sinks, latent attention, layers of unlike shape, and chunks."""
VOCABULARY = 8  # Tokens of the target whose answers are enumerated


def build(name: str, **changes: Any) -> Target:
    """A random target of an architecture."""
    with torch.random.fork_rng(devices=[]):
        if name in RECURRENT_TARGETS:
            model = recurrent_model(name, max_position_embeddings=256)
        elif name in TRAIT_TARGETS:
            model = random_trait(name, torch.float64, max_position_embeddings=256)
        else:
            model = random_model(name, max_position_embeddings=256, **ARCHITECTURES[name] | changes).double()
    return Target(model, tiny_tokenizer(), name=name)


@cache
def target_of(name: str) -> Target:
    """The same, kept."""
    return build(name)


@lru_cache(maxsize=8)
def enumerable_target(temperature: float) -> Target:
    """A Llama of eight tokens whose distribution at a temperature is the same whatever the temperature.

    A low temperature would leave nothing to chance, and a test of chance blind.
    """
    target = build("Llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        target.head.weight.mul_(0.5 * temperature)
    return target


FAMILIES = {family: next(iter(cases_of(family))) for family in (cls.family for cls in DRAFTERS)}
"""The first case of each family, which stands for it under every policy."""
VARIANTS = tuple(name for name in CASES if name not in FAMILIES.values())
"""The other cases: reduced vocabularies, other shapes, changed targets."""
GUESSERS = (*FAMILIES.values(), *BASELINES)  # The guessers that are tried under every policy
OTHER_PROJECTIONS = ("GPT2", "GPTNeoX", "Phi", "Phi3", "Starcoder2")
"""Architectures without the projections that Medusa-2's cases name."""
OTHER_NORMS = ("GPT2", "GPTNeoX", "Phi", "NemotronH", "Lfm2")  # Their last norm has another name than MTP copies


@dataclass(frozen=True)
class Growth:
    """A policy with what the campaign must know of it."""

    policy: Callable[[], Policy]  # A new policy
    samples: bool = False  # True if sampled answers depend on the draft
    joined: bool = False  # True if the drafter is joined with prompt lookup

    def drafter(self, proposer: Proposer, target: Target) -> Proposer:
        """The drafter that the policy needs, from one that guesses."""
        return Ensemble([baseline("prompt_lookup", target)[0], proposer]) if self.joined else proposer


POLICIES: dict[str, Growth] = {
    "chain": Growth(lambda: Chain(2)),
    "static": Growth(lambda: StaticTree(Topology((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0)))),
    "paid": Growth(lambda: PaidTree(Topology((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0)))),
    "eagle2": Growth(lambda: Eagle2Tree(8, 3, 3)),
    "stopped": Growth(lambda: StoppedChain(4, EarlyExit(0.3))),
    "sure": Growth(lambda: StoppedChain(4, PathProbability(0.3))),
    "union": Growth(lambda: Union([Chain(3), StaticTree(Topology((-1, 0, 0, 1), (0, 0, 1, 0)))], 6), joined=True),
    "dyspec": Growth(lambda: DySpecTree(8, 3, 3), samples=True),
    "beam": Growth(lambda: BeamTree(3, 3), samples=True),
    "sampled": Growth(lambda: SampledTree(Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))), samples=True),
    "sampled-chain": Growth(lambda: SampledTree(Topology.chain(3)), samples=True),
    "sampled-stopped": Growth(lambda: SampledChain(4, FixedLength(3), check_every=0), samples=True),
}
LEAD = 12.0
"""Nats by which a drafter that is too sure prefers its favourite: at temperature 0.1 all else is 0 in float32."""


def make(name: str, target: Target) -> Proposer:
    """A new drafter next to the target that verifies its drafts, with random weights where it has any."""
    return randomised(CASES[name].make(target)) if name in CASES else baseline(name, target)[0]


def verifier(name: str, target: Target) -> Target:
    """The target that verifies a drafter's drafts: a changed one where training changes it."""
    return CASES[name].verifier(target) if name in CASES else target


def changes_target(name: str) -> bool:
    """True for drafters that are trained with their target."""
    return name in CASES and CASES[name].change is not Case.change


def with_texts(requests: Sequence[Request], drafter: Proposer) -> list[Request]:
    """The requests, every other one with the texts that the drafter can read besides its prompt: of another request."""
    others = [requests[place - 1].tokens[::-1] for place in range(len(requests))]
    return [replace(one, reference=other, draft_tokens=other if drafter.reads_own_text else ()) if place % 2 else one
            for place, (one, other) in enumerate(zip(requests, others, strict=True))]


def fits(name: str, architecture: str) -> bool:
    """True for a drafter that can be made for an architecture."""
    lacking = OTHER_PROJECTIONS if changes_target(name) else OTHER_NORMS if name.startswith("mtp") else ()
    return architecture not in lacking


@cache
def fitting(name: str) -> tuple[str, ...]:
    """The policies whose trees are no deeper than the drafter reaches."""
    target = target_of("Llama")
    proposer = make(name, verifier(name, target))
    return tuple(policy for policy, growth in POLICIES.items() if _fits(growth, growth.drafter(proposer, target)))


def _fits(growth: Growth, drafter: Proposer) -> bool:
    try:
        growth.policy().check(drafter)
    except UserError:
        return False
    return True


@cache
def takes_recurrent(name: str) -> bool:
    """False for guessers that would need a state of the target's recurrent layers after every token."""
    try:
        make(name, target_of(RECURRENT_TARGETS[0]))
    except UserError:
        return False
    return True


def changed(scores: Scores, log_probs_BFHQ: Tensor) -> Scores:
    """The scores with other log-probabilities, normalised; what had no guess stays so."""
    none_BFH1 = scores.log_probs_BFHQ.amax(-1, keepdim=True) == -torch.inf
    normal_BFHQ = log_probs_BFHQ.log_softmax(-1).masked_fill(none_BFH1, -torch.inf)
    return Scores(log_probs_BFHQ=normal_BFHQ, token_ids_Q=scores.token_ids_Q, candidates_BFHQ=scores.candidates_BFHQ)


class TooSure(Wrapped):
    """The drafter's favourite is LEAD nats ahead of everything else."""

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        scores = self.inner.expand(state, frontier)
        best_BFH1 = scores.log_probs_BFHQ.argmax(-1, keepdim=True)
        lead = torch.full_like(scores.log_probs_BFHQ[..., :1], LEAD)
        return changed(scores, scores.log_probs_BFHQ.scatter_add(-1, best_BFH1, lead))


class Reduced(Wrapped):
    """The drafter proposes every second token of the vocabulary alone; one that names its candidates is left alone."""

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        scores = self.inner.expand(state, frontier)
        if scores.candidates_BFHQ is not None or scores.token_ids_Q is not None:
            return scores
        ids_Q = torch.arange(0, scores.log_probs_BFHQ.shape[-1], 2, device=scores.log_probs_BFHQ.device)
        return changed(Scores(log_probs_BFHQ=scores.log_probs_BFHQ, token_ids_Q=ids_Q),
                       scores.log_probs_BFHQ[..., ids_Q])


@dataclass
class HelpedState(History):
    """The same next to the inner drafter's state."""

    inner: DraftState = field(kw_only=True)

    def clear(self, rows_R: Tensor) -> None:
        super().clear(rows_R)
        self.inner.clear(rows_R)

    def keep(self, rows_R: Tensor) -> None:
        super().keep(rows_R)
        self.inner.keep(rows_R)


class Helped(Wrapped):
    """A drafter that knows the right token at a share of the nodes, so that whole paths are accepted.

    Drafters that name their candidates are left as they are."""

    def __init__(self, inner: Proposer, texts: list[list[int]], share: float = 0.6) -> None:
        super().__init__(inner)
        self.texts, self.share, self.random = texts, share, random.Random(0)

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> DraftState:
        return HelpedState([[] for _ in range(rows)], inner=super().start(rows, capacity, verified))

    def state_of(self, state: DraftState) -> DraftState:
        assert isinstance(state, HelpedState)
        return state.inner

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        assert isinstance(state, HelpedState)
        state.read(rows_R, observation)
        self.inner.observe(state.inner, rows_R, observation)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        assert isinstance(state, HelpedState)
        scores = self.inner.expand(state.inner, frontier)
        if scores.candidates_BFHQ is not None:
            return scores
        log_probs_BFHQ = scores.log_probs_BFHQ.clone()
        batch, _width, depths, entries = log_probs_BFHQ.shape
        ids = range(entries) if scores.token_ids_Q is None else scores.token_ids_Q.tolist()
        entry_of = {token: entry for entry, token in enumerate(ids)}
        above = frontier.parents_BF.tolist()
        for row in range(batch):
            following = self._following(state.rows[row])
            for column, node in enumerate(frontier.nodes_BF[row].tolist()):
                depth = 0 if above[row][column] < 0 else state.depths[row, above[row][column]] + 1
                state.depths[row, node] = depth
                for level, token in enumerate(following[depth : depth + depths]):
                    if token in entry_of and self.random.random() < self.share:
                        log_probs_BFHQ[row, column, level, entry_of[token]] = 6.0
        return changed(scores, log_probs_BFHQ)

    def _following(self, known: list[int]) -> list[int]:
        return next((text[len(known) :] for text in self.texts if text[: len(known)] == known), [])
