"""Waits of the host: reads from the device, uploads to it and operations of a pass, by family and policy.

    python tests/benchmarks/host_waits.py [--only NAME]

Counted on a device that is not there (tests/support/pretended_device.py), with a tiny random target of two layers, in
passes of three rows of which none starts or ends. Views are no operations.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import (
    Chain,
    DySpecTree,
    Eagle2Tree,
    MaxProbability,
    Policy,
    StaticTree,
    StoppedChain,
    Target,
)
from draftsmith.modules.baselines.registry import BASELINES, baseline
from draftsmith.modules.baselines.token_recycling import recycling_tree
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.families import CASES, randomised
from support.steady_waits import GREEDY, MIXED, Way, moved, steady
from support.tree_shapes import branching

FAMILIES = ("medusa", "hydra++", "eagle", "eagle3", "falcon", "kangaroo", "prompt-tokens", "hidden-transfer",
            "draft-lm", "draft-lm-depths")
"""Cases of the families that are counted with a tree of two levels."""
POLICIES: dict[str, Policy] = {
    "chain of 3": Chain(3),
    "tree of 16": StaticTree(recycling_tree(16, 3)),
    "EAGLE-2, 9 nodes": Eagle2Tree(9, 3, 4),
    "DySpec, 9 nodes": DySpecTree(9, 3, 4),
    "sampled tree 2x2x1": branching(2, 2, 1),
    "stopping chain of 4": StoppedChain(4, MaxProbability(1e-9)),
}
"""Policies that are counted with each of some families."""


def drafted(name: str, policy: Policy) -> Way:
    """A family's drafter with random weights."""
    return lambda origin, there: (moved(randomised(CASES[name].make(origin)), there), policy)


def ways() -> Iterator[tuple[str, str, Way]]:
    """(drafter, policy, both) of each line."""
    yield "none", "", lambda _origin, _there: (None, None)
    for name in BASELINES:
        yield name, "its own", lambda _origin, there, name=name: baseline(name, there)
    for name in FAMILIES:
        yield name, "tree of 5", drafted(name, StaticTree(recycling_tree(5, 2)))
    for name in ("medusa", "eagle3", "draft-lm"):
        for title, policy in POLICIES.items():
            yield name, title, drafted(name, policy)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="drafter that is counted alone")
    options = parser.parse_args()
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny-random")
    print("| drafter | policy | greedy: reads | uploads | operations | sampled: reads | uploads | operations |")
    print("|" + "---|" * 8)
    for name, title, way in ways():
        if options.only in (None, name):
            counts = [steady(target, way, temperatures) for temperatures in (GREEDY, MIXED)]
            cells = [f"{one.reads.total()} | {one.uploads.total()} | {one.operations}" for one in counts]
            print(f"| {name} | {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
