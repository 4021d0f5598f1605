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
from .lookahead_trees import LookaheadTrees, ahead_trees
from .sampled_tree import SampledTree
from .static_tree import StaticTree
from .stopping_chains import StoppedChain
from .stopping_rules import EarlyExit, MaxProbability

STATIC = "static"
"""The kind that an artifact was tuned for."""
NONE = "none"
"""The kind that drafts nothing: the target decodes alone."""
SPECDEC = "specdec"
"""The kind that needs an acceptance head, which an artifact holds."""
SPARSE = "sparse"
"""The kind for drafters with virtual nodes."""
DYNAMIC_DEPTH = 6
"""Levels of a growing tree, where the family answers as many."""
DYNAMIC_WIDTH = 10
"""Nodes expanded on a level of a growing tree."""
MOST = 1024
"""Largest number in a name, in nodes or tokens: a pass over more takes longer than any accepted path gives back."""
CONFIDENCE = 0.4
"""Below this probability of its next token a stopping chain ends."""


@dataclass(frozen=True)
class _Kind:
    """A way to draft."""

    make: Callable[[Topology, int, Proposer], Policy]
    """From the artifact's tree, the number in the name and the drafter."""
    default: Callable[[Topology, Proposer], int]
    """The number where the name has none."""
    least: int
    """The smallest number."""
    share: bool = False
    """Whether the number lies between 0 and 1."""


def _static(topology: Topology, size: int, _drafter: Proposer) -> Policy:
    return StaticTree(_prefix(topology, size))


def _none(_topology: Topology, _size: int, _drafter: Proposer) -> Policy:
    return StaticTree(Topology.chain(0))


def _sampled(topology: Topology, size: int, _drafter: Proposer) -> Policy:
    return SampledTree(_in_drawing_order(_prefix(topology, size)))


def _eagle2(_topology: Topology, nodes: int, drafter: Proposer) -> Policy:
    return Eagle2Tree(nodes=nodes, depth=_levels(drafter), width=DYNAMIC_WIDTH)


def _dyspec(_topology: Topology, nodes: int, drafter: Proposer) -> Policy:
    return DySpecTree(nodes=nodes, depth=_levels(drafter), width=DYNAMIC_WIDTH)


def _chain(_topology: Topology, length: int, _drafter: Proposer) -> Policy:
    return StaticTree(Topology.chain(length))


def _sampled_chain(_topology: Topology, length: int, _drafter: Proposer) -> Policy:
    return SampledTree(Topology.chain(length))


def _stopping(_topology: Topology, length: int, _drafter: Proposer) -> Policy:
    return StoppedChain(length, MaxProbability(CONFIDENCE))


def _early_exit(_topology: Topology, length: int, drafter: Proposer) -> Policy:
    return StoppedChain(length, EarlyExit(drafter.chain_limits.eta))


def _specdec(_topology: Topology, _length: int, _drafter: Proposer) -> Policy:
    raise UserError(f"the policy {SPECDEC} needs an acceptance head; train one for an artifact with draftsmith "
                    "specdec, and draft with that artifact")


def _sparse(_topology: Topology, nodes: int, drafter: Proposer) -> Policy:
    chances_KR = drafter.rank_chances
    if chances_KR is None:
        raise UserError(f"the policy {SPARSE} needs a drafter with virtual nodes, whose guesses were counted on "
                        f"held-out text when its artifact was made; this is {drafter.family}: choose another policy")
    return LookaheadTrees(ahead_trees(chances_KR, nodes))


def _levels(drafter: Proposer) -> int:
    return DYNAMIC_DEPTH if drafter.reach is None else min(drafter.reach, DYNAMIC_DEPTH)


def _nodes(topology: Topology, _drafter: Proposer) -> int:
    return topology.size


def _pass_nodes(topology: Topology, drafter: Proposer) -> int:
    """As many as a pass over the static tree has, at least a guess and the virtual nodes of the root."""
    return max(topology.size, 2) * (1 + drafter.virtual_nodes)


def _root(_topology: Topology, _drafter: Proposer) -> int:
    return 1


def _length(topology: Topology, _drafter: Proposer) -> int:
    return max(1, topology.depth)


def _gamma(_topology: Topology, drafter: Proposer) -> int:
    return drafter.chain_limits.gamma


_KINDS: dict[str, _Kind] = {
    STATIC: _Kind(_static, _nodes, 1),
    "chain": _Kind(_chain, _length, 1),
    "sampled": _Kind(_sampled, _nodes, 1),
    "sampled-chain": _Kind(_sampled_chain, _length, 1),
    "eagle2": _Kind(_eagle2, _nodes, 2),
    "dyspec": _Kind(_dyspec, _nodes, 2),
    "stopping": _Kind(_stopping, _length, 1),
    "early-exit": _Kind(_early_exit, _gamma, 1),
    SPARSE: _Kind(_sparse, _pass_nodes, 2),
    SPECDEC: _Kind(_specdec, _length, 1, share=True),
    NONE: _Kind(_none, _root, 1),
}
POLICIES = tuple(_KINDS)
"""The artifact's tree, tuned for this machine or cut to N nodes (root included); its likeliest N tokens; the tree and
the chain with sampled tokens (RSD-C, arXiv:2402.14160); EAGLE-2's and DySpec's growing trees of N nodes
(arXiv:2406.16858, 2410.11744); chains of at most N tokens that end before the first unsure token, or after it where the
drafter's own limits say so (Kangaroo, arXiv:2404.18911); trees of N nodes, virtual ones included, for each number of
guesses that a row has (PPD, arXiv:2405.18628); chains that end once an acceptance head sees a risk of rejection above
the number, such as specdec-0.7 (arXiv:2405.19715); no draft at all."""


def parse_policy(name: str) -> tuple[str, float | None]:
    """The kind that a name asks for, and its number: a whole one, except for the risk of `specdec`.

    Raises:
        UserError: if there is no such kind, or the number is none or out of its range.
    """
    kind, hyphen, number = name.rpartition("-") if name not in _KINDS else (name, "", "")
    if kind not in _KINDS:
        raise UserError(f"there is no policy {name!r}; choose from {', '.join(POLICIES)}, with a number of nodes or "
                        "tokens after a hyphen where you like, such as chain-3 or eagle2-32")
    if not hyphen:
        return kind, None
    if kind == NONE:
        raise UserError(f"the policy {name!r} ends in {number!r}; {NONE} drafts nothing: leave the number out")
    if _KINDS[kind].share:
        return kind, _share(name, kind, number)
    digits = number.isascii() and number.isdecimal() and len(number) <= len(str(MOST))
    if not digits or not _KINDS[kind].least <= int(number) <= MOST:
        raise UserError(f"the policy {name!r} ends in {number!r}; {kind} wants a whole number of at least "
                        f"{_KINDS[kind].least} and at most {MOST}; choose one")
    return kind, int(number)


def _share(name: str, kind: str, number: str) -> float:
    found = float(number) if number.replace(".", "", 1).isdecimal() else 0.0
    if not 0 < found < 1:
        raise UserError(f"the policy {name!r} ends in {number!r}; {kind} wants a number above 0 and below 1, such as "
                        f"{kind}-0.7")
    return found


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
    chosen = _KINDS[kind]
    size = max(chosen.least, chosen.default(topology, drafter)) if number is None else int(number)
    policy = chosen.make(topology, size, drafter)
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
