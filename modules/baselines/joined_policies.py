"""Names of policies that join a trained draft with a drafter that needs no training: static+lookup, eagle2-32+ngrams.

After the plus stands one of PARTNERS, with a number of tokens (of a chain) or nodes (of a tree) after a hyphen where
one likes: static-6+lookup-5. Its guesses come first, so that the draft's tree is cut where a union has fewer nodes.
"""

from dataclasses import dataclass

from ..errors import UserError
from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from ..policies.ensemble import Ensemble, Union, whole_size
from ..policies.registry import FASTEST, MOST, NONE, STATIC, parse_policy
from ..target.model import Target
from .registry import baseline

LOOKUP = "lookup"
"""The partner whose chain is sized for an artifact."""
JOINED = f"{STATIC}+{LOOKUP}"
"""The joined policy that an artifact is tuned for."""
PARTNERS = {
    LOOKUP: "prompt_lookup", "suffix": "suffix_match", "recycling": "recycling", "ngrams": "ngrams",
    "layer_skip": "layer_skip", "first_layers": "first_layers",
}
"""Baselines by their name in a policy."""
TREES = ("recycling", "ngrams")
"""Partners whose number counts the nodes of a tree, the root included, and not the tokens of a chain."""


@dataclass(frozen=True, kw_only=True)
class PolicyName:
    """The parts of a policy's name."""

    own: str
    """Policy of the trained draft."""
    partner: str | None = None
    """One of PARTNERS; None where nothing is joined."""
    size: int | None = None
    """Number in the partner's name."""


def parse_joined(name: str) -> PolicyName:
    """The parts of a policy's name, with or without a partner.

    Raises:
        UserError: if there is no such policy or partner, or a number is out of its range.
    """
    own, plus, partner = name.partition("+")
    if own.partition("-")[0] == FASTEST:
        raise UserError(f"the policy {name!r} adds to {FASTEST}, which chooses {STATIC}, {JOINED} or {NONE} and their "
                        f"sizes by itself; ask for {FASTEST} alone, or for {JOINED}")
    parse_policy(own)
    if not plus:
        return PolicyName(own=own)
    # No partner's name holds a hyphen, so that the last one starts a number.
    known, _, number = partner.rpartition("-") if partner not in PARTNERS else (partner, "", "")
    if known not in PARTNERS:
        raise UserError(f"the policy {name!r} joins {partner!r}, which is no drafter without training; choose from "
                        f"{', '.join(PARTNERS)}, such as {JOINED}")
    if known == partner:
        return PolicyName(own=own, partner=known)
    least = 2 if known in TREES else 1
    digits = number.isascii() and number.isdecimal() and len(number) <= len(str(MOST))
    if not digits or not least <= int(number) <= MOST:
        raise UserError(f"the policy {name!r} ends in {number!r}; {known} wants a whole number of at least {least} and "
                        f"at most {MOST}; choose one")
    return PolicyName(own=own, partner=known, size=int(number))


def joined_drafter(name: PolicyName, drafter: Proposer, target: Target) -> Proposer:
    """The drafter, next to a new partner with an empty memory where the name has one."""
    if name.partner is None:
        return drafter
    return Ensemble([baseline(PARTNERS[name.partner], target, name.size)[0], drafter])


def joined_policy(name: PolicyName, own: Policy, target: Target) -> Policy:
    """The draft's policy, joined with the partner's where the name has one; a pass has room for all nodes of both."""
    if name.partner is None:
        return own
    policies = [baseline(PARTNERS[name.partner], target, name.size)[1], own]
    return Union(policies, whole_size(policies))
