"""Policies by name, as commands and recipes ask for them.

A name is a kind, with a number after a hyphen where it takes one: `static`, `static-16`, `chain-3`, `eagle2-32`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError
from ..interfaces.proposer import Proposer
from ..token_tree import Topology
from .base import Policy
from .dynamic_trees import DySpecTree, Eagle2Tree
from .sampled_tree import SampledTree
from .static_tree import StaticTree
from .stopping_chains import StoppedChain
from .stopping_rules import MaxProbability

STATIC = "static"
"""The kind that an artifact was tuned for."""
DYNAMIC_DEPTH = 6
"""Levels of a growing tree, where the family answers as many."""
DYNAMIC_WIDTH = 10
"""Nodes expanded on a level of a growing tree."""
CONFIDENCE = 0.4
"""Below this probability of its next token a stopping chain ends."""


@dataclass(frozen=True)
class _Kind:
    """A way to draft."""

    make: Callable[[Topology, int, int], Policy]
    """From the artifact's tree, the number in the name and the depths that the family answers."""
    default: Callable[[Topology], int]
    """The number where the name has none."""
    least: int
    """The smallest number."""


def _static(topology: Topology, size: int, _reach: int) -> Policy:
    return StaticTree(_prefix(topology, size))


def _sampled(topology: Topology, size: int, _reach: int) -> Policy:
    return SampledTree(_in_drawing_order(_prefix(topology, size)))


def _eagle2(_topology: Topology, nodes: int, reach: int) -> Policy:
    return Eagle2Tree(nodes=nodes, depth=reach, width=DYNAMIC_WIDTH)


def _dyspec(_topology: Topology, nodes: int, reach: int) -> Policy:
    return DySpecTree(nodes=nodes, depth=reach, width=DYNAMIC_WIDTH)


def _chain(_topology: Topology, length: int, _reach: int) -> Policy:
    return StaticTree(Topology.chain(length))


def _sampled_chain(_topology: Topology, length: int, _reach: int) -> Policy:
    return SampledTree(Topology.chain(length))


def _stopping(_topology: Topology, length: int, _reach: int) -> Policy:
    return StoppedChain(length, MaxProbability(CONFIDENCE))


def _nodes(topology: Topology) -> int:
    return topology.size


def _length(topology: Topology) -> int:
    return max(1, topology.depth)


_KINDS: dict[str, _Kind] = {
    STATIC: _Kind(_static, _nodes, 1),
    "chain": _Kind(_chain, _length, 1),
    "sampled": _Kind(_sampled, _nodes, 1),
    "sampled-chain": _Kind(_sampled_chain, _length, 1),
    "eagle2": _Kind(_eagle2, _nodes, 2),
    "dyspec": _Kind(_dyspec, _nodes, 2),
    "stopping": _Kind(_stopping, _length, 1),
}
POLICIES = tuple(_KINDS)
"""The artifact's tree, tuned for this machine or cut to N nodes (root included); its likeliest N tokens; the tree and
the chain with sampled tokens (RSD-C, arXiv:2402.14160); EAGLE-2's and DySpec's growing trees of N nodes
(arXiv:2406.16858, 2410.11744); a chain of at most N tokens that ends where the draft is unsure."""


def parse_policy(name: str) -> tuple[str, int | None]:
    """The kind that a name asks for, and its number.

    Raises:
        UserError: if there is no such kind, or the number is none or too small.
    """
    kind, hyphen, number = name.rpartition("-") if name not in _KINDS else (name, "", "")
    if kind not in _KINDS:
        raise UserError(f"there is no policy {name!r}; choose from {', '.join(POLICIES)}, with a number of nodes or "
                        "tokens after a hyphen where you like, such as chain-3 or eagle2-32")
    if not hyphen:
        return kind, None
    if not (number.isascii() and number.isdecimal()) or int(number) < _KINDS[kind].least:
        raise UserError(f"the policy {name!r} ends in {number!r}; {kind} wants a whole number of at least "
                        f"{_KINDS[kind].least}: write {kind}-{max(4, _KINDS[kind].least)}, for instance")
    return kind, int(number)


def policy_named(name: str, topology: Topology, drafter: Proposer) -> Policy:
    """The policy of this name for a drafter.

    Args:
        name: one of POLICIES, or such with a number.
        topology: the static tree fitted to the drafter, best node first.
        drafter: what is asked for the guesses.

    Raises:
        UserError: if the name, its number or the policy does not fit.
    """
    kind, number = parse_policy(name)
    reach = DYNAMIC_DEPTH if drafter.reach is None else min(drafter.reach, DYNAMIC_DEPTH)
    chosen = _KINDS[kind]
    policy = chosen.make(topology, max(chosen.least, chosen.default(topology)) if number is None else number, reach)
    policy.check(drafter)
    return policy


def _prefix(topology: Topology, size: int) -> Topology:
    if not 1 <= size <= topology.size:
        raise UserError(f"a tree of {size} nodes was asked for; this artifact's has {topology.size}: choose 1 to "
                        f"{topology.size}")
    return topology.prefix(size)


def _in_drawing_order(topology: Topology) -> Topology:
    """The same shape with siblings numbered as they come: a search may have found the sixth guess before the fifth."""
    drawn: Counter[int] = Counter()
    ranks = [0]
    for parent in topology.parents[1:]:
        ranks.append(drawn[parent])
        drawn[parent] += 1
    return Topology(topology.parents, tuple(ranks))
