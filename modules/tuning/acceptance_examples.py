"""Examples for an acceptance head: the drafter's states at drafted tokens, with the probability of their acceptance.

Roll-outs draft real chains while the target answers prompts, and take the acceptance of each token given the drafted
ones before it from the pass that verifies them. So the labels are exact, where SpecDec++'s token mixing
(arXiv:2405.19715, section 3.2) judges one drafted token at a time after the true text.

Shapes: B rows, N nodes of a chain, M = N - 1 drafted tokens, C chains, T tokens of a chain, D width of the
drafter's states, V vocabulary, E examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings, Request
from ..errors import UserError
from ..interfaces.drafter import Drafter
from ..policies.stopping_chains import Drafted, SampledChain, StoppedChain, StoppingRule
from ..target.model import Target
from ..token_tree import TokenTree
from ..verification.acceptance_rules import Accepted, ChainRejection, Chances, Rule, exact_rule
from ..verification.sampling import Sampling, SamplingSetting

CHANCES = ChainRejection()


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Chains that were drafted to their full length, and the acceptance of each token given those before it."""

    states_CTD: Tensor  # The drafter's state at each token, float32
    chances_CT: Tensor
    """min(1, p / q) for a sampled token, p for the likeliest one (greedy: 1 if it is the target's), float32."""

    def examples(self) -> "Examples":
        """All tokens of all chains."""
        return Examples(states_ED=self.states_CTD.flatten(0, 1), chances_E=self.chances_CT.flatten())


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Drafted tokens without their order."""

    states_ED: Tensor  # The drafter's states, float32
    chances_E: Tensor  # Probability of acceptance, float32


class _Recorder(StoppingRule, Rule):
    """A rule that never stops and notes the states, and the exact rule of acceptance that notes the chances.

    Every chain has one token more than is noted: the drafter reads a token only when it drafts the next one.
    """

    reads_states = True

    def __init__(self, length: int) -> None:
        self.length = length
        self.states: list[Tensor] = []
        self.drafted: Drafted | None = None
        self.passes: list[Rollouts] = []

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
            found = Rollouts(states_CTD=torch.stack(self.states, dim=1),
                             chances_CT=CHANCES.chances(tree, logits_BNV, sampling)[:, : self.length].float())
            self.passes.append(Rollouts(**{name: value[whole_B].cpu() for name, value in vars(found).items()}))
        return exact_rule(tree).accept(tree, logits_BNV, sampling, chances)


def chain_for(setting: SamplingSetting, length: int, stop: StoppingRule, *, check_every: int = 1) -> StoppedChain:
    """The chain whose tokens an acceptance head judges: sampled ones where answers are sampled, else the likeliest."""
    kind = SampledChain if setting.temperature > 0 else StoppedChain
    return kind(length, stop, check_every=check_every)


def rollouts(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], setting: SamplingSetting, *, length: int,
    max_new_tokens: int, most: int | None = None, batch_size: int = 8, seed: int = 0,
) -> Rollouts:
    """Chains of `length` tokens after what the target answers to prompts, one for each of its passes.

    Args:
        target: answers and verifies.
        drafter: drafts; bound to the target.
        prompts: token ids.
        setting: the sampling of answers and drafts.
        length: tokens of a chain.
        max_new_tokens: longest answer, in tokens; shorter where the target's context ends.
        most: enough chains; None takes all prompts.
        batch_size: answers written at once.
        seed: of the answers and drafts.

    Raises:
        UserError: if the drafter shows no states, answers fewer depths, or no pass was made.
    """
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
        first, found = first + len(part), sum(len(chains.chances_CT) for chains in recorder.passes)
    if not found:
        raise UserError(f"{len(prompts)} prompts gave no draft of {length} tokens; give more prompts or longer answers")
    return Rollouts(**{name: torch.cat([getattr(chains, name) for chains in recorder.passes])[:most]
                       for name in vars(recorder.passes[0])})
