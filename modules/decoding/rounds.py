"""One round of decoding: drafting, verification and commit of a batch, as far as the device does it.

A round asks the device for nothing; the host reads the accepted tokens between verification and commit. What it leaves
to the next is written in place (`RowBuffer`, `RowCache`), so that it can be recorded once and replayed.

Shapes: B rows of a round, N nodes of a tree, K nodes of a path, M virtual nodes, S virtual nodes of one node, D hidden
size, X numbers of a row for the host."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import TreeError
from ..interfaces.proposer import AheadStates, DraftState, Observation, Proposer, Verified, started
from ..policies.base import Policy
from ..row_buffers import RowBuffer
from ..target.target_rows import PassOutput
from ..token_tree import TokenTree, Topology, first_rows
from ..verification.acceptance_rules import Accepted
from ..verification.sampling import log_probabilities
from .requests import DecodeSettings
from .verifier import PARENT, BatchVerifier, Rows, Verifier, screen

_ALONE = Topology.chain(0)
MOST_UNREAD = 16  # Passes without drafts that a drafter observes at once


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences that are decoded together: the first rows of everything that is held here."""

    rows: Rows  # Inside the target
    verifier: BatchVerifier  # Their random numbers, penalties, processors and grammars
    roots: RowBuffer  # The newest token of each row, which the target has not read
    live: RowBuffer  # True for rows in use
    drafter: Proposer | None  # Proposes; None decodes plainly
    policy: Policy | None  # Grows the trees; None without a drafter
    state: DraftState | None  # The drafter's state of the rows; None without a drafter
    unread: list[Observation] = field(default_factory=list)  # Passes without drafts that the drafter has yet to observe

    @classmethod
    def made(cls, target: Verifier, settings: DecodeSettings, drafter: Proposer | None, policy: Policy | None, *,
             rows: int, slots: int, places: int, sampled: bool, taps: Sequence[int], prefix: Sequence[int]) -> "Batch":
        """An empty batch: rows of at most `slots` tokens, the largest tree included, with at most `places` answered;
        all of them start with `prefix`."""
        held = target.start(rows, slots, taps, prefix)
        if policy is not None:
            policy.kept([])
        return cls(rows=held, verifier=BatchVerifier(settings, rows, places, target, sampled),
                   roots=RowBuffer(rows, device=target.device, dtype=torch.long),
                   live=RowBuffer(rows, blank=False, device=target.device, dtype=torch.bool), drafter=drafter,
                   policy=policy, state=None if drafter is None else started(drafter, held, rows, slots))

    def open(self, row: int) -> None:
        """Let another sequence start in a row."""
        self.observe_unread()
        self.live.values[row] = True
        if self.policy is not None:
            self.policy.opened(row)

    @property
    def size(self) -> int:
        """Nodes of the next trees, where the policy chooses them."""
        return 0 if self.policy is None else self.policy.size

    def plan(self, rows: int) -> None:
        """Choose what the next pass over the first rows drafts."""
        if self.policy is not None:
            self.policy.plan(rows)

    def observe_unread(self) -> None:
        """Show the drafter what it has yet to observe: of each pass and row one token."""
        if not self.unread or self.drafter is None or self.state is None:
            return
        last, count = self.unread[-1], len(self.unread)
        rows = len(last.counts_B)
        self.drafter.observe(self.state, torch.arange(rows, device=last.counts_B.device), replace(
            last, tokens_BN=torch.cat([one.tokens_BN for one in self.unread], dim=1),
            counts_B=torch.full_like(last.counts_B, count), host_counts=[count] * rows,
            final_BND=torch.cat([one.final_BND for one in self.unread], dim=1),
            taps={layer: torch.cat([one.taps[layer] for one in self.unread], dim=1) for layer in last.taps}))
        self.unread.clear()

    def keep(self, order: list[int]) -> None:
        """Let row r be the former row order[r], which never moves a row back; the rows after these become blank."""
        self.observe_unread()
        if self.policy is not None:
            self.policy.kept(order)
        order_R = torch.tensor(order, dtype=torch.long, device=self.roots.values.device)
        self.rows.keep(order)
        self.roots.keep(order_R)
        self.live.keep(order_R)
        self.verifier.keep(order, order_R)
        if self.state is not None:
            self.state.keep(order_R)


