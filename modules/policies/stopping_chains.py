"""Chains that ask a stopping rule after every drafted token, and the rules.

A rule sees what has been drafted and nothing later. Dropping a sampled token because of its own probability would bias
the output (arXiv:2607.05147); so a rule stops either before a token is drawn, knowing its distribution only, or after
a token that stays in the draft.

Shapes: B rows, F nodes of a level (1), T tokens drafted so far, J of them judged, N nodes, Q draft vocabulary, D width
of the drafter's states."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Proposer
from ..token_tree import Drawn, TokenTree
from ..verification.sampling import Draws, SamplingSetting
from .base import LevelQueries, Policy, check_temperature, sample, tempered


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """The tokens drafted so far. Probabilities are the drafter's own, as it was trained, before any temperature."""

    log_probs_BT: Tensor  # log-probability of each token
    peaks_BT: Tensor  # log-probability of the likeliest token at the same places
    judged_BJ: Tensor | None = None
    """The values of `StoppingRule.judge` at each token that the drafter has read: all but the newest one in `after`,
    all in `before`. None before the first one, and for rules that read no states."""

    @property
    def length(self) -> int:
        """Tokens drafted so far."""
        return self.log_probs_BT.shape[1]


class StoppingRule:
    """Says which rows draft no further. A rule may stop before a token, after it, or both. Raises ValueError for a
    `threshold`, in a rule that has one, that is no probability between 0 and 1."""

    reads_states: bool = False  # True if `judge` is asked
    judges_root: bool = False  # True if `judge` is asked at the root too, from which the first token is guessed

    def __post_init__(self) -> None:
        if not 0 < (found := vars(self).get("threshold", 0.5)) < 1:
            raise ValueError(f"threshold must be above 0 and below 1, got {found}")

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        """A number for each row from the state at the step-th drafted token, [B]: `Drafted.judged_BJ` collects them."""
        raise NotImplementedError(f"{type(self).__name__} reads no states")

    def check_sampling(self, setting: SamplingSetting) -> None:
        """Raise UserError if the rule was made for another sampling of the answers; most serve all."""

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor:
        """Rows that do not draft the next token, whose distribution has the peak `peak_B` (log); no row by default."""
        return torch.zeros_like(peak_B, dtype=torch.bool)

    def after(self, drafted: Drafted) -> Tensor:
        """Rows that keep what they drafted, at least one token, and stop after it; no row by default."""
        return torch.zeros_like(drafted.peaks_BT[:, -1], dtype=torch.bool)


@dataclass(frozen=True)
class _Threshold(StoppingRule):
    """A rule by one probability."""

    threshold: float


class MaxProbability(_Threshold):
    """Draft nothing where the drafter's best guess has less than this probability."""

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor:
        # The peak says nothing of the token that would be drawn, so that samples keep their law.
        return peak_B < log(self.threshold)


class PathProbability(_Threshold):
    """Stop after the token at which the product of the drafted tokens' probabilities falls below this."""

    def after(self, drafted: Drafted) -> Tensor:
        # The token that takes the product below the bound stays: it would be dropped for its own probability.
        return drafted.log_probs_BT.sum(-1) < log(self.threshold)


class EarlyExit(_Threshold):
    """Kangaroo's second exit (arXiv:2404.18911): stop after the first token whose distribution peaks below eta, 0.6 in
    the paper. The token that says so is kept and verified."""

    def after(self, drafted: Drafted) -> Tensor:
        return drafted.peaks_BT[:, -1] < log(self.threshold)


@dataclass(frozen=True)
class RejectionRisk(StoppingRule):
    """SpecDec++ (arXiv:2405.19715): stop once it is likely that a drafted token will be rejected. The risk is 1 -
    prod_j P_j over the tokens j that the drafter has read, P_j the estimated probability that token j is accepted if
    those before it are. The newest token has not been read yet: it stays in the draft, unjudged."""

    log_acceptance: Callable[[Tensor], Tensor]  # log P_j, [B], of states [B, D] at tokens: an acceptance head
    setting: SamplingSetting  # The sampling of answers for which it was calibrated
    threshold: float = 0.7  # Largest risk with which drafting goes on; the paper's h
    least: int = 2  # Tokens that are drafted whatever the risk; the paper's k_min

    reads_states = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        return self.log_acceptance(state_BD)

    def check_sampling(self, setting: SamplingSetting) -> None:
        if setting != self.setting:
            raise UserError(f"this acceptance head was calibrated for {self.setting}, but answers are sampled at "
                            f"{setting}; train a head for that with draftsmith specdec, or choose another policy")

    def after(self, drafted: Drafted) -> Tensor:
        if drafted.length < self.least or drafted.judged_BJ is None:
            return super().after(drafted)
        # 1 - exp(x) loses all digits of a small risk; expm1 keeps them.
        return -torch.expm1(drafted.judged_BJ.sum(-1)) > self.threshold


@dataclass(frozen=True)
class JudgedPath(StoppingRule):
    """Draft nothing where the draft would hardly be accepted with one token more, by the drafter's own judgement of its
    guesses (DSpark, arXiv:2607.05147). Each is made from the slot and the token before the guess: it says nothing of
    which token will be drawn."""

    judgement: Callable[[Tensor, int], Tensor]  # Logit [B] of acceptance of the guess from states [B, D] at a step
    threshold: float  # Probability that the whole draft is accepted, the next token included

    reads_states = True
    judges_root = True

    def judge(self, state_BD: Tensor, step: int) -> Tensor:
        return logsigmoid(self.judgement(state_BD, step).float())

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor:
        if drafted.judged_BJ is None:
            raise ValueError("nothing was judged; the drafter's states at the root come first")
        return drafted.judged_BJ.sum(-1) < log(self.threshold)


