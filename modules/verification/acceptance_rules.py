"""Rules of acceptance: which drafted tokens are kept, under one interface. Exact ones emit the target's distribution:
equality for point masses (the default), rejection for tokens that were sampled from a q that the tree carries.

Verification by equality: the target chooses a token at every node, greedily or by sampling from its own distribution,
and the walk from the root goes down as long as a child holds the chosen token. For proposals that are point masses
this is the acceptance rule with probability p(x) and the residual with p(x) set to zero, in one step.

Shapes: B rows, N nodes, K children of one node or nodes of the longest path, V target vocabulary. p is the target's
processed distribution, q the draft's."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..token_tree import TokenTree
from .sampling import Sampling, choose, choose_at, draw, node_groups


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The accepted path of each row, from the root down, and the token the target adds to it."""

    path_BK: Tensor  # Ascending node indices; beyond `counts_B` a column holds its own index, and moves nothing
    counts_B: Tensor  # Nodes on the path, the root included: tokens that enter the cache
    bonus_B: Tensor  # The target's choice at the last accepted node: the next root


def follow(tree: TokenTree, choices_BN: Tensor) -> Accepted:
    """Walk from the root along the target's choices as far as the tree goes. A node is accepted when it and all its
    ancestors hold what the target chose at their parents. Computed for all nodes at once; of equal paths (duplicate
    siblings) any one is taken."""
    if tree.size == 1:
        # Plain decoding: there is nothing to walk.
        return Accepted(path_BK=torch.zeros_like(choices_BN), counts_B=torch.ones_like(choices_BN[:, 0]),
                        bonus_B=choices_BN[:, 0])
    columns_N = torch.arange(tree.size, device=choices_BN.device)
    wanted_BN = choices_BN.gather(1, tree.parents_BN.clamp(min=0))
    matched_BN = (tree.real_BN & (wanted_BN == tree.tokens_BN)) | (columns_N == 0)
    accepted_BN = ~(tree.ancestors_BNN & ~matched_BN[:, None, :]).any(-1)
    deepest_B = torch.where(accepted_BN, tree.depths_BN, -1).argmax(-1)
    return down_to(tree, deepest_B, choices_BN.gather(1, deepest_B[:, None])[:, 0])


def down_to(tree: TokenTree, deepest_B: Tensor, bonus_B: Tensor) -> Accepted:
    """The path from the root to one node a row."""
    columns_N = torch.arange(tree.size, device=deepest_B.device)
    on_path_BN = tree.ancestors_BNN.gather(1, deepest_B[:, None, None].expand(-1, 1, tree.size))[:, 0]
    # Nodes on the path come first, in their order: all others are sorted after them.
    ordered_BN = torch.where(on_path_BN, columns_N, columns_N + tree.size).sort(-1).values
    width = min(tree.max_depth + 1, tree.size)
    counts_B = on_path_BN.sum(-1)
    path_BK = torch.where(columns_N[:width] < counts_B[:, None], ordered_BN[:, :width], columns_N[:width])
    return Accepted(path_BK=path_BK, counts_B=counts_B, bonus_B=bonus_B)


@dataclass(frozen=True, kw_only=True)
class Chances:
    """Random numbers for one verification, uniform in [0, 1) and independent; ignored in greedy rows."""

    choices_BN: Tensor  # After each node: the number of the place that the target's choice would take
    tests_BN: Tensor  # For the acceptance test of each node; only rules of rejection read it


class Rule(ABC):
    """Decides which path of a verified tree is kept and which token follows it."""

    lossless: bool = True  # True if the emitted tokens have the target's distribution

    @abstractmethod
    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        """Decide on one tree a row by the target's logits after each node (penalties applied, temperature not)."""


class Equality(Rule):
    """A node is accepted when it is what the target chose: exact for point masses, and for any tree in greedy rows. The
    same law as accepting x with probability p(x) and going on with p(x) = 0, renormalised (EAGLE-2's rule), and the
    emitted tokens do not depend on what was drafted."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        return follow(tree, choose(logits_BNV, chances.choices_BN, sampling))


def reject_siblings(target_BV: Tensor, log_q_BV: Tensor, tokens_BK: Tensor, real_BK: Tensor,
                    sampled_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Recursive rejection over siblings in the order they were drawn (arXiv:2402.14160; EAGLE-1's code): (chance of
    accepting each child once the ones before it were rejected, 0 where there is none, [B, K]; distribution of the
    emitted token when all were rejected, [B, V]). `target_BV` is p and `log_q_BV` log q at the node, in float64, the
    latter any where no child was `sampled_BK`; `real_BK` children exist.

    Start with P = p. Accept the j-th child x with probability min(1, P(x) / q_j(x)), where q_j is q without the earlier
    sampled siblings, renormalised, or all on x for a point mass; after a rejection P becomes max(P - q_j, 0) over the
    whole vocabulary, renormalised. (Algorithm 1 of arXiv:2401.15077 read literally changes one entry, which is
    biased.)"""
    rest_BV, log_left_BV, accepts = target_BV, log_q_BV, []
    for rank in range(tokens_BK.shape[1]):
        one = slice(rank, rank + 1)
        token_B1, real_B1, sampled_B1 = tokens_BK[:, one], real_BK[:, one], sampled_BK[:, one]
        certain_BV = torch.zeros_like(rest_BV).scatter(1, token_B1, 1.0)
        q_BV = torch.where(sampled_B1, renormalised(log_left_BV), certain_BV)
        chance_B1 = (rest_BV.gather(1, token_B1) / q_BV.gather(1, token_B1)).clamp(max=1.0)
        accepts.append(torch.where(real_B1, chance_B1, 0.0))
        # After a rejection; what acceptance has taken is gone from p.
        rest_BV = torch.where(real_B1, normalised((rest_BV - q_BV).clamp(min=0), rest_BV), rest_BV)
        without_BV = log_left_BV.scatter(1, token_B1, -torch.inf)
        log_left_BV = torch.where(real_B1 & sampled_B1, without_BV, log_left_BV)
    return torch.cat([*accepts, rest_BV[:, :0]], dim=1), rest_BV


