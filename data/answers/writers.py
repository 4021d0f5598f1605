"""Writers of the training rows: the target, the given text, a draft, or several by shares."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...modules import DecodeSettings, Drafter, UserError
from ...modules.decoding.requests import uniform_stream
from ...modules.policies.base import Policy
from ...modules.policies.sampled_tree import SampledTree
from ...modules.token_tree import Topology
from ...modules.verification.acceptance_rules import AcceptAll
from ..store.token_store import SOURCES, SourceName


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A draft that writes answers."""

    drafter: Drafter
    """Bound to the target."""
    policy: Policy
    """A chain, sampled from the draft in rows with a temperature."""
    digest: str
    """Hash of the artifact that it was loaded from."""

    @classmethod
    def of(cls, drafter: Drafter, tokens: int, digest: str) -> "Writer":
        """A draft that writes up to `tokens` tokens between two of the target's, at most its family's reach."""
        length = tokens if drafter.reach is None else min(tokens, drafter.reach)
        return cls(drafter=drafter, policy=SampledTree(Topology.chain(length)), digest=digest)

    def settings(self, settings: DecodeSettings) -> DecodeSettings:
        """Settings of a loop in which every token is accepted and the target adds one to each chain."""
        return replace(settings, lossy=AcceptAll())


def check_shares(mix: Mapping[str, float]) -> None:
    """Refuse shares of unknown writers, out of bounds, or that do not sum to 1. Raises UserError."""
    if unknown := sorted(set(mix) - set(SOURCES)):
        raise UserError(f"distill.mix knows {', '.join(SOURCES)}, got {', '.join(unknown)}")
    if not all(0 < share <= 1 for share in mix.values()) or not math.isclose(sum(mix.values()), 1, abs_tol=1e-6):
        shown = ", ".join(f"{name}: {share}" for name, share in mix.items())
        raise UserError(f"the shares of distill.mix must be above 0 and sum to 1, got {sum(mix.values()):g} ({shown})")


def source_of(number: int, shares: Mapping[SourceName, float], seed: int) -> SourceName:
    """Writer of the answers to prompt `number`: drawn by the shares, whatever came before it."""
    digest = hashlib.sha256(f"sources {seed}".encode()).digest()
    place = float(uniform_stream(int.from_bytes(digest[:8], "little"), number, 1)[0])
    names = [name for name in SOURCES if name in shares]
    for name in names:
        place -= shares[name]
        if place < 0:
            return name
    return names[-1]