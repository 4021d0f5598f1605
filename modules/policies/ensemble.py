"""Several drafters, one tree: each proposes its own, equal guesses are merged, and all share one budget of nodes.

Joined, two trees below the same roots have every path of both, no path twice, and sampled nodes that stay sampled.

Shapes: B rows, N nodes of a tree, M nodes of the tree that joins it, S = N + M nodes of both, I distributions that the
joining tree was drawn from, Q entries of the draft vocabulary."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from ..interfaces.proposer import (
    DraftState,
    Frontier,
    Observation,
    Proposer,
    Scores,
    SharesTargetRows,
    VerifiedRows,
    spread,
    started,
)
from ..target.devices.compiled_layers import Compiler
from ..token_tree import Drawn, Lookahead, TokenTree
from ..verification.sampling import Draws, SamplingSetting
from .base import Policy, trimmed


@dataclass
class EnsembleState(DraftState):
    """One state for each part."""

    parts: list[DraftState]

    def __post_init__(self) -> None:
        self.held, self.caches = self.parts, [cache for part in self.parts for cache in part.caches]

    def drop_tree(self) -> None:
        for part in self.parts:
            part.drop_tree()

    def expect(self, path: int, skipped: bool) -> None:
        for part in self.parts:
            part.expect(path, skipped)

    def advance(self, counts: Sequence[int]) -> None:
        for part in self.parts:
            part.advance(counts)


class Ensemble(Proposer[EnsembleState], SharesTargetRows):
    """At least one drafter, which all look at the same passes; `Union` grows a tree for each and joins them."""

    family = "ensemble"

    def __init__(self, parts: Sequence[Proposer]) -> None:
        if not parts:
            raise ValueError("an ensemble needs at least 1 drafter, got 0")
        self.parts = tuple(parts)
        self.taps = tuple(sorted({layer for part in parts for layer in part.taps}))
        self.reads_logits = any(part.reads_logits for part in parts)
        # Of the parts one may have any: no tree takes the virtual nodes of two.
        self.virtual_nodes = sum(part.virtual_nodes for part in parts)
        self.reads_references = any(part.reads_references for part in parts)
        self.reads_own_text = any(part.reads_own_text for part in parts)

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> EnsembleState:
        """Empty states; the last part may run the target's first layers in the rows that are verified."""
        *others, last = self.parts
        # Of the first layers only the last output is kept, which is no use to a part that taps another one.
        shared = None if any(part.taps for part in others) else verified
        return EnsembleState([*(part.start(rows, capacity) for part in others),
                              started(last, shared, rows, capacity)])

    def open(self, state: EnsembleState, row_R: Tensor, *, reference: Sequence[int], own_text: Sequence[int]) -> None:
        for part, held in zip(self.parts, state.parts, strict=True):
            part.open(held, row_R, reference=reference, own_text=own_text)

    def extended(self, state: EnsembleState, tree: TokenTree) -> TokenTree:
        for part, held in zip(self.parts, state.parts, strict=True):
            tree = part.extended(held, tree)
        return tree

    def observe(self, state: EnsembleState, rows_R: Tensor, observation: Observation) -> None:
        for part, held in zip(self.parts, state.parts, strict=True):
            part.observe(held, rows_R, observation)

    def expand(self, state: EnsembleState, frontier: Frontier) -> Scores:
        """Refused with a ValueError: a node belongs to one part, which expands it."""
        raise ValueError("the parts of an ensemble are expanded one by one; give it the policy Union")

    @contextmanager
    def compiled(self, compiler: Compiler) -> Iterator[None]:
        with ExitStack() as blocks:
            for part in self.parts:
                blocks.enter_context(part.compiled(compiler))
            yield

    def forget(self) -> None:
        for part in self.parts:
            part.forget()