def normalised(mass_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """`mass_BV` scaled to sum to 1; a row without mass, which is never drawn from, takes `otherwise_BV`."""
    total_B1 = mass_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, mass_BV / total_B1, otherwise_BV)


def renormalised(log_q: Tensor) -> Tensor:
    """The distribution in proportion to exp(log_q), [..., V]; zeros where nothing is possible. A softmax, not a
    division by what is left of the sum: that may be far below the rounding error of the sum."""
    # The softmax of nothing but -inf would be NaN.
    possible = log_q.amax(-1, keepdim=True) > -torch.inf
    return torch.where(possible, log_q.softmax(-1), 0.0)


class Rejection(Rule):
    """Recursive rejection down the tree, one level at a time; siblings sampled, point masses, or both. It accepts at
    least as much as equality does, an oracle's samples always, but what is emitted depends on what was drafted, token
    by token though not in distribution."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        rows_B = torch.arange(logits_BNV.shape[0], device=logits_BNV.device)
        here_B, walking_B = torch.zeros_like(rows_B), torch.ones_like(rows_B, dtype=torch.bool)
        rest_BV = torch.zeros_like(logits_BNV[:, 0], dtype=torch.float64)
        sampled_BN = torch.zeros_like(tree.real_BN) if tree.drawn is None else tree.drawn.sampled_BN
        for _ in range(tree.max_depth + 1):
            children_BK, real_BK = tree.children(here_B)
            accept_BK, left_BV = reject_siblings(
                sampling.distribution(logits_BNV[rows_B, here_B, None])[:, 0].double(),
                tree.draft_at(here_B[:, None], logits_BNV.shape[-1])[:, 0], tree.tokens_BN.gather(1, children_BK),
                real_BK, sampled_BN.gather(1, children_BK))
            # Rows that have stopped keep the rest of the node where they did.
            rest_BV = torch.where(walking_B[:, None], left_BV, rest_BV)
            if children_BK.shape[1] == 0:
                break
            passed_BK = real_BK & (chances.tests_BN.gather(1, children_BK) < accept_BK)
            walking_B = walking_B & passed_BK.any(-1)
            first_B1 = passed_BK.long().argmax(-1, keepdim=True)
            here_B = torch.where(walking_B, children_BK.gather(1, first_B1)[:, 0], here_B)
        return down_to(tree, here_B, draw(rest_BV, chances.choices_BN[rows_B, here_B]))


class ChainRejection(Rule):
    """Rejection along a chain, all places at once (arXiv:2211.17192, algorithm 1): what `Rejection` does, in one step.
    Accept x with probability min(1, p(x) / q(x)); after the last accepted token draw from max(p - q, 0), normalised,
    and from p when the chain ends there."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        passed_BM = tree.real_BN[:, 1:] & (chances.tests_BN[:, 1:] < self.chances(tree, logits_BNV, sampling))
        deepest_B = passed_BM.long().cumprod(-1).sum(-1)
        rows_B = torch.arange(deepest_B.shape[0], device=deepest_B.device)
        last_BV = sampling.distribution(logits_BNV[rows_B, deepest_B, None])[:, 0].double()
        next_B = (deepest_B + 1).clamp(max=tree.size - 1)
        # At the end of a chain nothing was rejected, and the token after it comes from p itself.
        rejected_B1 = ((next_B > deepest_B) & tree.real_BN[rows_B, next_B])[:, None]
        rest_BV = last_BV
        if tree.size > 1:
            q_BV = self._proposals(tree, next_B[:, None], logits_BNV.shape[-1])[:, 0]
            rest_BV = torch.where(rejected_B1, normalised((last_BV - q_BV).clamp(min=0), last_BV), last_BV)
        return down_to(tree, deepest_B, draw(rest_BV, chances.choices_BN[rows_B, deepest_B]))

    def chances(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling) -> Tensor:
        """The probability min(1, p(x) / q(x)) that each node below the root is accepted if those before it are, [B, N -
        1], float64."""
        # Few distributions are held at a time.
        rows, size, entries = logits_BNV.shape
        ratios = [logits_BNV[:, :0, 0].double()]
        for group in node_groups(rows, size - 1, entries):
            nodes_BM = torch.arange(group.start + 1, group.stop + 1, device=logits_BNV.device).expand(rows, -1)
            tokens_BM1 = tree.tokens_BN.gather(1, nodes_BM)[..., None]
            p_BMV = sampling.distribution(logits_BNV[:, group]).double()
            q_BMV = self._proposals(tree, nodes_BM, entries)
            ratios.append((p_BMV.gather(2, tokens_BM1) / q_BMV.gather(2, tokens_BM1))[..., 0])
        return torch.cat(ratios, dim=1).clamp(max=1.0)

    def _proposals(self, tree: TokenTree, nodes_BM: Tensor, vocab_size: int) -> Tensor:
        """The distribution that some nodes below the root of a chain were drawn from, [B, M, V]."""
        draft_BMV = renormalised(tree.draft_at(nodes_BM - 1, vocab_size))
        certain_BMV = torch.zeros_like(draft_BMV).scatter(2, tree.tokens_BN.gather(1, nodes_BM)[..., None], 1.0)
        if tree.drawn is None:
            return certain_BMV
        return torch.where(tree.drawn.sampled_BN.gather(1, nodes_BM)[..., None], draft_BMV, certain_BMV)


