"""Time and peak memory of EAGLE-3's training steps: scores joined by log-sum-exp, against one softmax over all keys.

    python tests/benchmarks/eagle_step.py --lengths 512 1024 --steps 3 7
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.modules import Features
from draftsmith.modules.blocks import BlockConfig
from draftsmith.modules.eagle3 import WideBlock
from draftsmith.modules.rollout import Rollout
from references.eagle import PlainRollout

WAYS = {"joined": Rollout, "textbook": PlainRollout}


def once(way: str, length: int, steps: int, width: int) -> tuple[float, float]:
    """(seconds, MiB at the peak above what stood there before) of forward and backward of one row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = width // 64
    block = WideBlock(BlockConfig(hidden_size=width, intermediate_size=2 * width, num_heads=heads,
                                  num_kv_heads=max(1, heads // 3), head_dim=64)).to(device)
    features = Features.from_rows([([1] * length, [True] * length)]).to(device)
    read, embedded = torch.randn(2, 1, length, width, device=device)
    sights, before, began = WAYS[way](features), peak(device), time.perf_counter()
    total = torch.zeros((), device=device)
    for step in range(steps):
        read = block(embedded, read, sights(step))
        total = total + read.square().mean()
    total.backward()
    held = peak(device) - before
    return time.perf_counter() - began, held


def peak(device: str) -> float:
    """The greatest memory so far, in MiB."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Print a table, each figure from a process of its own, since a peak cannot be taken back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--way", choices=[*WAYS])
    given = parser.parse_args()
    if given.way:
        once(given.way, 64, given.steps[0], given.width)
        print(*once(given.way, given.lengths[0], given.steps[0], given.width))
        return
    print("| way | tokens | steps | seconds | MiB |\n|---|---|---|---|---|")
    for length in given.lengths:
        for steps in given.steps:
            for way in WAYS:
                words = [sys.executable, __file__, "--way", way, "--lengths", str(length), "--steps", str(steps),
                         "--width", str(given.width)]
                answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
                print(f"| {way} | {length} | {steps} | {float(answer[0]):.2f} | {float(answer[1]):.0f} |", flush=True)


if __name__ == "__main__":
    main()
