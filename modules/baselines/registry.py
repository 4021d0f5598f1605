"""Drafters that need no training, by name: baselines of an evaluation, and partners of a trained draft in the name of a
policy, such as static+lookup and eagle2-32+ngrams. Among them is self-speculation: some of the target's layers as the
draft model, the others skipped (SWIFT arXiv:2410.06916, Draft & Verify arXiv:2309.08168), or its first layers only.

After the plus stands one of PARTNERS, with a number of tokens (of a chain) or nodes (of a tree) after a hyphen where
one likes: static-6+lookup-5. Its guesses come first, so that the draft's tree is cut where a union has fewer nodes.

Shapes: B rows, F new tokens, W cache slots in use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..families.mtp.drafter import Mtp, MtpConfig
from ..interfaces.proposer import Proposer, Scores
from ..parts.causal_drafter import CausalDraft
from ..parts.decoder_block import AttentionContext
from ..policies.base import Policy
from ..policies.ensemble import Ensemble, Union, whole_size
from ..policies.paid import PaidTree
from ..policies.registry import FASTEST, NONE, STATIC, parse_policy, whole_number
from ..policies.trees import Chain, SampledTree, StaticTree
from ..target.attention.segment_attention import mask_arguments
from ..target.attention.tree_attention import place_arguments
from ..target.model import Target
from ..target.partial_passes import skipping
from .memories import Ngrams, PromptLookup, ReferenceCopy, TokenRecycling, recycling_tree

LOOKUP = "lookup"  # The partner whose chain is sized for an artifact
REFERENCE = "reference"  # The partner that copies from a request's reference
JOINED = f"{STATIC}+{LOOKUP}"  # The joined policy that an artifact is tuned for
COPIED = 7  # Tokens that prompt lookup copies
NATIVE = "native_head"  # The baseline of targets with a head of their own


class _Kind(NamedTuple):
    partner: str | None  # Its name in a policy; None where it joins none
    drafter: Callable[[Target, int], Proposer]  # A new one with an empty memory, for a chain or tree of a size
    size: int  # Small, since on a CPU the time of a pass grows with its tokens
    tree: bool = False  # Its size counts the nodes of a tree, the root included, and not the tokens of a chain
    samples: bool = False  # Its tree is drawn from its own distribution above temperature 0, where it drafts alone


def _native_head(target: Target, _: int) -> Proposer:
    """The head in the target's files; like an artifact's drafter, its trained weights are wider than what decodes."""
    head = Mtp.create(MtpConfig(), target).to(dtype=target.dtype)
    head.bind(target)
    return head.eval()


_KINDS = {
    "prompt_lookup": _Kind(LOOKUP, lambda target, size: PromptLookup(target.device, copied=size), COPIED),
    # CopySpec is prompt lookup that trusts long matches alone.
    "suffix_match": _Kind("suffix", lambda target, size: PromptLookup(
        target.device, shortest=3, longest=16, copied=size), 10),
    "reference": _Kind(REFERENCE, lambda target, size: ReferenceCopy(target.device, copied=size), 32),
    "recycling": _Kind("recycling", lambda target, _: TokenRecycling(target.vocab_size, target.device), 16, tree=True),
    # ADED and STAND.
    "ngrams": _Kind("ngrams", lambda target, _: Ngrams(target.vocab_size, target.device), 16, tree=True, samples=True),
    # Without a search, every second one of the layers between the first and the last is skipped.
    "layer_skip": _Kind("layer_skip", lambda target, _: LayerDraft(
        target, target.kept_layers or sorted({*range(0, target.num_layers, 2), target.num_layers - 1})), 3),
    # A quarter of the target's layers.
    "first_layers": _Kind("first_layers", lambda target, _: LayerDraft(
        target, range(max(1, target.num_layers // 4))), 3),
    # For requests with a shorter text for the draft (RAPID, arXiv:2502.20754); else it only repeats the target's work.
    "whole_target": _Kind("whole_target", lambda target, _: LayerDraft(target, range(target.num_layers)), 3),
    NATIVE: _Kind(None, _native_head, 3),
}
PARTNERS = {kind.partner: name for name, kind in _KINDS.items() if kind.partner is not None}  # By names in policies
BASELINES = tuple(PARTNERS.values())


def baseline(name: str, target: Target, size: int | None = None) -> tuple[Proposer, Policy]:
    """A new baseline, one of BASELINES or NATIVE, and the policy that grows its trees: of `size` tokens of a chain, or
    nodes of a tree with the root; None for its own. UserError if there is none, or the target cannot draft so."""
    if (kind := _KINDS.get(name)) is None:
        raise UserError(f"there is no baseline {name!r}; choose from {', '.join(_KINDS)}")
    size = kind.size if size is None else size
    policy = StaticTree(recycling_tree(size)) if kind.tree else Chain(size)
    return kind.drafter(target, size), SampledTree(policy.topology.numbered()) if kind.samples else policy


@dataclass(frozen=True, kw_only=True)
class PolicyName:
    """The parts of a policy's name."""

    own: str  # Policy of the trained draft
    partner: str | None = None  # One of PARTNERS; None where nothing is joined
    size: int | None = None  # Number in the partner's name


