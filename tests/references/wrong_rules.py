"""Rules that are in circulation and are not exact: the tests of the exact ones must fail on each."""

import torch
from draftsmith.modules.verification.acceptance_rules import Verdict, judge, normalised


def unchanged_q(target, log_q, tokens, real, sampled):
    """Wrong: children drawn without replacement are judged by the q of the first."""
    rest, draft, accepts = target, log_q.softmax(-1), []
    for rank in range(tokens.shape[1]):
        token = tokens[:, rank : rank + 1]
        accepts.append((rest.gather(1, token) / draft.gather(1, token)).clamp(max=1))
        rest = normalised((rest - draft).clamp(min=0), rest)
    return Verdict(accept_BK=torch.cat(accepts, dim=1), rest_BV=rest)


def one_entry_residual(target, log_q, tokens, real, sampled):
    """Wrong: algorithm 1 of EAGLE's paper read literally, only the rejected token's entry is lowered."""
    rest, left, accepts = target, log_q.softmax(-1), []
    for rank in range(tokens.shape[1]):
        token = tokens[:, rank : rank + 1]
        own, q = rest.gather(1, token), left.gather(1, token)
        accepts.append((own / q).clamp(max=1))
        rest = normalised(rest.scatter(1, token, (own - q).clamp(min=0)), rest)
        left = normalised(left.scatter(1, token, 0.0), left)
    return Verdict(accept_BK=torch.cat(accepts, dim=1), rest_BV=rest)


def likeliest_as_samples(target, log_q, tokens, real, sampled):
    """Wrong: the k likeliest tokens are judged as if they had been drawn from q."""
    return judge(target, log_q, tokens, real, torch.ones_like(sampled))


def no_renormalisation(target, log_q, tokens, real, sampled):
    """Wrong: point masses, each judged by p(x) though earlier siblings were rejected; the last draw scales itself."""
    rest = target.scatter(1, tokens, 0.0)
    return Verdict(accept_BK=target.gather(1, tokens), rest_BV=normalised(rest, target))


def typical(target, log_q, tokens, real, sampled):
    """Lossy by design: the first child that is likely enough is taken."""
    entropy = torch.special.entr(target).sum(-1, keepdim=True)
    enough = target.gather(1, tokens) > (0.3 * (-entropy).exp()).clamp(max=0.09)
    return Verdict(accept_BK=enough.to(target.dtype), rest_BV=target)