@dataclass(frozen=True, kw_only=True)
class Typical(Rule):
    """Medusa's typical acceptance (arXiv:2401.10774, eq. 4): faster, and not the target's distribution. In sampled rows
    a token is accepted when p(x) > min(epsilon, delta exp(-H(p))), H in nats; the longest accepted path wins, then the
    likeliest. The token after it is drawn from p. Greedy rows are verified by equality. The official code adds 1e-5
    inside the logarithm; here 0 log 0 = 0. Raises UserError if a number is out of its range."""

    lossless = False
    epsilon: float = 0.09  # Probability that is always enough
    delta: float = 0.3  # Share of exp(-entropy) that is enough where the target is unsure

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise UserError(f"{name} must be above 0 and at most 1, got {value}")

    def bound(self, probs: Tensor) -> Tensor:
        """The least probability that is accepted under the distributions [..., V]; a token needs more than it."""
        entropy = torch.special.entr(probs).sum(-1)
        enough: Tensor = self.delta * (-entropy).exp()
        return enough.clamp(max=self.epsilon)

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        own, bounds = [], []
        # p(x) of the token of each node after its parent, and the bound there; few distributions are held at a time.
        for group in node_groups(*logits_BNV.shape):
            above_BM1 = tree.parents_BN[:, group].clamp(min=0)[..., None]
            logits_BMV = logits_BNV.gather(1, above_BM1.expand(-1, -1, logits_BNV.shape[-1]))
            p_BMV = sampling.distribution(logits_BMV).double()
            own.append(p_BMV.gather(2, tree.tokens_BN[:, group, None])[..., 0])
            bounds.append(self.bound(p_BMV))
        own_BN, bound_BN = torch.cat(own, dim=1), torch.cat(bounds, dim=1)
        typical_BN = tree.real_BN & (own_BN > bound_BN)
        typical_BN = typical_BN | (torch.arange(tree.size, device=typical_BN.device) == 0)
        accepted_BN = ~(tree.ancestors_BNN & ~typical_BN[:, None, :]).any(-1)
        log_BN = torch.where(typical_BN, own_BN, 1.0).log().index_fill(1, torch.zeros_like(tree.parents_BN[0, :1]), 0.0)
        path_BN = (tree.ancestors_BNN * log_BN[:, None, :]).sum(-1)
        depths_BN = torch.where(accepted_BN, tree.depths_BN, -1)
        longest_BN = depths_BN == depths_BN.amax(-1, keepdim=True)
        deepest_B = torch.where(longest_BN, path_BN, -torch.inf).argmax(-1)
        return down_to(tree, deepest_B, choose_at(logits_BNV, chances.choices_BN, sampling, deepest_B))


@dataclass(frozen=True)
class AcceptAll(Rule):
    """Accepts every drafted token of a chain (ValueError for another tree); the target adds one after it. What is
    emitted is the draft's own text, with a token of the target's after each chain. It is for data that a draft is to
    learn on (arXiv:2310.08461), never for answers: it is not lossless, and says so."""

    lossless = False

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        if (most := tree.most_children) is None or most > 1:
            raise ValueError(f"only a chain is taken as it is, here a node has {most or 'any number of'} children")
        deepest_B = torch.where(tree.real_BN, tree.depths_BN, -1).argmax(-1)
        return down_to(tree, deepest_B, choose_at(logits_BNV, chances.choices_BN, sampling, deepest_B))


_EQUALITY, _REJECTION, _CHAIN_REJECTION = Equality(), Rejection(), ChainRejection()


def exact_rule(tree: TokenTree) -> Rule:
    """The exact rule for a tree: equality for point masses, rejection for samples. A tree in which no node has two
    children is taken for a chain, whose padding, if any, stands at its end."""
    if tree.drawn is None:
        return _EQUALITY
    return _CHAIN_REJECTION if tree.most_children == 1 else _REJECTION
