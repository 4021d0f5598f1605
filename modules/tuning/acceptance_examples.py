"""A drafter's judgement of its guesses: examples for an acceptance head (its states at drafted tokens, with the
probability of their acceptance), and calibration of the chances that a drafter gives its own guesses.

Roll-outs draft real chains while the target answers prompts, and take the acceptance of each token given the drafted
ones before it from the pass that verifies them. So the labels are exact, where SpecDec++'s token mixing
(arXiv:2405.19715, section 3.2) judges one drafted token at a time after the true text.

Shapes: B rows, N nodes of a chain or guesses, C chains or bins of chances, T tokens of a chain, D, X width of the
drafter's states, E examples, P places where a draft starts, K draft steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings, Request
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafter
from ..interfaces.proposer import JudgesGuesses
from ..policies.stopping_chains import Drafted, SampledChain, StoppedChain, StoppingRule
from ..target.model import Target
from ..token_tree import TokenTree
from ..verification.acceptance_rules import Accepted, Chances, Rule, chain_chances, exact_rule
from ..verification.sampling import Sampling, SamplingSetting


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Drafted tokens, chain by chain where they come from roll-outs."""

    states_ED: Tensor  # The drafter's state at each token, float32
    chances_E: Tensor  # min(1, p / q) for a sampled token, p for the likeliest (greedy: 1 if the target's), float32


class _Recorder(StoppingRule, Rule):
    """A rule that never stops and notes the states, and the exact rule of acceptance that notes the chances. Every
    chain has one token more than is noted: the drafter reads a token only when it drafts the next one."""

    reads_states = True

    def __init__(self, length: int) -> None:
        self.length = length
        self.states: list[Tensor] = []
        self.drafted: Drafted | None = None
        self.passes: list[tuple[Tensor, Tensor]] = []  # States [C, T, D] and chances [C, T] of whole chains

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        self.states.append(state_BD.float())
        return state_BD.new_zeros(len(state_BD))

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor:
        # A new chain starts: the last one was judged already, or ended with its answer.
        if drafted.length == 0:
            self.states = []
        self.drafted = drafted
        return super().before(drafted, peak_B)

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        if self.drafted is not None and self.drafted.length == self.length and tree.size == self.length + 2:
            whole_B = tree.real_BN.all(-1)
            chances_BT = chain_chances(tree, logits_BNV, sampling)[:, : self.length].float()
            self.passes.append((torch.stack(self.states, dim=1)[whole_B].cpu(), chances_BT[whole_B].cpu()))
        return exact_rule(tree).accept(tree, logits_BNV, sampling, chances)


def chain_for(setting: SamplingSetting, length: int, stop: StoppingRule, *, check_every: int = 1) -> StoppedChain:
    """The chain whose tokens an acceptance head judges: sampled ones where answers are sampled, else the likeliest."""
    kind = SampledChain if setting.temperature > 0 else StoppedChain
    return kind(length, stop, check_every=check_every)


def rollouts(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], setting: SamplingSetting, *,
             length: int, max_new_tokens: int, most: int | None = None, batch_size: int = 8, seed: int = 0) -> Examples:
    """Chains of `length` drafted tokens after what the target answers to prompts, one for each of its passes, at `most`
    so many, after which no more prompts are answered. Raises UserError if the drafter shows no states, answers fewer
    depths, or no pass was made."""
    if drafter.reach is not None and drafter.reach < length + 1:
        remedy = (f"lower labels.length to {drafter.reach - 1}" if drafter.reach > 1 else
                  "choose an artifact that drafts more tokens")
        raise UserError(f"chains of {length} judged tokens need {length + 1} draft steps, this {drafter.family} "
                        f"drafter has {drafter.reach}; {remedy}")
    recorder, found, first = _Recorder(length), 0, 0
    settings = DecodeSettings(batch_size=batch_size, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p,
                              repetition_penalty=setting.repetition_penalty, seed=seed, lossy=recorder)
    policy = chain_for(setting, length + 1, recorder, check_every=0)
    while first < len(prompts) and (most is None or found < most):
        part = prompts[first : first + batch_size]
        # An answer ends where the target's context does; a prompt that fills it is left out.
        rooms = [min(max_new_tokens, target.context_length - len(tokens)) for tokens in part]
        requests = [Request(tuple(tokens), first + place, room, setting.temperature)
                    for place, (tokens, room) in enumerate(zip(part, rooms, strict=True)) if room > 0]
        decode(target, requests, settings, drafter=drafter, policy=policy)
        first, found = first + len(part), sum(len(chances_CT) for _, chances_CT in recorder.passes)
    if not found:
        raise UserError(f"{len(prompts)} prompts gave no draft of {length} tokens; give more prompts or longer answers")
    states_ED, chances_E = (torch.cat(parts)[:most].flatten(0, 1) for parts in zip(*recorder.passes, strict=True))
    return Examples(states_ED=states_ED, chances_E=chances_E)


