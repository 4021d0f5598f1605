"""Input of an evaluation: its settings, the questions, the methods to measure and their acceptance heads."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar

from pydantic import Field

from ...modules import DecodeSettings, Ensemble, Policy, Proposer, SamplingSetting, Union, UserError
from ...modules.baselines.registry import BASELINES, JOINED, NATIVE, PARTNERS, parse_joined
from ...modules.config_checks import MOST_TOKENS, CheckedSettings, Natural, Positive, Rows, RowsOrNone, Share, Whole
from ...modules.policies.registry import FASTEST, NONE, STATIC
from ...modules.verification.acceptance_rules import lossy_rule
from ...modules.verification.sampling import Temperature
from ..artifact import Artifact
from ..measured_files import Prediction

SEED = 0  # Seed of the random streams of the answers, and of the resampling for the intervals
Answered = Sequence[Sequence[int]]  # The target's answers to the turns before, as tokens
COLUMNS = {"reference": {"reference"}, "draft_prompt": {"layer_skip", "first_layers", "whole_target"}}
"""Columns of rows with texts besides the prompt, and the baselines that read them; some artifacts read the second."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(CheckedSettings):
    """Settings of an evaluation."""

    section: ClassVar[str] = "evaluate"

    max_new_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 128
    """Longest answer, in tokens."""
    batch_sizes: Rows | tuple[Rows, ...] = (1,)
    """Rows decoded at once where speed is measured: one number or several, [1,4,8]."""
    temperatures: Temperature | tuple[Temperature, ...] = (0.0,)
    """One number or several, [0,1]. 0 is greedy; above it, identity is checked against this project's plain loop under
    the same random stream."""
    answers: Whole = 1
    """Answers to every prompt, drawn by different random numbers, above temperature 0. Drafters that remember text,
    such as ngrams, draft one with what they remember of the others."""
    top_k: Natural = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: Share = 1.0
    """Sample within this share of the probability."""
    repetition_penalty: Positive = 1.0
    """Divides the logits of tokens that occurred, as in transformers, in greedy answers too; 1 changes nothing."""
    speed_prompts: RowsOrNone = 8
    """Prompts of each set whose decoding is timed (with every method, without drafts and by `generate`); 0 times none.
    The same prompts fill whole batches of every size, so their number is rounded down to a multiple of all batch sizes;
    where fewer are given it is the least such multiple."""
    prompts: tuple[str, ...] | str | None = None
    """Sets in place of the 80 hand-written prompts, one or several: mt_bench, humaneval, gsm8k, math500, spec_bench,
    alpaca, cnn_dailymail, livecodebench, swe_bench, speed_bench, handwritten, or files of prompts, [gsm8k,mine.jsonl].
    """
    prompt_limit: Whole | None = None
    """Draw this many prompts of each of these sets, always the same ones; None takes all."""
    limit: Whole | None = None
    """Use at most this many prompts of each set, spread over it; None uses all."""
    policies: tuple[str, ...] | str = (STATIC,)
    """Policies that artifacts draft with, one or several, each measured in turn: fastest (static or static+lookup, by
    what was predicted at the first temperature), static (the tree tuned on this machine; above temperature 0 none where
    none pays), paid (what pays of that tree, or none, anew before each pass), none, chain, sampled, sampled-chain,
    eagle2, dyspec, beam, stopping, early-exit, sparse, sure, confident, specdec; optionally with a number of nodes or
    tokens (sure and confident: the probability of the whole draft below which it ends; specdec: the risk of a rejection
    at which it ends), [static,chain-3,eagle2-32]; each may be joined with a drafter without training: lookup (prompt
    lookup), suffix, reference (copies from the `reference` of a row, a text that its answer may resemble), recycling,
    ngrams, layer_skip, first_layers, whole_target (for rows with a `draft_prompt`, which drafts read in place of the
    last message), [static+lookup,eagle2-32+recycling-8]."""
    baselines: tuple[str, ...] | str = ()
    """Drafters without training that are measured too, one or several: prompt_lookup, suffix_match, reference,
    recycling, ngrams, layer_skip, first_layers, whole_target, and native_head, which some targets bring along."""
    graphs: bool | None = None
    """Replay whole rounds as CUDA graphs, in plain decoding too; null does so on a CUDA device. The report says what
    could not be."""
    compile: bool = False
    """Compile the layers of target and drafts with torch.compile, in plain decoding too. The first passes take minutes,
    before anything is timed; the report says where it fails."""
    lossy: str = ""
    """Measure a lossy rule in place of exact verification, typical or kl-0.5: the report counts the answers that differ
    from exact ones. Takes temperatures above 0, and drafts. Empty is exact."""
    budget_minutes: Positive | None = None
    """Minutes for the evaluation: prompts that do not fit are left out, the sets decoded in turn and evenly over
    categories, and the report says how many; of each set one is decoded, and timed, in any case. None decodes all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given, least in (
                ("batch_sizes", self.batches, "number, got none"), ("temperatures", self.degrees, "number, got none"),
                ("policies", self.policy_names, "name, such as static"), ("baselines", self.baseline_names, ""),
                ("prompts", self.prompt_names, "" if self.prompts is None else "name, such as mt_bench")):
            if not given and least:
                raise UserError(f"{name} must hold at least one {least}")
            if len(set(given)) < len(given):
                raise UserError(f"{name} must be different from each other, got {', '.join(map(str, given))}; leave "
                                "out those that stand there twice")
        if self.answers > 1 and 0 in self.degrees:
            raise UserError(f"answers {self.answers} to a prompt would all be the same at temperature 0; set "
                            "temperatures above 0, or answers to 1")
        if self.prompt_limit is not None and self.prompts is None:
            raise UserError(f"prompt_limit {self.prompt_limit} draws from the sets that evaluate.prompts names, and it "
                            "names none; name some, or set limit")
        for name in self.policy_names:
            if name != FASTEST:
                parse_joined(name)
        if self.lossy:
            lossy_rule(self.lossy)
            if 0 in self.degrees or NONE in self.policy_names:
                raise UserError(f"evaluate.lossy {self.lossy} accepts more of what was drafted above temperature 0: "
                                "temperature 0 and the policy none are exact; leave these out, or lossy")
        for name in self.baseline_names:
            if name not in (*BASELINES, NATIVE):
                raise UserError(f"there is no baseline {name!r}; choose from {', '.join((*BASELINES, NATIVE))}")

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """The sets in the order given; none for the hand-written prompts alone."""
        return (self.prompts,) if isinstance(self.prompts, str) else self.prompts or ()

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The policies, in the order given."""
        return (self.policies,) if isinstance(self.policies, str) else self.policies

    @property
    def baseline_names(self) -> tuple[str, ...]:
        """The baselines, in the order given."""
        return (self.baselines,) if isinstance(self.baselines, str) else self.baselines

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes, in the order given."""
        return self.batch_sizes if isinstance(self.batch_sizes, tuple) else (self.batch_sizes,)

    @property
    def degrees(self) -> tuple[float, ...]:
        """The temperatures, in the order given."""
        return self.temperatures if isinstance(self.temperatures, tuple) else (self.temperatures,)

    def columns(self, drafters: Iterable[Proposer]) -> set[str]:
        """Names of the COLUMNS that a policy's partner, a baseline, or one of the artifacts' drafters reads."""
        partners = {parse_joined(name).partner for name in self.policy_names if name != FASTEST}
        named = {*self.baseline_names, *(PARTNERS[name] for name in partners if name)}
        return {column for column, readers in COLUMNS.items() if not named.isdisjoint(readers)} | {
            "draft_prompt" for drafter in drafters if drafter.reads_own_text}

    def timed(self, members: int) -> int:
        """Timed prompts of a set with `members` prompts: they fill whole batches of every size; 0 if none can."""
        if self.speed_prompts == 0:
            return 0
        # Every size must divide the number: a batch that is not full would be timed at another size.
        least = math.lcm(*self.batches)
        return min(max(self.speed_prompts, least), members) // least * least

    def sampling(self, temperature: float) -> SamplingSetting:
        """The sampling of the answers at one of the temperatures."""
        return SamplingSetting(temperature=temperature, top_k=self.top_k, top_p=self.top_p,
                               repetition_penalty=self.repetition_penalty)

    def settings(self, batch_size: int, *, exact: bool = True) -> DecodeSettings:
        """The decoding loop's settings for a batch of this many rows; by the lossy rule, if there is one, unless
        `exact`."""
        return DecodeSettings(batch_size=batch_size, top_k=self.top_k, top_p=self.top_p,
                              repetition_penalty=self.repetition_penalty, seed=SEED, graphs=self.graphs,
                              compile=self.compile,
                              lossy=lossy_rule(self.lossy) if self.lossy and not exact else None)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation that is answered turn by turn."""

    prompt: Callable[[Answered], Sequence[int]]
    """Maps the target's answers so far to the tokens of the next turn's prompt, which contains them."""
    turns: int = 1  # Number of answers
    category: str = ""  # Its category; "" for none
    mode: str = ""  # Mode of the chat template, such as thinking; "" for none
    text: str = ""  # Its first turn as it was written, for the report; "" where only the tokens are known
    references: Sequence[Sequence[int]] = ()  # Of each turn a text that the answer may resemble; empty for none
    draft_tokens: Sequence[int] = ()  # What drafts that can read in place of the prompt; empty for the prompt itself

    @classmethod
    def single(cls, tokens: Sequence[int], category: str = "") -> "Question":
        """A question of one turn."""
        return cls(prompt=lambda _: tokens, category=category)