class StoppedChain(Policy):
    """A chain of point masses, each the drafter's likeliest, that ends where a rule says so. It serves every family;
    from a one-shot family it saves verification only. After every `check_every` draft steps the host looks at whether
    all rows have stopped, so that neither the drafter nor the target works for nothing. With 0 it never looks: the tree
    keeps its full size, padded, and nothing is read back while drafting. The temperature is that of a draft that
    samples; None takes each row's own. Raises ValueError if a number is too small."""

    def __init__(self, length: int, stop: StoppingRule, *, check_every: int = 1,
                 temperature: float | None = None) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if check_every < 0:
            raise ValueError(f"check_every must be at least 0, got {check_every}")
        check_temperature(temperature)
        self.length, self.stop, self.check_every, self.temperature = length, stop, check_every, temperature
        self.max_size = length + 1

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        # A chain of point masses draws nothing, in rows that sample too.
        draws = draws if self.samples else None
        queries = LevelQueries(drafter, state)
        tokens, reals = [roots_B], [torch.ones_like(roots_B, dtype=torch.bool)]
        log_q: list[Tensor] = []
        candidates: list[Tensor] = []
        empty_BT = torch.zeros(len(roots_B), 0, device=roots_B.device)
        drafted = Drafted(log_probs_BT=empty_BT, peaks_BT=empty_BT)
        for place in range(min(self.length, drafter.reach or self.length)):
            going_B = reals[-1] & ~self.stop.after(drafted) if place else reals[-1]
            if place and self.check_every and place % self.check_every == 0:
                going, needed = torch.stack([going_B.any(), reals[-1].any()]).tolist()
                if not going:
                    kept = len(tokens) if needed else len(tokens) - 1
                    tokens, reals, log_q = tokens[:kept], reals[:kept], log_q[: kept - 1]
                    break
            node_B1 = torch.full_like(roots_B, place)[:, None]
            frontier = Frontier(nodes_BF=node_B1, parents_BF=node_B1 - 1, tokens_BF=tokens[-1][:, None])
            log_probs_BQ = queries.ask(frontier, torch.zeros_like(node_B1) if place else None)[0][:, 0]
            if self.stop.reads_states and (place or self.stop.judges_root):
                if queries.states_BOD is None:
                    raise UserError("an acceptance head reads the drafter's states at its tokens, of which "
                                    f"{type(drafter).__name__} shows none; choose another policy, such as sure, or a "
                                    "drafter that reads each token before it drafts the next")
                judged_B1 = self.stop.judge(queries.states_BOD[:, 0], place)[:, None]
                before = [] if drafted.judged_BJ is None else [drafted.judged_BJ]
                drafted = replace(drafted, judged_BJ=torch.cat([*before, judged_B1], dim=1))
            peak_B = log_probs_BQ.amax(-1)
            if draws is None:
                log_q_BQ, entries_B = log_probs_BQ, log_probs_BQ.argmax(-1)
            else:
                log_q_B1Q = tempered(log_probs_BQ[:, None], self.temperature, draws)
                log_q_BQ, entries_B = log_q_B1Q[:, 0], sample(log_q_B1Q, node_B1, 1, draws)[:, 0, 0]
            own_B = log_probs_BQ.gather(1, entries_B[:, None])[:, 0]
            # A token that was drawn is never dropped for its own probability, only for being none: that keeps the law.
            reals.append(going_B & (own_B > -torch.inf) & ~self.stop.before(drafted, peak_B))
            tokens.append(queries.tokens(entries_B[:, None, None])[:, 0, 0])
            log_q.append(log_q_BQ)
            candidates += [] if queries.candidates_BOQ is None else [queries.candidates_BOQ]
            drafted = replace(drafted, log_probs_BT=torch.cat([drafted.log_probs_BT, own_B[:, None]], dim=1),
                              peaks_BT=torch.cat([drafted.peaks_BT, peak_B[:, None]], dim=1))
        drawn = None
        if draws is not None and log_q:
            # The last node has no child: any q will do for it.
            inner_N = torch.arange(len(tokens), device=roots_B.device).clamp(max=len(log_q) - 1)
            drawn = Drawn(log_q_BIQ=torch.stack(log_q, dim=1), inner_BN=inner_N.expand(len(roots_B), -1),
                          sampled_BN=draws.sampling_B[:, None].expand(-1, len(tokens)), token_ids_Q=queries.token_ids_Q,
                          candidates_BIQ=torch.cat(candidates[: len(log_q)], dim=1) if candidates else None)
        tokens_BN = torch.stack(tokens, dim=1)
        parents_BN = (torch.arange(len(tokens), device=roots_B.device) - 1).expand_as(tokens_BN)
        # A chain's real nodes are the first ones, so that a plain count of them is their depth.
        return TokenTree.grown(tokens_BN, parents_BN, torch.stack(reals, dim=1), max_depth=len(tokens) - 1,
                               most_children=1, drawn=drawn)

    def unwatched(self) -> "StoppedChain":
        chain = copy(self)
        chain.check_every = 0
        return chain

    def check_sampling(self, setting: SamplingSetting) -> None:
        self.stop.check_sampling(setting)


class SampledChain(StoppedChain):
    """A stopped chain of sampled tokens, verified by rejection (arXiv:2211.17192); greedy rows take the likeliest."""

    samples = True
