"""Drafters that need no training, by name, as baselines of an evaluation.

Their trees are small, since on a CPU the time of a pass grows with its tokens.
"""

from ..drafters.mtp import Mtp, MtpConfig
from ..errors import UserError
from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from ..policies.static_tree import Chain, StaticTree
from ..target.model import Target
from .ngrams import NgramConfig, Ngrams
from .prompt_lookup import PromptLookup, PromptLookupConfig
from .self_speculation import every_other_layer, first_layers
from .token_recycling import TokenRecycling, recycling_tree

Baseline = tuple[Proposer, Policy]
"""A drafter and the policy that grows its trees."""


BASELINES = ("prompt_lookup", "suffix_match", "recycling", "ngrams", "layer_skip", "first_layers")
"""Prompt lookup, CopySpec, Token Recycling, ADED/STAND, SWIFT without its search, and the first quarter of the target's
layers."""
COPIED = 7
"""Tokens that prompt lookup copies."""
NATIVE = "native_head"
"""The baseline of targets with a head of their own."""


def baseline(name: str, target: Target, size: int | None = None) -> Baseline:
    """A new baseline for `target`, with an empty memory.

    Args:
        name: one of BASELINES, or NATIVE.
        target: what verifies its drafts.
        size: tokens of its chain, or nodes of its tree with the root, at least 1; None for its own.

    Raises:
        UserError: if there is none of that name, or the target cannot draft so.
    """
    device, vocab_size = target.device, target.vocab_size
    match name:
        case "prompt_lookup":
            copied = COPIED if size is None else size
            return PromptLookup(PromptLookupConfig(shortest=1, longest=3, copied=copied), device), Chain(copied)
        # CopySpec is prompt lookup that trusts long matches alone.
        case "suffix_match":
            copied = 10 if size is None else size
            return PromptLookup(PromptLookupConfig(shortest=3, longest=16, copied=copied), device), Chain(copied)
        case "recycling":
            return TokenRecycling(vocab_size, device), StaticTree(recycling_tree(16 if size is None else size))
        case "ngrams":
            tree = recycling_tree(8 if size is None else size)
            return Ngrams(NgramConfig(), vocab_size, device), StaticTree(tree)
        case "layer_skip":
            return every_other_layer(target), Chain(3 if size is None else size)
        case "first_layers":
            return first_layers(target), Chain(3 if size is None else size)
        case "native_head":
            # Like an artifact's drafter: trained weights are wider than what decodes.
            head = Mtp.create(MtpConfig(), target).to(dtype=target.dtype)
            head.bind(target)
            return head.eval(), Chain(3 if size is None else size)
    raise UserError(f"there is no baseline {name!r}; choose from {', '.join((*BASELINES, NATIVE))}")
