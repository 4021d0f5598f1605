"""Policies by name, as commands and recipes ask for them.

A name is a kind, with a number after a hyphen where it takes one: `static`, `static-16`, `chain-3`, `sure-0.3`."""

import math
from collections.abc import Callable, Sequence

from ..errors import UserError
from ..interfaces.proposer import JudgesGuesses, Proposer
from ..token_tree import Topology
from .base import Policy
from .lookahead_trees import LookaheadTrees, ahead_trees
from .paid import PaidTree
from .stopping_chains import EarlyExit, JudgedPath, MaxProbability, PathProbability, StoppedChain
from .trees import BeamTree, DySpecTree, Eagle2Tree, SampledTree, StaticTree

FASTEST = "fastest"  # The default: an artifact's static, static+lookup or none, by its measurements
STATIC = "static"  # The kind that an artifact was tuned for
NONE = "none"  # The kind that drafts nothing: the target decodes alone
SURE = "sure"  # The kind that drafts on while the whole draft is likely enough by the drafter's own probabilities
SPECDEC = "specdec"  # The kind that needs an acceptance head, which an artifact holds
PAID = "paid"  # The kind that chooses the size of the tree before each pass, by what was accepted and took lately
SPARSE = "sparse"  # The kind for drafters with virtual nodes
DYNAMIC_DEPTH = 6  # Levels of a growing tree, where the family answers as many
MOST = 1024  # Largest number of nodes or tokens: a pass over more takes longer than any accepted path gives back
CONFIDENCE = 0.4  # Below this probability of its next token a stopping chain ends
LONGEST_SURE = 20  # Most tokens of a sure chain: those of a chain that ends by an acceptance head

_LEAST = {
    STATIC: 1,  # The artifact's tree, tuned for this machine or cut to N nodes (root included)
    PAID: 1,  # The same tree, of which each pass takes the first nodes that pay, at most N
    "chain": 1,  # Its likeliest N tokens
    "sampled": 1, "sampled-chain": 1,  # The tree and the chain with sampled tokens (RSD-C, arXiv:2402.14160)
    "eagle2": 2, "dyspec": 2,  # EAGLE-2's and DySpec's growing trees of N nodes (arXiv:2406.16858, 2410.11744)
    "beam": 2,  # The likeliest or luckiest sequences of each level, N nodes in all (RSD-S, arXiv:2402.14160)
    "stopping": 1,  # A chain of at most N tokens that ends before the first unsure token,
    "early-exit": 1,  # or after it where the drafter's own limits say so (Kangaroo, arXiv:2404.18911)
    SPARSE: 2,  # Trees of N nodes, virtual ones included, for each number of guesses of a row (PPD, arXiv:2405.18628)
}  # Kinds whose number counts nodes or tokens, with the smallest one
_SHARES = {
    SURE: 0.3,  # A chain that ends after the token at which the product of their probabilities falls below it
    SPECDEC: 0.7,  # A chain that ends once an acceptance head sees a greater risk of rejection (arXiv:2405.19715)
    # A chain that ends before the token with which a drafter that judges its guesses expects less (arXiv:2607.05147).
    "confident": 0.3,
}  # Kinds whose number is a probability, with a usual one
POLICIES = (*_LEAST, *_SHARES, NONE)


def parse_policy(name: str) -> tuple[str, float | None]:
    """The kind that a name asks for, and its number: a whole one, except for the probabilities of sure and specdec.
    Raises UserError if there is no such kind, or the number is none or out of its range."""
    kind, hyphen, number = name.rpartition("-") if name not in POLICIES else (name, "", "")
    if kind not in POLICIES:
        raise UserError(f"there is no policy {name!r}; choose from {FASTEST} (the default), {', '.join(POLICIES)}, "
                        "with a number of nodes or tokens after a hyphen where you like, such as chain-3 or eagle2-32, "
                        f"and with a drafter without training after a plus, such as {STATIC}+lookup")
    if not hyphen:
        return kind, None
    if kind == NONE:
        raise UserError(f"the policy {name!r} ends in {number!r}; {NONE} drafts nothing: leave the number out")
    if kind in _SHARES:
        share = float(number) if number.replace(".", "", 1).isdecimal() else 0.0
        if not 0 < share < 1:
            raise UserError(f"the policy {name!r} ends in {number!r}; {kind} wants a number above 0 and below 1, such "
                            f"as {kind}-{_SHARES[kind]}")
        return kind, share
    return kind, whole_number(name, kind, number, _LEAST[kind])