BINS = 10  # Equal bins of chances between 0 and 1
TEMPERATURES = tuple(2.0 ** (quarter / 4) for quarter in range(-8, 13))
"""Temperatures among which a drafter's judgement of its guesses is calibrated: from 1/4 to 8."""
_CHUNK = 512  # Positions whose logits are computed at once


@torch.no_grad()
def calibrate_judgement(drafter: Drafter, features: Sequence[Features]) -> Tensor:
    """Give the judgement of each draft step a temperature, [K], so that the product of the judged chances down to it is
    calibrated on held-out greedy answers (sequential temperature scaling, arXiv:2607.05147): those before it are fixed.
    Raises ValueError for a drafter that does not judge its guesses."""
    if not (isinstance(drafter, JudgesGuesses) and drafter.judges):
        raise ValueError("this drafter does not judge its guesses")
    drafter.judge_temperatures_K.fill_(1.0)
    found: list[list[Tensor]] = [[] for _ in drafter.judge_temperatures_K]
    for batch in features:
        drafts = drafter(batch)
        # Guesses after a wrong one, or beyond the answer, are not verified; a block starts with a token of the answer.
        reached_BL = batch.labels(1)[1]
        for step, offset in enumerate(drafts.offsets):
            labels_BL, there_BL = batch.labels(offset)
            reached_BL = reached_BL & there_BL
            rights, logits = [], []
            for states_NX in torch.split(drafts.hidden_BLKD[:, :, step].flatten(0, 1), _CHUNK):
                guesses_N = drafter.project(states_NX, step).argmax(-1)
                rights.append(guesses_N if drafter.token_ids_Q is None else drafter.token_ids_Q[guesses_N])
                logits.append(drafter.judge(states_NX, step))
            right_BL = (torch.cat(rights) == labels_BL.flatten()).view_as(there_BL)
            found[step].append(torch.stack([torch.cat(logits).double(), right_BL.flatten().double(),
                                            reached_BL.flatten().double()]))
    before_P, right_P, chosen = torch.zeros(1), torch.ones(1), []
    for parts in found:
        logits_P, rights_P, reached_P = torch.cat(parts, dim=1).cpu()
        right_P, best = right_P * rights_P, (torch.inf, 1.0, before_P)
        for temperature in TEMPERATURES:
            log_chance_P = before_P + logsigmoid(logits_P / temperature)
            # Distance of a bin's mean chance from its share of right guesses, by guesses (arXiv:1706.04599, eq. 3).
            chances_N = log_chance_P[reached_P > 0].double().exp().clamp(max=1)
            bins_N, right_N = (chances_N * BINS).long().clamp(max=BINS - 1), right_P[reached_P > 0].double()
            gaps_C = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins_N, chances_N - right_N)
            error = float(gaps_C.abs().sum()) / max(1, len(right_N))
            # Of equal errors the one nearest to no change.
            best = min(best, (error, temperature, log_chance_P), key=lambda one: (one[0], abs(log(one[1]))))
        chosen.append(best[1])
        before_P = best[2]
    chosen_K = torch.tensor(chosen).to(drafter.judge_temperatures_K)
    drafter.judge_temperatures_K.copy_(chosen_K)
    return chosen_K
