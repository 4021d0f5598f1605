"""Examples for an acceptance head: the drafter's states at drafted tokens, with the probability of their acceptance.

Two ways to make them. Roll-outs draft real chains while the target answers prompts, and take the acceptance of each
token given the drafted ones before it from the pass that verifies them: the labels are exact. Token mixing is the way
of SpecDec++ (arXiv:2405.19715, section 3.2): one draft token at every place of a given text, judged there.

Shapes: B rows, N nodes of a chain, M = N - 1 drafted tokens, L positions, C chains, T tokens of a chain, D width of the
drafter's states, V vocabulary, Q draft vocabulary, E examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..decoding.answers import decode
from ..decoding.requests import DecodeSettings, Request
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafter
from ..policies.stopping_chains import SampledChain, StoppedChain
from ..policies.stopping_rules import Drafted, StoppingRule
from ..target.model import Target
from ..token_tree import TokenTree
from ..verification.acceptance_rules import ChainRejection, Chances, Rule, exact_rule
from ..verification.sampling import Sampling, SamplingSetting, probabilities
from ..verification.tree_walk import Accepted

CHANCES = ChainRejection()


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Chains that were drafted to their full length, and the acceptance of each token given those before it."""

    states_CTD: Tensor
    """The drafter's state at each token, float32."""
    chances_CT: Tensor
    """min(1, p / q) for a sampled token, p for the likeliest one (greedy: 1 if it is the target's), float32."""
    log_probs_CT: Tensor
    """The drafter's own log-probability of each token, before any temperature."""
    peaks_CT: Tensor
    """The same of the likeliest token at the same place."""

    def examples(self) -> "Examples":
        """All tokens of all chains."""
        return Examples(states_ED=self.states_CTD.flatten(0, 1), chances_E=self.chances_CT.flatten())

    def split(self, held_out: float) -> tuple["Rollouts", "Rollouts"]:
        """(first chains, the last share of them); chains of one answer are next to each other."""
        first = len(self.chances_CT) - max(1, round(held_out * len(self.chances_CT)))
        parts = [{name: value[place] for name, value in vars(self).items()}
                 for place in (slice(None, first), slice(first, None))]
        return Rollouts(**parts[0]), Rollouts(**parts[1])


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Drafted tokens without their order."""

    states_ED: Tensor
    """The drafter's states, float32."""
    chances_E: Tensor
    """Probability of acceptance, float32."""

    @classmethod
    def joined(cls, parts: Sequence["Examples"]) -> "Examples":
        """The examples of several batches."""
        return cls(states_ED=torch.cat([part.states_ED for part in parts]),
                   chances_E=torch.cat([part.chances_E for part in parts]))


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

    def judge(self, state_BD: Tensor) -> Tensor:
        self.states.append(state_BD.float())
        return state_BD.new_zeros(len(state_BD))

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor | None:
        # A new chain starts: the last one was judged already, or ended with its answer.
        if drafted.length == 0:
            self.states = []
        self.drafted = drafted
        return None

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        if self.drafted is not None and self.drafted.length == self.length and tree.size == self.length + 2:
            whole_B = tree.real_BN.all(-1)
            found = Rollouts(
                states_CTD=torch.stack(self.states, dim=1),
                chances_CT=CHANCES.chances(tree, logits_BNV, sampling)[:, : self.length].float(),
                log_probs_CT=self.drafted.log_probs_BT, peaks_CT=self.drafted.peaks_BT,
            )
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