PromptSets = Mapping[str, Sequence[Question]]  # Questions by the name of their set


@dataclass(frozen=True, kw_only=True)
class Method:
    """A drafter and its policy, measured in an evaluation next to others."""

    name: str  # Its name in the report; names must differ
    family: str  # Its family, such as medusa
    drafter: Proposer | None  # The drafter, one for all batch sizes; None decodes with the target alone
    policy_for: Callable[[int, float], Policy | None] = lambda rows, temperature: None
    """Maps the number of rows decoded at once and their temperature to the policy that grows their trees; None for the
    target alone. Batch sizes with the same `shape` have the same policy."""
    prediction: Callable[[int, float], Prediction | None] = lambda rows, temperature: None
    """Prediction on this machine for a number of rows and their temperature; None where nothing was measured."""
    weights_sha256: str = ""  # Hash of the artifact's weights; empty for one that is not trained

    @classmethod
    def of(cls, artifact: Artifact, *, name: str | None = None, policy: str = STATIC,
           temperature: float = 0.0) -> "Method":
        """The method that drafts with an artifact.

        Args:
            name: its name in the report; None takes the family's name.
            policy: name of the policy; `static` takes at each batch size the tree tuned for it, `fastest` is static or
                static+lookup.
            temperature: one at which it will be used; whether the artifact can is tried there.

        Raises:
            UserError: if there is no such policy, or it asks for more than the artifact has."""
        if policy == FASTEST:
            policy = JOINED if artifact.fastest(temperature=temperature) == JOINED else STATIC
        # Made now, so that a policy which the artifact lacks is refused before anything is decoded.
        drafter = artifact.drafting(policy, temperature=temperature).drafter
        family = artifact.drafter.family
        called = name or (family if artifact.adapter is None else f"{family} (changes the target)")
        return cls(name=called if policy == STATIC else f"{called}, {policy}",
                   family=family, drafter=drafter, weights_sha256=artifact.weights_sha256,
                   # One for the same rows: the target keeps what it has recorded of its rounds.
                   policy_for=cache(lambda rows, temperature: artifact.policy(policy, batch_size=rows,
                                                                              temperature=temperature)),
                   prediction=lambda rows, temperature: artifact.prediction(policy, batch_size=rows,
                                                                            temperature=temperature))

    @classmethod
    def each(cls, artifact: Artifact, config: EvaluateConfig, *, name: str | None = None,
             say: Callable[[str], object] = lambda _: None) -> list["Method"]:
        """The methods of an artifact for the policies of an evaluation; `fastest` is measured once with the one that it
        is here, where that is asked for as well. Raises UserError as `of` does."""
        found: dict[str, Method] = {}
        for policy in config.policy_names:
            method = cls.of(artifact, name=name, policy=policy, temperature=config.degrees[0])
            if config.lossy:
                lossy_rule(config.lossy).check(method.policy_for(config.batches[0], config.degrees[0]))
            if method.name in found:
                say(f"of the policies {' and '.join(config.policy_names)}, {FASTEST} is here the same as another one: "
                    f"the two are measured once, as {method.name}")
            found[method.name] = method
        return list(found.values())

    @property
    def parts(self) -> tuple[str, ...]:
        """Families of the drafters that guess together; one where nothing is joined, none without drafts."""
        if isinstance(self.drafter, Ensemble):
            return tuple(part.family for part in self.drafter.parts)
        return () if self.drafter is None else (self.drafter.family,)

    def shape(self, batch_size: int, temperature: float) -> tuple[int, ...]:
        """Most nodes of a row that a pass over so many rows verifies, the root included; then, where drafters guess
        together, those of each part, the trained one last. Equal shapes give equal answers."""
        policy = self.policy_for(batch_size, temperature)
        parts = policy.policies if isinstance(policy, Union) else ()
        return (1 if policy is None else policy.max_size, *(part.max_size for part in parts))

    def shapes(self, batch_sizes: Iterable[int], temperature: float) -> dict[tuple[int, ...], int]:
        """By the shapes that these batch sizes use, each once: the first batch size that uses it."""
        found: dict[tuple[int, ...], int] = {}
        for batch_size in batch_sizes:
            found.setdefault(self.shape(batch_size, temperature), batch_size)
        return found
