"""Drafters that need no training, by name, as baselines of an evaluation.

Their trees are small, since on a CPU the time of a pass grows with its tokens.
"""

from collections.abc import Callable

from ..errors import UserError
from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from ..policies.static_tree import Chain, StaticTree
from ..target.model import Target
from .ngram import NgramConfig, Ngrams
from .prompt_lookup import Lookup, LookupConfig
from .self_speculation import every_other_layer, first_layers
from .token_recycling import Recycling, recycling_tree

Baseline = tuple[Proposer, Policy]
"""A drafter and the policy that grows its trees."""


def _prompt_lookup(target: Target, copied: int = 7) -> Baseline:
    return Lookup(LookupConfig(shortest=1, longest=3, copied=copied), target.device), Chain(copied)


def _suffix_match(target: Target, copied: int = 10) -> Baseline:
    return Lookup(LookupConfig(shortest=3, longest=16, copied=copied), target.device), Chain(copied)


def _recycling(target: Target, nodes: int = 16) -> Baseline:
    return Recycling(target.vocab_size, target.device), StaticTree(recycling_tree(nodes))


def _ngrams(target: Target, nodes: int = 8) -> Baseline:
    return Ngrams(NgramConfig(), target.vocab_size, target.device), StaticTree(recycling_tree(nodes))


def _skipped_layers(target: Target, length: int = 3) -> Baseline:
    return every_other_layer(target), Chain(length)


def _first_layers(target: Target, length: int = 3) -> Baseline:
    return first_layers(target), Chain(length)


BASELINES: dict[str, Callable[..., Baseline]] = {
    "prompt_lookup": _prompt_lookup,
    "suffix_match": _suffix_match,
    "recycling": _recycling,
    "ngrams": _ngrams,
    "layer_skip": _skipped_layers,
    "first_layers": _first_layers,
}
"""Prompt lookup, CopySpec, Token Recycling, ADED/STAND, SWIFT without its search, and the first quarter of the target's
layers."""


def baseline(name: str, target: Target, size: int | None = None) -> Baseline:
    """A new baseline for `target`, with an empty memory.

    Args:
        name: one of BASELINES.
        target: what verifies its drafts.
        size: tokens of its chain, or nodes of its tree with the root, at least 1; None for its own.

    Raises:
        UserError: if there is none of that name.
    """
    if name not in BASELINES:
        raise UserError(f"there is no baseline {name!r}; choose from {', '.join(BASELINES)}")
    return BASELINES[name](target) if size is None else BASELINES[name](target, size)