@torch.no_grad()
def mixed_examples(
    target: Target, drafter: Drafter, features: Features, setting: SamplingSetting, *, share: float,
    generator: torch.Generator,
) -> Examples:
    """Examples of SpecDec++'s token mixing along given answers (arXiv:2405.19715, section 3.2).

    At each supervised place i one token Y_i is drafted after the true text X_<i, accepted with probability
    min(1, p(Y_i) / q(Y_i)). The text Z takes X_i with probability `share`, else Y_i; the drafter reads Z, and its state
    at Z_i is an example wherever Z_i = Y_i. The state has thus read a mixed text, while the label is that of the true
    one: the paper's approximation.

    Args:
        target: the teacher model.
        drafter: bound to it, in evaluation mode.
        features: rows of tokens on the target's device.
        setting: the sampling of drafts and answers; repetition penalties are not applied.
        share: probability of the true token.
        generator: random numbers on the CPU.
    """
    known, step = target.encode(features, drafter.taps), drafter.unrolls or 0
    drafts = drafter(known)
    offset = drafts.offsets[step]
    tokens_BL, drafted_BL = features.tokens_BL, features.tokens_BL.clone()
    chances_BL = torch.zeros(tokens_BL.shape, device=tokens_BL.device)
    logits_BLQ = drafter.project(drafts.hidden_BLKD[:, :, step], step).float()
    log_q_BLQ = (logits_BLQ / (setting.temperature or 1.0)).log_softmax(-1)[:, : tokens_BL.shape[1] - offset]
    entries = log_q_BLQ.argmax(-1)
    if setting.temperature > 0:
        # The largest sum with Gumbel noise is a draw from the distribution.
        noise_BLQ = -torch.empty(log_q_BLQ.shape).exponential_(generator=generator).log()
        entries = (log_q_BLQ + noise_BLQ.to(log_q_BLQ.device)).argmax(-1)
    ids_Q = drafter.token_ids_Q
    drafted_BL[:, offset:] = entries if ids_Q is None else ids_Q[entries]
    p_BL = _target_chances(target, known, drafted_BL, setting)
    q_BL = log_q_BLQ.gather(2, entries[..., None])[..., 0].exp() if setting.temperature > 0 else torch.ones_like(
        entries, dtype=torch.float32)
    chances_BL[:, offset:] = (p_BL[:, offset:] / q_BL).clamp(max=1)
    usable_BL = features.supervised_BL.clone()
    usable_BL[:, :offset] = False
    # The text before a place must be of the same conversation, as far as the draft step reads back.
    usable_BL[:, offset:] &= features.segments_BL[:, offset:] == features.segments_BL[:, :-offset]
    # On the CPU, so that a seed gives the same text on every device.
    true_BL = (torch.rand(tokens_BL.shape, generator=generator) < share).to(tokens_BL.device)
    mixed_BL = torch.where(usable_BL & ~true_BL, drafted_BL, tokens_BL)
    states_BLD = _states_at_tokens(target, drafter, features, mixed_BL, step)
    chosen_BL = usable_BL & (mixed_BL == drafted_BL)
    return Examples(states_ED=states_BLD[chosen_BL].float().cpu(), chances_E=chances_BL[chosen_BL].float().cpu())


def _target_chances(target: Target, known: Features, drafted_BL: Tensor, setting: SamplingSetting) -> Tensor:
    """p of each drafted token after the true text before it, [B, L]; 0 at the first position."""
    logits_BLV = target.logits(known.final()[:, :-1])
    if setting.temperature == 0:
        p_BL = (logits_BLV.argmax(-1) == drafted_BL[:, 1:]).float()
    else:
        temperature = torch.tensor(setting.temperature, device=logits_BLV.device)
        p_BLV = probabilities(logits_BLV, temperature, setting.top_k, setting.top_p, setting.min_p)
        p_BL = p_BLV.gather(2, drafted_BL[:, 1:, None])[..., 0].float()
    return functional.pad(p_BL, (1, 0))


def _states_at_tokens(
    target: Target, drafter: Drafter, features: Features, tokens_BL: Tensor, step: int
) -> Tensor:
    """The drafter's state at each token of another text, drafted after the text before it, [B, L, D]; any at the first
    ones.

    It is the state that predicts the token after the drafted one. Where draft steps feed each other that is the next
    step's: the target's state of the token before the drafted one is not known yet. A state that predicts `offset`
    tokens ahead has read `offset - 1` tokens more than its position says.
    """
    read = Features(tokens_BL=tokens_BL, supervised_BL=features.supervised_BL, segments_BL=features.segments_BL,
                    positions_BL=features.positions_BL)
    drafts = drafter(target.encode(read, drafter.taps) if drafter.reads_states else read)
    following = drafts.offsets[step] + 1
    after = drafts.offsets.index(following) if following in drafts.offsets else step
    later, states_BLD = drafts.offsets[after] - 1, drafts.hidden_BLKD[:, :, after]
    return functional.pad(states_BLD[:, : states_BLD.shape[1] - later], (0, 0, later, 0))
