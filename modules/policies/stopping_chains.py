"""Chains that ask a stopping rule after every drafted token.

Shapes: B rows, F nodes of a level (1), T tokens drafted so far, N nodes, Q draft vocabulary.
"""

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import DraftState, Frontier, Proposer
from ..random_streams import Draws
from ..token_tree import Drawn, TokenTree
from ..verification.sampling import SamplingSetting
from .base import Policy
from .level_queries import LevelQueries, check_temperature, sample, tempered, within_reach
from .stopping_rules import Drafted, StoppingRule


class StoppedChain(Policy):
    """A chain of point masses, each the drafter's likeliest, that ends where a rule says so.

    It serves every family; from a one-shot family it saves verification only.

    Args:
        length: most tokens.
        stop: the rule.
        check_every: draft steps between two looks, from the host, at whether all rows have stopped, so that neither
            the drafter nor the target works for nothing. 0 never looks: the tree keeps its full size, padded, and
            nothing is read back while drafting.

    Raises:
        ValueError: if a number is too small.
    """

    temperature: float | None = None
    """The draft's, in a chain that samples; None takes each row's own."""

    def __init__(self, length: int, stop: StoppingRule, *, check_every: int = 1) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if check_every < 0:
            raise ValueError(f"check_every must be at least 0, got {check_every}")
        self.length, self.stop, self.check_every = length, stop, check_every
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
        for place in range(within_reach(self.length, drafter)):
            going_B = reals[-1] & ~_rows(self.stop.after(drafted) if place else None, roots_B)
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
                drafted = self._judged(drafted, queries, place)
            peak_B = log_probs_BQ.amax(-1)
            if draws is None:
                log_q_BQ, entries_B = log_probs_BQ, log_probs_BQ.argmax(-1)
            else:
                log_q_B1Q = tempered(log_probs_BQ[:, None], self.temperature, draws)
                log_q_BQ, entries_B = log_q_B1Q[:, 0], sample(log_q_B1Q, node_B1, 1, draws)[:, 0, 0]
            own_B = log_probs_BQ.gather(1, entries_B[:, None])[:, 0]
            # A token that was drawn is never dropped for its own probability, only for being none: that keeps the law.
            reals.append(going_B & (own_B > -torch.inf) & ~_rows(self.stop.before(drafted, peak_B), roots_B))
            tokens.append(queries.tokens(entries_B[:, None, None])[:, 0, 0])
            log_q.append(log_q_BQ)
            candidates += [] if queries.candidates_BOQ is None else [queries.candidates_BOQ]
            drafted = replace(
                drafted,
                log_probs_BT=torch.cat([drafted.log_probs_BT, own_B[:, None]], dim=1),
                peaks_BT=torch.cat([drafted.peaks_BT, peak_B[:, None]], dim=1),
            )
        drawn = None
        if draws is not None and log_q:
            # The last node has no child: any q will do for it.
            inner_N = torch.arange(len(tokens), device=roots_B.device).clamp(max=len(log_q) - 1)
            drawn = Drawn(
                log_q_BIQ=torch.stack(log_q, dim=1), inner_BN=inner_N.expand(len(roots_B), -1),
                sampled_BN=draws.sampling_B[:, None].expand(-1, len(tokens)), token_ids_Q=queries.token_ids_Q,
                candidates_BIQ=torch.cat(candidates[: len(log_q)], dim=1) if candidates else None)
        tokens_BN = torch.stack(tokens, dim=1)
        parents_BN = (torch.arange(len(tokens), device=roots_B.device) - 1).expand_as(tokens_BN)
        # A chain's real nodes are the first ones, so that a plain count of them is their depth.
        return TokenTree.grown(tokens_BN, parents_BN, torch.stack(reals, dim=1), max_depth=len(tokens) - 1,
                               most_children=1, drawn=drawn)

    def unwatched(self) -> "StoppedChain":
        """The chain without looks: its tree keeps its full size, padded."""
        chain = copy(self)
        chain.check_every = 0
        return chain

    def check_sampling(self, setting: SamplingSetting) -> None:
        self.stop.check_sampling(setting)

    def _judged(self, drafted: Drafted, queries: LevelQueries, step: int) -> Drafted:
        """The draft with the rule's judgement of the token that was read last."""
        if queries.states_BOD is None:
            raise UserError("an acceptance head reads the drafter's states at its tokens, of which "
                            f"{type(queries.drafter).__name__} shows none; choose another policy, such as sure, or a "
                            "drafter that reads each token before it drafts the next")
        judged_B1 = self.stop.judge(queries.states_BOD[:, 0], step)[:, None]
        before = [] if drafted.judged_BJ is None else [drafted.judged_BJ]
        return replace(drafted, judged_BJ=torch.cat([*before, judged_B1], dim=1))


class SampledChain(StoppedChain):
    """A stopped chain of sampled tokens, verified by rejection (arXiv:2211.17192); greedy rows take the likeliest.

    Args:
        length: most tokens.
        stop: the rule.
        check_every: as in `StoppedChain`.
        temperature: the draft's; None takes each row's own.

    Raises:
        ValueError: if a number is too small.
    """

    samples = True

    def __init__(
        self, length: int, stop: StoppingRule, *, check_every: int = 1, temperature: float | None = None
    ) -> None:
        super().__init__(length, stop, check_every=check_every)
        check_temperature(temperature)
        self.temperature = temperature


def _rows(marks_B: Tensor | None, like_B: Tensor) -> Tensor:
    return torch.zeros_like(like_B, dtype=torch.bool) if marks_B is None else marks_B