class Union(Policy):
    """Grows one tree for each part of an `Ensemble` and joins them, the first part's nodes before the next one's. The
    budget is shared: what one part leaves, because it has no guess or because another part has guessed the same, the
    next one uses. So the parts that may have nothing to say come first, and the last part's nodes should be in
    best-first order, as those of a searched tree are: it is cut where the budget ends, at `size` nodes, the root
    included. Only the last part samples; of a part that does, no node is cut, since what is cut would depend on what
    was drawn: ValueError if there is no room for all nodes of all parts then, or for no policy or a size below 1."""

    def __init__(self, policies: Sequence[Policy], size: int) -> None:
        if not policies or size < 1:
            raise ValueError(f"a union needs at least 1 policy and size 1, got {len(policies)} and size {size}")
        whole = whole_size(policies)
        if policies[-1].samples and size < whole:
            raise ValueError(f"a union whose last part samples needs room for all {whole} nodes, got size {size}")
        self.policies, self.max_size, self.samples = tuple(policies), size, policies[-1].samples

    def check(self, drafter: Proposer) -> None:
        for policy, part in zip(self.policies, self._parts(drafter), strict=True):
            policy.check(part)

    def check_sampling(self, setting: SamplingSetting) -> None:
        for policy in self.policies:
            policy.check_sampling(setting)

    def unwatched(self) -> "Union":
        return Union([policy.unwatched() for policy in self.policies], self.max_size)

    def _parts(self, drafter: Proposer) -> Sequence[Proposer]:
        if not isinstance(drafter, Ensemble) or len(drafter.parts) != len(self.policies):
            raise UserError(
                f"this union joins an Ensemble of {len(self.policies)} drafters, got {drafter.family}; give as many "
                "drafters as policies")
        return drafter.parts

    def grow(self, drafter: Proposer, state: DraftState, roots_B: Tensor, draws: Draws | None = None) -> TokenTree:
        parts = self._parts(drafter)
        held = state.parts if isinstance(state, EnsembleState) else []
        # Others than the last part get no random numbers: a merged sample would no longer be one.
        chances = [*([None] * (len(parts) - 1)), draws]
        trees = []
        for number, (policy, part, own, chance) in enumerate(zip(self.policies, parts, held, chances, strict=True)):
            tree = policy.grow(part, own, roots_B, chance)
            # Each node says which part it comes from: an evaluation counts the accepted guesses of each.
            trees.append(replace(tree, parts_BN=torch.full_like(tree.tokens_BN, number)))
        tree = trees[0]
        for joining in trees[1:]:
            tree = joined(tree, joining)
        # Duplicates have become padding, which packing moves to the end, where the budget cuts.
        return trimmed(tree.packed(min(self.max_size, tree.size)))


def whole_size(policies: Sequence[Policy]) -> int:
    """Nodes of a union in which nothing is cut, the root included."""
    return 1 + sum(policy.max_size - 1 for policy in policies)


def joined(tree: TokenTree, joining: TokenTree) -> TokenTree:
    """All paths of a tree of point masses and of one that may have sampled nodes, the second one's new nodes after the
    first one's; duplicates become padding. Raises ValueError if either has virtual nodes, which belong to one drafter's
    layout of the pass, or the first one has sampled nodes."""
    if tree.virtual is not None or joining.virtual is not None:
        raise ValueError("trees with virtual nodes cannot be joined")
    if tree.drawn is not None:
        raise ValueError("sampled nodes may stand in the joining tree only: what comes first is a point mass")
    equal_BMN = joining.equal_paths(tree)
    known_BM = equal_BMN.any(-1)
    own_M = torch.arange(joining.size, device=known_BM.device) + tree.size
    places_BM = torch.where(known_BM, equal_BMN.long().argmax(-1), own_M)
    parents_BM = places_BM.gather(1, joining.parents_BN.clamp(min=0))
    parts_BS = None
    if tree.parts_BN is not None and joining.parts_BN is not None:
        parts_BS = torch.cat([tree.parts_BN, joining.parts_BN], dim=1)
    counted = tree.most_children is not None and joining.most_children is not None
    # Ancestors: the tree's own, and the joining one's at the places of their paths.
    size = tree.size + joining.size
    there_BMS = places_BM[..., None] == torch.arange(size, device=places_BM.device)
    new_BMS = (joining.ancestors_BNN.float() @ there_BMS.float()) > 0
    # A path that is already known has its nodes elsewhere; its padding here sees itself, as every node does.
    new_BMS[:, torch.arange(joining.size, device=own_M.device), own_M] = True
    return TokenTree(tokens_BN=torch.cat([tree.tokens_BN, joining.tokens_BN], dim=1),
                     parents_BN=torch.cat([tree.parents_BN, parents_BM], dim=1),
                     depths_BN=torch.cat([tree.depths_BN, joining.depths_BN], dim=1),
                     ancestors_BNN=torch.cat([pad(tree.ancestors_BNN, (0, joining.size)), new_BMS], dim=1),
                     real_BN=torch.cat([tree.real_BN, joining.real_BN & ~known_BM], dim=1),
                     max_depth=max(tree.max_depth, joining.max_depth),
                     drawn=None if joining.drawn is None else _drawn(tree, joining.drawn, equal_BMN),
                     most_children=(tree.most_children or 0) + (joining.most_children or 0) if counted else None,
                     lookahead=_lookahead(tree, joining, equal_BMN), parts_BN=parts_BS)