def whole_number(name: str, kind: str, number: str, least: int) -> int:
    """The number of nodes or tokens after a kind in a policy's name. Raises UserError if it is out of its range."""
    digits = number.isascii() and number.isdecimal() and len(number) <= len(str(MOST))
    if not digits or not least <= int(number) <= MOST:
        raise UserError(f"the policy {name!r} ends in {number!r}; {kind} wants a whole number of at least {least} and "
                        f"at most {MOST}; choose one")
    return int(number)


def policy_named(name: str, topology: Topology, drafter: Proposer, chances: Sequence[float] = (),
                 seconds: Callable[[int, int], float] | None = None) -> Policy:
    """The policy of this name, of POLICIES or such with a number, for a drafter with a static tree, best node first.
    `paid` starts from the chances of its nodes and the seconds of a step by nodes and rows, where they are known.
    Raises UserError if the name, its number or the policy does not fit."""
    kind, number = parse_policy(name)
    share, count = number or _SHARES.get(kind, 0.0), None if number is None else int(number)
    nodes, length = (count or max(_LEAST.get(kind, 1), usual) for usual in (topology.size, topology.depth))
    depth = min(DYNAMIC_DEPTH, drafter.reach or DYNAMIC_DEPTH)
    policy: Policy
    match kind:
        case "none":
            policy = StaticTree(Topology.chain(0))
        case "chain":
            policy = StaticTree(Topology.chain(length))
        case "sampled-chain":
            policy = SampledTree(Topology.chain(length))
        case "stopping":
            policy = StoppedChain(length, MaxProbability(CONFIDENCE))
        case "early-exit":
            policy = StoppedChain(count or drafter.chain_limits.gamma, EarlyExit(drafter.chain_limits.eta))
        case "sure":
            policy = StoppedChain(LONGEST_SURE, PathProbability(share))
        case "specdec":
            raise UserError(f"the policy {SPECDEC} needs an acceptance head; train one for an artifact with draftsmith "
                            "specdec, and draft with that artifact")
        case "confident":
            if not (isinstance(drafter, JudgesGuesses) and drafter.judges):
                raise UserError(f"the policy {kind} needs a drafter that judges its guesses, a block drafter "
                                f"trained with confidence; this is {drafter.family}: choose another policy, such as "
                                f"{SURE}")
            policy = StoppedChain(drafter.reach or LONGEST_SURE, JudgedPath(drafter.judge, share))
        case "eagle2" | "dyspec":
            policy = {"eagle2": Eagle2Tree, "dyspec": DySpecTree}[kind](nodes, depth)
        case "beam":
            # Wider beams before deeper ones, but few: 3 of 16 nodes, 10 of 64.
            depth = min(depth, nodes - 1, 1 + math.isqrt(nodes - 1))
            policy = BeamTree((nodes - 1) // depth, depth)
        case "sparse":
            if (chances_KR := drafter.rank_chances) is None:
                raise UserError(f"the policy {SPARSE} needs a drafter with virtual nodes, whose guesses were counted "
                                f"on held-out text when its artifact was made; this is {drafter.family}: choose "
                                "another policy")
            # As many as a pass over the static tree has, at least a guess and the virtual nodes of the root.
            policy = LookaheadTrees(ahead_trees(chances_KR, count or nodes * (1 + drafter.virtual_nodes)))
        case _:
            if nodes > topology.size:
                raise UserError(f"a tree of {nodes} nodes was asked for; this artifact's has {topology.size}: choose 1 "
                                f"to {topology.size}")
            shape = topology.prefix(nodes)
            policy = (StaticTree(shape) if kind == STATIC else PaidTree(shape, chances, seconds) if kind == PAID else
                      SampledTree(shape.numbered()))
    policy.check(drafter)
    return policy