class Round:
    """The work of one round of the batch's first `rows` in four parts, to be run in their order. Some of these rows may
    hold no sequence if it is `padded`, to be replayed for other numbers of rows: what they compute is finite, and
    nothing of it is kept."""

    tree: TokenTree  # The drafted trees
    drafted_faults_B: Tensor  # The fault of each row after drafting
    sent: TokenTree  # The trees with virtual nodes, as the target ran them
    output: PassOutput  # Logits and tapped states of the target's pass
    accepted: Accepted  # The accepted paths
    counts_B: Tensor  # Tokens to commit: of the accepted path, and none in rows without a sequence
    host_BX: Tensor  # Numbers of the round that the host reads; see `read`
    logprobs_BK: Tensor  # If asked for, of the accepted tokens and, after them, of the target's own
    observation: Observation  # The accepted tokens with their states, for the drafter

    def __init__(self, batch: Batch, rows: int, *, padded: bool = False) -> None:
        self.batch, self.rows, self.padded = batch, rows, padded
        self.began = time.perf_counter()
        if not padded:
            batch.plan(rows)
        self.size = batch.size
        # Virtual nodes are a part of passes without drafts, too.
        self.alone = self.size == 1 and batch.drafter is not None and not batch.drafter.virtual_nodes

    def draft(self) -> None:
        """Grow a tree in each row."""
        batch = self.batch
        # A copy: the roots are overwritten before the trees are of no more use.
        roots_B = batch.roots.values[: self.rows].clone()
        self.tree, self.drafted_faults_B = _ALONE.plant(roots_B[:, None]), torch.zeros_like(roots_B)
        self._grow(roots_B)
        self.tree = batch.verifier.constrained(self.tree)
        # What a grammar forces is committed at once.
        self.alone = self.alone and self.tree.size == 1

    def _grow(self, roots_B: Tensor) -> None:
        """Let the policy grow the trees."""
        batch = self.batch
        if batch.drafter is None or batch.policy is None or batch.state is None:
            return
        batch.state.drop_tree()
        if self.alone:
            return
        batch.observe_unread()
        try:
            tree = batch.policy.grow(batch.drafter, batch.state, roots_B, batch.verifier.draws(self.rows))
        except TreeError as error:
            # Which nodes the other rows wanted is lost with the tree: this pass verifies their roots alone.
            failed = torch.tensor(error.rows, device=roots_B.device)
            self.drafted_faults_B = self.drafted_faults_B.index_fill(0, failed, PARENT)
            return
        self.tree, self.drafted_faults_B = screen(tree, batch.verifier.vocab_size)

    def verify(self) -> None:
        """Run the target over the trees, and decide what is accepted."""
        batch, tree = self.batch, self.tree
        self.sent = tree if batch.drafter is None else batch.drafter.extended(batch.state, tree)
        # Nobody needs logits at virtual nodes, and an output layer over a vocabulary is dear.
        places_BN = None
        if self.sent.virtual is not None:
            places_BN = torch.arange(tree.size, device=tree.tokens_BN.device).expand_as(tree.tokens_BN)
        self.output = batch.rows.run(self.sent, select_BM=places_BN)
        self.accepted, faults_B = batch.verifier.verify(
            tree, self.output.logits_BMV, self.drafted_faults_B, any_rows=self.padded)
        self.counts_B = self.accepted.counts_B
        if self.padded:
            self.counts_B = torch.where(batch.live.values[: self.rows], self.counts_B, 0)
        self.host_BX = for_host(tree, self.accepted, faults_B)
        if batch.verifier.settings.logprobs:
            # Of the token that follows each node of the path: the next node's or, after the last one, the bonus.
            path_BK, bonus_B1 = self.accepted.path_BK, self.accepted.bonus_B[:, None]
            following_BK = tree.tokens_BN.gather(1, path_BK).roll(-1, 1)
            following_BK = following_BK.scatter(1, self.accepted.counts_B[:, None] - 1, bonus_B1)
            logits_BKV = self.output.logits_BMV.gather(1, path_BK[..., None].expand(-1, -1, batch.verifier.vocab_size))
            self.logprobs_BK = log_probabilities(logits_BKV, following_BK)

    def commit(self, counts: list[int]) -> None:
        """Keep the accepted paths, counts[r] nodes of row r, in the target's cache; the tokens after them are the next
        roots."""
        self.batch.rows.commit(self.accepted.path_BK, self.counts_B, counts, moved=self.tree.size > 1)
        self.batch.roots.values[: self.rows] = self.accepted.bonus_B

    def observe(self, counts: list[int]) -> None:
        """Show the drafter what was accepted."""
        batch = self.batch
        accepted, answers = replace(self.accepted, counts_B=self.counts_B), None
        if batch.drafter is not None and batch.drafter.reads_logits:
            answers = verified(self.tree, accepted, self.output)
            if self.padded:
                live_B1 = batch.live.values[: self.rows, None]
                answers = replace(answers, real_BM=answers.real_BM & live_B1)
        self.observation = observation(self.sent, accepted, self.output, counts, answers)
        if batch.drafter is not None and batch.state is not None:
            if self.alone and answers is None and not self.padded:
                batch.unread.append(self.observation)
                if len(batch.unread) == MOST_UNREAD:
                    batch.observe_unread()
            else:
                batch.observe_unread()
                rows_R = torch.arange(self.rows, device=self.counts_B.device)
                batch.drafter.observe(batch.state, rows_R, self.observation)
        if batch.policy is not None and not self.padded:
            batch.policy.learn(self.size, counts, time.perf_counter() - self.began)

    def whole(self, drafting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """All parts, as far as the device does them: the host learns no counts. Drafting runs inside `drafting`."""
        unknown = [0] * self.rows
        with drafting():
            self.draft()
        self.verify()
        self.commit(unknown)
        with drafting():
            self.observe(unknown)

    def of_first(self, rows: int) -> tuple[TokenTree, Accepted]:
        """(trees, accepted paths) of the first rows."""
        if rows == self.rows:
            return self.tree, self.accepted
        return self.tree.of_first(rows), first_rows(self.accepted, rows)


def for_host(tree: TokenTree, accepted: Accepted, faults_B: Tensor) -> Tensor:
    """All that the host has to know of a pass, in one tensor [B, 3 + K]: see `read`."""
    path_tokens_BK = tree.tokens_BN.gather(1, accepted.path_BK)
    # Each transfer makes the host wait: this is the only one of a round.
    columns = [accepted.counts_B[:, None], faults_B[:, None], accepted.bonus_B[:, None], path_tokens_BK]
    return torch.cat(columns, dim=1)


def read(numbers: list[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    """(new tokens of each row: accepted nodes below the root and, in sound rows, the bonus; nodes on each path;
    faults) of the numbers that a round has for the host."""
    emitted = [[*row[4 : 3 + row[0]], *([] if row[1] else [row[2]])] for row in numbers]
    return emitted, [row[0] for row in numbers], [row[1] for row in numbers]


def observation(tree: TokenTree, accepted: Accepted, output: PassOutput, counts: list[int],
                answers: Verified | None = None) -> Observation:
    """The drafter's view of a pass of the first rows: tokens and states of the accepted path, and the target's logits
    if it reads them. `tree` has the virtual nodes too; the path is one of no node in rows that hold no sequence, and
    the host knows its `counts`."""
    path_BK = accepted.path_BK
    last_B = path_BK.gather(1, (accepted.counts_B[:, None] - 1).clamp(min=0))[:, 0]

    def along(states_BND: Tensor) -> Tensor:
        return states_BND.gather(1, path_BK[..., None].expand(-1, -1, states_BND.shape[-1]))

    return Observation(tokens_BN=tree.tokens_BN.gather(1, path_BK), counts_B=accepted.counts_B,
                       final_BND=along(output.final_BND),
                       taps={layer: along(states) for layer, states in output.taps.items()}, roots_B=accepted.bonus_B,
                       verified=answers, ahead=ahead_states(tree, output, last_B), host_rows=list(range(len(counts))),
                       host_counts=counts)


def ahead_states(tree: TokenTree, output: PassOutput, nodes_B: Tensor) -> AheadStates | None:
    """The target's states at the virtual nodes after one node of each row; None for a tree without virtual nodes."""
    virtual = tree.virtual
    if virtual is None:
        return None
    slots_S = torch.arange(virtual.slots, device=nodes_B.device)
    ours_BSM = (virtual.slots_BM[:, None] == slots_S[:, None]) & (virtual.anchors_BM == nodes_B[:, None])[:, None]
    final_BMD = output.final_BND[:, -virtual.anchors_BM.shape[1] :]
    places_BS = ours_BSM.long().argmax(-1)
    states_BSD = final_BMD.gather(1, places_BS[..., None].expand(-1, -1, final_BMD.shape[-1]))
    return AheadStates(states_BSD=states_BSD, present_BS=ours_BSM.any(-1))


def verified(tree: TokenTree, accepted: Accepted, output: PassOutput) -> Verified:
    """The target's logits at every node, and the node's place on the accepted path."""
    width = accepted.path_BK.shape[1]
    columns_K = torch.arange(width, device=tree.tokens_BN.device)
    places_BK = torch.where(columns_K < accepted.counts_B[:, None], columns_K, -1)
    # Padding columns of a path hold their own index, which may be a node that is on it: the larger place is right.
    places_BN = torch.full_like(tree.tokens_BN, -1).scatter_reduce(1, accepted.path_BK, places_BK, "amax")
    return Verified(tokens_BM=tree.tokens_BN, real_BM=tree.real_BN, logits_BMV=output.logits_BMV, places_BM=places_BN)
