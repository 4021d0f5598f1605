"""Waits of the host and launches in a round of decoding, computed and as a record, on a device that is not there.

    python tests/benchmarks/host_waits.py [--family NAME ...]

Every operation of torch on the pretended device counts as one launch, views left out: of a target of two layers, so
that what a round launches besides its layers shows. A record, which stands for a CUDA graph, is one launch. Rows are
three, trees have five nodes; of rounds in which no row starts or ends the one that waits most counts.
"""

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import DecodeSettings, Loop, Request, StaticTree, Target, Topology
from draftsmith.modules.decoding import recorded_rounds
from support.devices.pretended_device import pretended_device
from support.devices.recorded_operations import Records
from support.devices.waits import WIDE, Way, drafted, on_device, plain
from support.families import CASES
from support.targets import random_target

ROWS, LENGTH, BEFORE, COUNTED = 3, 96, 3, 4
FAMILIES = ("medusa", "hydra++", "eagle3", "draft-lm")


def counted(target: Target, way: Way, *, graphs: bool) -> tuple[int, int, int]:
    """(waits, launches, records among them) of the steady round that waits most."""
    with pretended_device() as waits, patch.object(recorded_rounds, "recorder_for", lambda _device: records):
        records = Records(waits=waits)
        there = on_device(target)
        torch.manual_seed(0)
        drafter, policy = way(target, there)
        asked = [Request(tuple((7 + row + place) % 90 + 4 for place in range(9 + 3 * row)), row, LENGTH)
                 for row in range(ROWS)]
        passes = Loop(there, asked, DecodeSettings(batch_size=ROWS, ignore_eos=True, graphs=graphs), drafter=drafter,
                      policy=policy).run()
        found = list[tuple[int, int, int]]()
        for number in range(1 + BEFORE + COUNTED):
            waits.clear()
            former, repeated = records.replays, records.operations
            for _ in range(ROWS):
                next(passes)
            replays = records.replays - former
            launches = waits.operations - (records.operations - repeated) + replays
            found += [(waits.reads.total() + waits.uploads.total(), launches, replays)] if number > BEFORE else []
    return max(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--family", nargs="*", default=FAMILIES, choices=list(CASES), help="families that draft")
    options = parser.parse_args()
    ways: dict[str, tuple[Target, Way]] = {"no draft": (random_target(2), plain)}
    for name in options.family:
        target = CASES[name].verifier(random_target(2))
        ways[f"{name}, chain of 2"] = target, drafted(name, StaticTree(Topology.chain(2)))
        ways[f"{name}, tree of 5"] = target, drafted(name, StaticTree(WIDE))
    print("| a round of 3 rows | waits, computed | launches | waits, recorded | launches | of them records |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, (target, way) in ways.items():
        computed, recorded = (counted(target, way, graphs=graphs) for graphs in (False, True))
        print(f"| {name} | {computed[0]} | {computed[1]} | {recorded[0]} | {recorded[1]} | {recorded[2]} |")


if __name__ == "__main__":
    main()
