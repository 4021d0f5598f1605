"""Rules of acceptance: which drafted tokens are kept, under one interface. Exact ones emit the target's distribution:
equality for point masses (the default), rejection for tokens that were sampled from a q that the tree carries.

Verification by equality: the target chooses a token at every node, greedily or by sampling from its own distribution,
and the walk from the root goes down as long as a child holds the chosen token. For proposals that are point masses
this is the acceptance rule with probability p(x) and the residual with p(x) set to zero, in one step.

Shapes: B rows, N nodes, K children of one node or nodes of the longest path, V target vocabulary. p is the target's
processed distribution, q the draft's."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..token_tree import TokenTree
from .sampling import Sampling, choose, draw, node_groups, on_host


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


def choose_at(logits_BNV: Tensor, uniforms_BN: Tensor, sampling: Sampling, rows_R: Tensor, nodes_R: Tensor) -> Tensor:
    """The target's choice at one node of each of some rows, [R]."""
    sampling, logits_R1V = sampling.at(logits_BNV, rows_R, nodes_R)
    return choose(logits_R1V, uniforms_BN[rows_R, nodes_R, None], sampling)[:, 0]


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

    def check(self, policy: Any) -> None:  # noqa: B027
        """Raise UserError when the rule makes no sense with the drafts of a policy; most serve all."""

    @abstractmethod
    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        """Decide on one tree a row by the target's logits after each node, as the pass gave them."""


