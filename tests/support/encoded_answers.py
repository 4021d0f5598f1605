"""Held-out answers of a target, encoded."""

from collections.abc import Sequence

from draftsmith.modules import (
    Acceptance,
    DecodeSettings,
    Drafter,
    Features,
    Replay,
    Request,
    StaticTree,
    Target,
    Topology,
    decode,
)
from draftsmith.modules.tuning.tree_search import acceptance_of


def encoded_answers(target: Target, requests: list[Request]) -> list[Features]:
    result = decode(target, requests, DecodeSettings(batch_size=4))
    rows = [([*g.request.tokens, *g.tokens], [False] * len(g.request.tokens) + [True] * len(g.tokens))
            for g in result.generations]
    return [target.encode(Features.from_rows(rows[:3])), target.encode(Features.from_rows(rows[3:]))]


def replay(drafter: Drafter, target: Target, features: Sequence[Features], topology: Topology) -> Acceptance:
    """The acceptance of a static tree by decoding stored answers, in place of a walk along their ranks."""
    source = Replay(target, features, drafter=drafter)
    result = decode(source, source.requests, DecodeSettings(batch_size=8), drafter=drafter, policy=StaticTree(topology))
    return acceptance_of([count for one in result.generations for count in one.emitted], topology.depth)
