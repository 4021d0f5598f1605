"""Writers of the training rows: the target, the given text, a draft, or several by shares."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ...modules import Drafter
from ...modules.decoding.requests import uniform_stream
from ...modules.policies.base import Policy
from ...modules.policies.sampled_tree import SampledTree
from ...modules.token_tree import Topology
from ..store.token_store import SOURCES, SourceName

DRAFT_TOKENS = 4  # Written in a row; one of the target's follows, which gives the draft new states to read


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A draft that writes answers."""

    drafter: Drafter  # Bound to the target
    policy: Policy  # A chain, sampled from the draft in rows with a temperature
    digest: str  # Hash of the artifact that it was loaded from

    @classmethod
    def of(cls, drafter: Drafter, digest: str) -> "Writer":
        """A draft that writes DRAFT_TOKENS tokens between two of the target's, or as many as its family reaches."""
        length = DRAFT_TOKENS if drafter.reach is None else min(DRAFT_TOKENS, drafter.reach)
        return cls(drafter=drafter, policy=SampledTree(Topology.chain(length)), digest=digest)


def source_of(number: int, shares: Mapping[SourceName, float], seed: int) -> SourceName:
    """Writer of the answers to prompt `number`: drawn by the shares, whatever came before it."""
    # A stream of its own: prompts and answers are drawn from this seed too.
    digest = hashlib.sha256(f"sources {seed}".encode()).digest()
    place = float(uniform_stream(int.from_bytes(digest[:8], "little"), number, 1)[0])
    names = [name for name in SOURCES if name in shares]
    for name in names:
        place -= shares[name]
        if place < 0:
            return name
    return names[-1]