class Equality(Rule):
    """A node is accepted when it is what the target chose: exact for point masses, and for any tree in greedy rows. The
    same law as accepting x with probability p(x) and going on with p(x) = 0, renormalised (EAGLE-2's rule), and the
    emitted tokens do not depend on what was drafted. Of duplicate siblings the first makes the choice after them."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        rows_B, columns_N = (torch.arange(count, device=logits_BNV.device) for count in tree.tokens_BN.shape)
        greedy, few = not sampling.sampling_rows, len(node_groups(*logits_BNV.shape)) == 1
        if (greedy and sampling.adjust is None) or (not on_host(logits_BNV) and (greedy or few)):
            # An argmax costs less than a walk, and to start small operations at each depth takes an accelerator longer
            # than to run them for all nodes at once, unless these are many.
            adjusted_BNV = sampling.adjusted(logits_BNV, rows_B, columns_N.expand_as(tree.tokens_BN))
            return follow(tree, choose(adjusted_BNV, chances.choices_BN, sampling))
        below_BN, above_BN = tree.real_BN & (columns_N > 0), tree.parents_BN.clamp(min=0)
        reached_BN, going_B = (columns_N == 0).expand_as(below_BN), torch.ones_like(below_BN[:, 0])
        here_B = chosen_B = torch.zeros_like(tree.tokens_BN[:, 0])
        for _ in range(tree.max_depth + 1):
            rows_R = going_B.nonzero()[:, 0] if on_host(going_B) else rows_B
            if len(rows_R) == 0:
                break
            chosen_R = choose_at(logits_BNV, chances.choices_BN, sampling, rows_R, here_B[rows_R])
            chosen_B = chosen_B.index_copy(0, rows_R, chosen_R)
            # A row that has stopped chooses what it chose, and stays, so that an accelerator need not know of it.
            next_BN = below_BN & reached_BN.gather(1, above_BN) & (tree.tokens_BN == chosen_B[:, None])
            going_B = next_BN.any(-1)
            reached_BN = torch.where(going_B[:, None], next_BN, reached_BN)
            here_B = reached_BN.byte().argmax(-1)
        return down_to(tree, here_B, chosen_B)


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
    by token though not in distribution. A tree in which no node has two children is taken for a chain, whose padding,
    if any, stands at its end, and is verified as a block."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        if tree.most_children == 1 and self.lossless:
            return accept_block(tree, logits_BNV, sampling, chances)
        rows_B, sampled_BN = torch.arange(len(logits_BNV), device=logits_BNV.device), drawn_nodes(tree)
        here_B, going_B = torch.zeros_like(rows_B), torch.ones_like(tree.real_BN[:, 0])
        rest_BV = torch.zeros_like(logits_BNV[:, 0], dtype=torch.float64)
        for _ in range(tree.max_depth + 1):
            # What is left where a row stopped is the same however often it is computed, as in `Equality`.
            rows_R = going_B.nonzero()[:, 0] if on_host(going_B) else rows_B
            if len(rows_R) == 0:
                break
            here_R, (children_BK, real_BK) = here_B[rows_R], tree.children(here_B)
            accept_BK = torch.zeros_like(children_BK, dtype=torch.float64)
            p_RV = sampling.distribution_at(logits_BNV, rows_R, here_R)
            log_q_RV = tree.draft_at(here_R[:, None], logits_BNV.shape[-1], rows_R)[:, 0]
            accept_BK[rows_R], rest_BV[rows_R] = reject_siblings(
                p_RV, log_q_RV, tree.tokens_BN.gather(1, children_BK)[rows_R], real_BK[rows_R],
                sampled_BN.gather(1, children_BK)[rows_R])
            accept_BK[rows_R] = self.eased(accept_BK[rows_R], p_RV, log_q_RV, sampled_BN.gather(1, children_BK)[rows_R])
            if children_BK.shape[1] == 0:
                break
            passed_BK = real_BK & (chances.tests_BN.gather(1, children_BK) < accept_BK)
            going_B, first_B1 = passed_BK.any(-1), passed_BK.byte().argmax(-1, keepdim=True)
            here_B = torch.where(going_B, children_BK.gather(1, first_B1)[:, 0], here_B)
        return down_to(tree, here_B, draw(rest_BV, chances.choices_BN[rows_B, here_B]))

    def eased(self, accept_BK: Tensor, target_BV: Tensor, log_q_BV: Tensor, sampled_BK: Tensor) -> Tensor:
        """The chances of acceptance of the children of a node, [B, K], given p and log q there."""
        return accept_BK


_SURE, _LEAST_Q = 0.9, 1e-9  # Probability of a token of which the target is sure, and least q in a divergence


@dataclass(frozen=True, kw_only=True)
class Divergence(Rejection):
    """Judging without a judge (arXiv:2601.04766): a sampled token is accepted, whatever p and q say of it, where the KL
    divergence of q from p after the text before it is below `nats`, unless the target is sure of a token there. It is
    not the target's distribution. Greedy rows and point masses are verified exactly, and 0 nats are `Rejection`. A q of
    0 counts as 1e-9, since a draft may lack tokens of the target. Raises UserError for a negative number."""

    lossless = False
    nats: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.nats < float("inf"):
            raise UserError(f"the rule kl takes a number of nats from 0 on, got {self.nats}; try kl-0.5")

    def check(self, policy: Any) -> None:
        if not policy.samples:
            raise UserError("the rule kl compares the target with the distribution that drafts were sampled from, and "
                            "this policy samples none; choose sampled, sampled-chain or dyspec")

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        if tree.drawn is None or self.nats == 0:
            return exact_rule(tree).accept(tree, logits_BNV, sampling, chances)
        return super().accept(tree, logits_BNV, sampling, chances)

    def eased(self, accept_BK: Tensor, target_BV: Tensor, log_q_BV: Tensor, sampled_BK: Tensor) -> Tensor:
        log_q_BV = renormalised(log_q_BV).clamp(min=_LEAST_Q).log()
        divergence_B = -(torch.special.entr(target_BV) + target_BV * log_q_BV).sum(-1).clamp(min=0)
        alike_B = (divergence_B < self.nats) & (target_BV.amax(-1) <= _SURE)
        return torch.where(alike_B[:, None] & sampled_BK & (accept_BK > 0), 1.0, accept_BK)


def accept_block(tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
    """Verification of a chain as a block (arXiv:2403.10444, algorithm 2), which no exact rule for one chain surpasses.

    With c_0 = 1 and c_i = min(1, c_{i-1} p(x_i) / q(x_i)), the first i tokens are accepted, whatever comes of those
    after them, with probability h_i = R / (R + 1 - c_i), where R is the sum of max(c_i p - q, 0) at the place after
    them; at the end of a row's chain it is c_i. The longest accepted part wins. The token after it comes from what R
    sums up, or from p after a whole chain. A row's chain may end wherever the tokens before its end say."""
    rows_B, size = torch.arange(len(logits_BNV), device=logits_BNV.device), tree.size
    sampled_BN = drawn_nodes(tree)

    def left_at(rows_R: Tensor, nodes_R: Tensor, carried_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(c p, and q of the next token, or zeros at the end of a chain, [R, V] each; its real places, [R])."""
        next_R = (nodes_R + 1).clamp(max=size - 1)
        real_R = tree.real_BN[rows_R, next_R] & (nodes_R < size - 1)
        p_RV = carried_R[:, None] * sampling.distribution_at(logits_BNV, rows_R, nodes_R)
        certain_RV = torch.zeros_like(p_RV).scatter(1, tree.tokens_BN[rows_R, next_R, None], 1.0)
        q_RV = renormalised(tree.draft_at(nodes_R[:, None], p_RV.shape[-1], rows_R)[:, 0])
        q_RV = torch.where(sampled_BN[rows_R, next_R, None], q_RV, certain_RV)
        return p_RV, torch.where(real_R[:, None], q_RV, 0.0), real_R

    carried_B = torch.ones_like(rows_B, dtype=torch.float64)
    deepest_B, taken_B = torch.zeros_like(rows_B), carried_B
    for node in range(size):
        # Where nothing is carried nothing is accepted from there on.
        rows_R = (carried_B > 0).nonzero()[:, 0] if on_host(carried_B) else rows_B
        if len(rows_R) == 0:
            break
        p_RV, q_RV, real_R = left_at(rows_R, torch.full_like(rows_R, node), carried_R := carried_B[rows_R])
        rest_R = (p_RV - q_RV).clamp(min=0).sum(-1)
        # Where all is carried on and nothing would be left, the next token is accepted for certain.
        missing_R = rest_R + 1 - carried_R
        accept_R = torch.where(real_R, torch.where(missing_R == 0, 1.0, rest_R / missing_R), carried_R)
        passed_R = tree.real_BN[rows_R, node] & (chances.tests_BN[rows_R, node] < accept_R) & (node > 0)
        deepest_B = deepest_B.index_copy(0, rows_R, torch.where(passed_R, node, deepest_B[rows_R]))
        taken_B = taken_B.index_copy(0, rows_R, torch.where(passed_R, carried_R, taken_B[rows_R]))
        next_R1 = tree.tokens_BN[rows_R, min(node + 1, size - 1), None]
        ratio_R = (p_RV.gather(1, next_R1) / q_RV.gather(1, next_R1))[:, 0].clamp(max=1.0)
        carried_B = carried_B.index_copy(0, rows_R, torch.where(real_R, ratio_R, 0.0))
    p_BV, q_BV, _ = left_at(rows_B, deepest_B, taken_B)
    rest_BV = normalised((p_BV - q_BV).clamp(min=0), p_BV)
    return down_to(tree, deepest_B, draw(rest_BV, chances.choices_BN[rows_B, deepest_B]))


def drawn_nodes(tree: TokenTree) -> Tensor:
    """True at nodes that were drawn, [B, N]; the others are point masses."""
    return torch.zeros_like(tree.real_BN) if tree.drawn is None else tree.drawn.sampled_BN


def chain_chances(tree: TokenTree, logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """The probability min(1, p(x) / q(x)) that each node of a chain below the root is accepted if those before it are,
    [B, N - 1], float64."""
    # Few distributions are held at a time.
    rows, size, entries = logits_BNV.shape
    ratios, rows_B = [logits_BNV[:, :0, 0].double()], torch.arange(rows, device=logits_BNV.device)
    for group in node_groups(rows, size - 1, entries):
        nodes_BM = torch.arange(group.start, group.stop, device=logits_BNV.device).expand(rows, -1)
        tokens_BM1 = tree.tokens_BN.gather(1, nodes_BM + 1)[..., None]
        p_BMV = sampling.distribution(sampling.adjusted(logits_BNV[:, group], rows_B, nodes_BM)).double()
        q_BM = renormalised(tree.draft_at(nodes_BM, entries)).gather(2, tokens_BM1)[..., 0]
        certain_BM = ~drawn_nodes(tree).gather(1, nodes_BM + 1)
        ratios.append(p_BMV.gather(2, tokens_BM1)[..., 0] / q_BM.masked_fill(certain_BM, 1.0))
    return torch.cat(ratios, dim=1).clamp(max=1.0)


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
        rows_B, columns_N = (torch.arange(count, device=logits_BNV.device) for count in tree.tokens_BN.shape)
        below_BN, above_BN = tree.real_BN & (columns_N > 0), tree.parents_BN.clamp(min=0)
        own_BN = torch.zeros_like(tree.parents_BN, dtype=torch.float64)  # p(x) of nodes that are likely enough
        # All nodes on an accelerator, a few together; on a CPU those that were reached.
        groups, new_BN = node_groups(*logits_BNV.shape), (columns_N == 0).expand_as(below_BN)
        while bool(new_BN.any()) if on_host(logits_BNV) else groups:
            known_BN = own_BN > 0
            if on_host(logits_BNV):
                rows_F, nodes_F = new_BN.nonzero(as_tuple=True)
            else:
                nodes_F = columns_N[groups.pop()].repeat(len(rows_B))
                rows_F = rows_B.repeat_interleave(len(nodes_F) // len(rows_B))
            p_FV = sampling.distribution_at(logits_BNV, rows_F, nodes_F)
            own_FN, child_FN = p_FV.gather(1, tree.tokens_BN[rows_F]), above_BN[rows_F] == nodes_F[:, None]
            typical_FN = child_FN & below_BN[rows_F] & (own_FN > self.bound(p_FV)[:, None])
            own_BN.index_add_(0, rows_F, torch.where(typical_FN, own_FN, 0.0))
            new_BN = (own_BN > 0) & ~known_BN
        log_BN = own_BN.log().masked_fill(columns_N == 0, 0.0)
        path_BN = torch.where(tree.ancestors_BNN, log_BN[:, None, :], 0.0).sum(-1)
        depths_BN = torch.where(path_BN > -torch.inf, tree.depths_BN, -1)
        longest_BN = depths_BN == depths_BN.amax(-1, keepdim=True)
        deepest_B = torch.where(longest_BN, path_BN, -torch.inf).argmax(-1)
        return down_to(tree, deepest_B, choose_at(logits_BNV, chances.choices_BN, sampling, rows_B, deepest_B))


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
        rows_B = torch.arange(len(deepest_B), device=deepest_B.device)
        return down_to(tree, deepest_B, choose_at(logits_BNV, chances.choices_BN, sampling, rows_B, deepest_B))


def lossy_rule(name: str) -> Rule:
    """The lossy rule of a name: typical, kl, or kl with its number of nats, kl-0.5. Raises UserError if there is
    none."""
    kind, _, number = name.partition("-")
    try:
        if kind == "kl":
            return Divergence(nats=float(number)) if number else Divergence()
        return {"typical": Typical()}[name]
    except (KeyError, ValueError) as error:
        raise UserError(f"there is no lossy rule {name!r}; choose typical or kl-0.5") from error


def exact_rule(tree: TokenTree) -> Rule:
    """The exact rule for a tree: equality for point masses, rejection for samples."""
    return Equality() if tree.drawn is None else Rejection()