def parse_joined(name: str) -> PolicyName:
    """The parts of a policy's name, with or without a partner. Raises UserError if there is no such policy or partner,
    or a number is out of its range."""
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
    return PolicyName(own=own, partner=known, size=whole_number(
        name, known, number, 2 if _KINDS[PARTNERS[known]].tree else 1))


def with_reference(name: str) -> str:
    """The policy of this name where a request has a reference: by default static+reference. Raises UserError if it
    copies from none."""
    if name == FASTEST:
        return f"{STATIC}+{REFERENCE}"
    if (parts := parse_joined(name)).partner != REFERENCE:
        raise UserError(f"a reference was given, and the policy {name} copies from none; ask for "
                        f"{parts.own}+{REFERENCE}, or leave the policy or the reference out")
    return name


def joined_drafter(name: PolicyName, drafter: Proposer, target: Target) -> Proposer:
    """The drafter, next to a new partner with an empty memory where the name has one."""
    if name.partner is None:
        return drafter
    return Ensemble([baseline(PARTNERS[name.partner], target, name.size)[0], drafter])


def joined_policy(name: PolicyName, own: Policy, target: Target) -> Policy:
    """The draft's policy, joined with the partner's where the name has one; a pass has room for all nodes of both."""
    if name.partner is None:
        return own
    found = baseline(PARTNERS[name.partner], target, name.size)[1]
    # A union draws its last part alone.
    partner = StaticTree(found.topology) if isinstance(found, SampledTree) else found

    def join(tree: Policy) -> Policy:
        return Union([partner, tree], whole_size([partner, tree]))

    return own.joined(join) if isinstance(own, PaidTree) else join(own)


class LayerDraft(CausalDraft):
    """Draft model of the target's layers `kept`, ascending, with its embedding, last norm and output layer; nothing is
    copied. It has a cache of its own and reads the prompt itself: its states are those of a model that consists of the
    kept layers. The papers let the skipping pass read the target's cache, whose keys come from the whole model: that
    saves this cache and reading the prompt, and the kept layers then attend to better states than they could have
    computed. For the first layers of a target both are the same states, computed twice here. Raises UserError if `kept`
    is empty, unordered or beyond the target, or its layers cannot be run apart."""

    family = "layers"

    def __init__(self, target: Target, kept: Sequence[int]) -> None:
        target.require_plain_layers("self-speculation")
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= target.num_layers:
            raise UserError(
                f"the layers kept must be ascending numbers from 0 to {target.num_layers - 1}, at least one; "
                f"got {tuple(kept)}")
        self.target, self.kept, self.num_layers = target, tuple(kept), target.num_layers
        self.cache_groups = target.cache_groups

    @property
    def device(self) -> torch.device:
        return self.target.device

    def run(self, tokens_BF: Tensor, attention: AttentionContext, key_positions_BW: Tensor,
            given_BFD: Tensor | None = None) -> Tensor:
        with skipping(self.target.layers, self.kept):
            embedded_BFD = self.target.embed_guesses(tokens_BF)
            # Guesses may reach beyond the context, position ids may not; such guesses are cut off with the answer.
            return self.target.decoder(  # type: ignore[no-any-return]
                inputs_embeds=embedded_BFD,
                past_key_values=attention.cache,
                use_cache=True,
                **self.target.looked_up(tokens_BF),
                **place_arguments(attention.positions_BN.clamp(max=self.target.context_length - 1), key_positions_BW),
                **mask_arguments(attention.visible_BNW, self.target.decoder, embedded_BFD),
            ).last_hidden_state

    def read_out(self, final: Tensor) -> Scores:
        return Scores.from_logits(self.target.logits(final), states_BFHD=final)
