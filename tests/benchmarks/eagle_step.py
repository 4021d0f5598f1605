"""Time and peak memory of EAGLE-3's training steps: attention by segments, with a mask, and as one softmax.

    python tests/benchmarks/eagle_step.py --lengths 512 1024 --steps 3 7

*segments* is what training runs on a CPU, *masked* on other devices: both join the keys of a token's own position by
log-sum-exp. *textbook* takes one softmax over all keys. On a CPU the time is that of the process, on all its threads.

A measurement that needs more memory than is free (or than --memory GiB) is left out, with the reason in its row: the
textbook's scores of 4096 tokens and 7 steps alone take some 25 GiB.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import Features
from draftsmith.modules.drafters.eagle3 import WideBlock
from draftsmith.modules.drafters.parts.decoder_block import BlockConfig
from draftsmith.modules.drafters.parts.training_time_test import Rollout
from references.eagle import PlainRollout


def masked(features: Features) -> Rollout:
    """The rollout with a mask in place of segments."""
    rollout = Rollout(features)
    rollout.first = replace(rollout.first, spans=None)
    return rollout


WAYS = {"segments": Rollout, "masked": masked, "textbook": PlainRollout}
HEAD = 64
"""Components of a head."""
RESERVE = 0.8
"""Share of the free memory that a process may be expected to take."""


def textbook_bytes(length: int, steps: int, width: int) -> int:
    """Peak bytes of the textbook's attention: every step keeps its weights over all keys and their mask, and the last
    one also its scores before and after the mask."""
    seen = [length * length * (step + 1) for step in range(steps)]
    heads = width // HEAD
    return sum(seen) * (4 * heads + 1) + 2 * 4 * heads * seen[-1]


def free_bytes(device: str) -> int:
    """Free memory."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text(encoding="utf-8").splitlines() if meminfo.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def too_large(way: str, length: int, steps: int, width: int, room: float) -> str | None:
    """The reason to leave a measurement out; None where it fits."""
    needed = textbook_bytes(length, steps, width) if way == "textbook" else 0
    if needed <= room:
        return None
    return f"left out: would need {needed / 2**30:.2f} GiB, {room / 2**30:.2f} may be taken"


def row(length: int, each: int) -> Features:
    """A packed row of conversations of `each` tokens, the last one cut off."""
    order_1L = torch.arange(length)[None]
    return Features(tokens_BL=torch.ones_like(order_1L), supervised_BL=torch.ones_like(order_1L, dtype=torch.bool),
                    segments_BL=order_1L // each, positions_BL=order_1L % each)


def clock(device: str) -> float:
    """Seconds of this process; of the clock where another device works."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def once(way: str, length: int, steps: int, width: int, each: int) -> tuple[float, float]:
    """(seconds, MiB at the peak above what was held before) of forward and backward of one row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = width // HEAD
    block = WideBlock(BlockConfig(hidden_size=width, intermediate_size=2 * width, num_heads=heads,
                                  num_kv_heads=max(1, heads // 3), head_dim=HEAD)).to(device)
    features = row(length, each).to(device)
    read, embedded = torch.randn(2, 1, length, width, device=device)
    attentions, before, started = WAYS[way](features), peak(device), clock(device)
    total = torch.zeros((), device=device)
    for step in range(steps):
        read = block(embedded, read, attentions(step))
        total = total + read.square().mean()
    total.backward()
    held = peak(device) - before
    return clock(device) - started, held


def peak(device: str) -> float:
    """Largest memory so far, in MiB."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Print a table, each figure from a process of its own, since a peak never falls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of the row")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7], help="steps of the training-time test")
    parser.add_argument("--width", type=int, default=576, help="hidden size")
    parser.add_argument("--conversation", type=int, help="tokens of each conversation; the whole row by default")
    parser.add_argument("--memory", type=float, help="GiB that a process may take; 0.8 of what is free by default")
    parser.add_argument("--way", choices=[*WAYS], help="measure this one alone, here, without a table")
    given = parser.parse_args()
    if given.way:
        each = given.conversation or given.lengths[0]
        once(given.way, 64, given.steps[0], given.width, each)
        print(*once(given.way, given.lengths[0], given.steps[0], given.width, each))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| way | tokens | steps | seconds | MiB |\n|---|---|---|---|---|")
    for length in given.lengths:
        for steps in given.steps:
            for way in WAYS:
                room = RESERVE * free_bytes(device) if given.memory is None else given.memory * 2**30
                if (reason := too_large(way, length, steps, given.width, room)) is not None:
                    print(f"| {way} | {length} | {steps} | {reason} | |", flush=True)
                    continue
                words = [sys.executable, __file__, "--way", way, "--lengths", str(length), "--steps", str(steps),
                         "--width", str(given.width), "--conversation", str(given.conversation or length)]
                answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
                print(f"| {way} | {length} | {steps} | {float(answer[0]):.2f} | {float(answer[1]):.0f} |", flush=True)


if __name__ == "__main__":
    main()