def _lookahead(tree: TokenTree, joining: TokenTree, equal_BMN: Tensor) -> Lookahead | None:
    """The virtual nodes that either tree wants after its nodes: a tree that says nothing wants none next to one that
    does. None where both leave their number to the drafter."""
    wishes = [wish for wish in (tree.lookahead, joining.lookahead) if wish is not None]
    if not wishes:
        return None
    first_BN = torch.zeros_like(tree.tokens_BN) if tree.lookahead is None else tree.lookahead.counts_BN
    second_BM = torch.zeros_like(joining.tokens_BN) if joining.lookahead is None else joining.lookahead.counts_BN
    shared_BN = second_BM.gather(1, equal_BMN.long().argmax(1)) * equal_BMN.any(1)
    return Lookahead(counts_BN=torch.cat([torch.maximum(first_BN, shared_BN), second_BM * ~equal_BMN.any(-1)], dim=1),
                     most=sum(wish.most for wish in wishes), nodes=sum(wish.nodes for wish in wishes))


def _drawn(tree: TokenTree, drawn: Drawn, equal_BMN: Tensor) -> Drawn:
    """Draws of the joined tree. A node that both trees have is a point mass, which comes before the sampled children of
    its parent. What is left of those was drawn from q without the point masses: leaving tokens out of draws without
    replacement leaves draws from the rest, in the same order. So the nodes of the first tree get a q of their own, in
    which their children have no chance; the sampled children of the second tree's new nodes keep theirs."""
    merged_BN = equal_BMN.long().argmax(1)
    inner_BN = drawn.inner_BN.gather(1, merged_BN)
    without = _without_children(tree, drawn.at(merged_BN))
    first_BN = torch.arange(tree.size, device=inner_BN.device).expand_as(inner_BN) + drawn.log_q_BIQ.shape[1]
    candidates_BIQ = drawn.candidates_BIQ
    if candidates_BIQ is not None:
        candidates_BIQ = torch.cat([candidates_BIQ, spread(candidates_BIQ, inner_BN)], dim=1)
    return replace(drawn, log_q_BIQ=torch.cat([drawn.log_q_BIQ, without], dim=1),
                   inner_BN=torch.cat([first_BN, drawn.inner_BN], dim=1),
                   sampled_BN=pad(drawn.sampled_BN, (tree.size, 0)), candidates_BIQ=candidates_BIQ)


def _without_children(tree: TokenTree, drawn: Drawn) -> Tensor:
    """log q at each node of a tree with its children taken out, [B, N, Q]; nothing is renormalised."""
    log_q_BNQ = spread(drawn.log_q_BIQ, drawn.inner_BN)
    device = log_q_BNQ.device
    rows_B, entries_Q = (torch.arange(size, device=device) for size in (len(log_q_BNQ), log_q_BNQ.shape[-1]))
    ids_Q = entries_Q if drawn.token_ids_Q is None else drawn.token_ids_Q
    for child in range(1, tree.size):
        parent_B = tree.parents_BN[:, child].clamp(min=0)
        ids_BQ = ids_Q[None]
        if drawn.candidates_BIQ is not None:
            ids_BQ = drawn.candidates_BIQ[rows_B, drawn.inner_BN[rows_B, parent_B]]
        taken_BQ = (ids_BQ == tree.tokens_BN[:, child, None]) & tree.real_BN[:, child, None]
        log_q_BNQ[rows_B, parent_B] = log_q_BNQ[rows_B, parent_B].masked_fill(taken_BQ, -torch.inf)
    return log_q_BNQ
