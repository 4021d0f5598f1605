"""Rules and policies that are not exact, most of them in circulation: the tests of the exact ones must fail on each."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from draftsmith.modules import DySpecTree, Policy
from draftsmith.modules.interfaces.proposer import spread
from draftsmith.modules.verification import acceptance_rules
from draftsmith.modules.verification.acceptance_rules import normalised, reject_siblings


def unchanged_q(target, log_q, tokens, real, sampled):
    """Wrong: children drawn without replacement are judged by the q of the first."""
    rest, draft, accepts = target, log_q.softmax(-1), []
    for rank in range(tokens.shape[1]):
        token = tokens[:, rank : rank + 1]
        accepts.append((rest.gather(1, token) / draft.gather(1, token)).clamp(max=1))
        rest = normalised((rest - draft).clamp(min=0), rest)
    return torch.cat(accepts, dim=1), rest


def one_entry_residual(target, log_q, tokens, real, sampled):
    """Wrong: algorithm 1 of EAGLE's paper read literally, only the rejected token's entry is lowered."""
    rest, left, accepts = target, log_q.softmax(-1), []
    for rank in range(tokens.shape[1]):
        token = tokens[:, rank : rank + 1]
        own, q = rest.gather(1, token), left.gather(1, token)
        accepts.append((own / q).clamp(max=1))
        rest = normalised(rest.scatter(1, token, (own - q).clamp(min=0)), rest)
        left = normalised(left.scatter(1, token, 0.0), left)
    return torch.cat(accepts, dim=1), rest


def likeliest_as_samples(target, log_q, tokens, real, sampled):
    """Wrong: the k likeliest tokens are judged as if they had been drawn from q."""
    return reject_siblings(target, log_q, tokens, real, torch.ones_like(sampled))


def no_renormalisation(target, log_q, tokens, real, sampled):
    """Wrong: point masses, each judged by p(x) though earlier siblings were rejected; the last draw scales itself."""
    rest = target.scatter(1, tokens, 0.0)
    return target.gather(1, tokens), normalised(rest, target)


def typical(target, log_q, tokens, real, sampled):
    """Lossy by design: the first child that is likely enough is taken."""
    entropy = torch.special.entr(target).sum(-1, keepdim=True)
    enough = target.gather(1, tokens) > (0.3 * (-entropy).exp()).clamp(max=0.09)
    return enough.to(target.dtype), target


def no_residual(target, log_q, tokens, real, sampled):
    """Wrong: after a rejection the token is drawn from p itself, so that the rejected one comes back too often."""
    return reject_siblings(target, log_q, tokens, real, sampled)[0], target


def underflowing_q(target, log_q, tokens, real, sampled):
    """Wrong: q is carried as a probability in float32, where what is left of a confident draft is 0."""
    rest, left, accepts = target, log_q.float().exp().double(), []
    for rank in range(tokens.shape[1]):
        token, exists = tokens[:, rank : rank + 1], real[:, rank : rank + 1]
        q = torch.where(sampled[:, rank : rank + 1], left, torch.zeros_like(rest).scatter(1, token, 1.0))
        accepts.append(torch.where(exists, rest.gather(1, token) / q.gather(1, token), 0).clamp(max=1))
        rest = torch.where(exists, normalised((rest - q).clamp(min=0), rest), rest)
        left = torch.where(exists, normalised(left.scatter(1, token, 0.0), left), left)
    return torch.cat(accepts, dim=1), rest


@contextmanager
def rejecting_by(rule):
    """`Rejection` decides by another rule inside the block, for chains too."""

    def by_token(tree, *given):
        return acceptance_rules.Rejection().accept(replace(tree, most_children=None), *given)

    with patch.multiple(acceptance_rules, reject_siblings=rule, accept_block=by_token):
        yield


class InclusiveSums(DySpecTree):
    """Wrong: the mass left before a draw is formed as 1 - cumsum + q in float32, in the end the draw's own q."""

    def _children(self, log_q_BOQ, origin_BF, nodes_BF, values_BF, draws):
        entries, *rest = super()._children(log_q_BOQ, origin_BF, nodes_BF, values_BF, draws)
        if draws is None:
            return entries, *rest
        own = spread(log_q_BOQ, origin_BF).gather(2, entries)
        left = (1 - own.exp().cumsum(-1) + own.exp()).clamp(min=0).log()
        places = values_BF[..., None] + left.cummin(-1).values
        values = torch.minimum(values_BF[..., None] + own, places)
        return entries, values, places


class DropsUnlikely(Policy):
    """Wrong: drops the samples of another policy whose own probability is below a bound, after the draw."""

    def __init__(self, policy, bound):
        self.policy, self.bound = policy, bound
        self.max_size, self.samples = policy.max_size, policy.samples

    def grow(self, drafter, state, roots_B, draws=None):
        tree = self.policy.grow(drafter, state, roots_B, draws)
        if tree.drawn is None:
            return tree
        log_q_BIQ = tree.drawn.log_q_BIQ
        vocab_size = int(max(log_q_BIQ.shape[-1], tree.tokens_BN.max() + 1))
        q_BNV = tree.draft_at(tree.parents_BN.clamp(min=0), vocab_size).exp()
        own_BN = q_BNV.gather(2, tree.tokens_BN[..., None])[..., 0]
        kept_BN = (own_BN > self.bound) | ~tree.drawn.sampled_BN
        kept_BN[:, 0] = True
        return replace(tree, real_BN=tree.real_BN & ~(tree.ancestors_BNN & ~kept_BN[:, None]).any(-1))
