"""Seconds: the ways to decode take turns on the same prompts in one process, and a probe watches the machine."""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...modules import Target, TokenTree, Topology

CONTENTION_BOUND = 0.15
"""How far a repeated pass may leave its best before the machine counts as busy with something else."""
PROBED_SIZES = (1, 8)
"""Tokens of the passes that are repeated throughout."""
REPEATS = 5
"""Passes of each size a sample; their median counts."""
PROBE_CONTEXT = 32
"""Tokens that the probed row has read."""


class ContentionProbe:
    """Repeats a pass of one token and one of eight: a busy machine slows the second far more than the first."""

    def __init__(self, target: Target) -> None:
        self.target = target
        context = min(PROBE_CONTEXT, target.context_length - max(PROBED_SIZES))
        self.rows = target.start(1, context + max(PROBED_SIZES))
        tokens_BN = torch.arange(context, device=target.device)[None] % target.vocab_size
        counts_B = torch.tensor([context], device=target.device)
        self.rows.run(TokenTree.prompts(tokens_BN, counts_B))
        self.rows.commit(torch.arange(context, device=target.device)[None], counts_B, [context], moved=False)
        self.trees = {size: Topology.chain(size - 1).plant(tokens_BN[:, :size]) for size in PROBED_SIZES}
        self.samples: dict[int, list[float]] = {size: [] for size in PROBED_SIZES}
        self._pass_seconds(max(PROBED_SIZES))

    def sample(self) -> None:
        """Measure both sizes once more."""
        for size in PROBED_SIZES:
            self.samples[size].append(median(self._pass_seconds(size) for _ in range(REPEATS)))

    @property
    def excess(self) -> dict[int, float]:
        """By size: how far its worst sample left its best, as a share of the best; 0.0 with fewer than two samples."""
        return {size: max(seconds) / min(seconds) - 1 if seconds else 0.0 for size, seconds in self.samples.items()}

    @property
    def contended(self) -> bool:
        """Whether any sample left its best by more than the bound."""
        return max(self.excess.values()) > CONTENTION_BOUND

    def to_dict(self) -> dict[str, Any]:
        """What the probe saw, for the header of an evaluation."""
        return {"bound": CONTENTION_BOUND,
                "best_seconds": {str(size): min(seconds) for size, seconds in self.samples.items() if seconds},
                "worst_excess": {str(size): excess for size, excess in self.excess.items()},
                "samples": len(self.samples[PROBED_SIZES[0]])}

    def _pass_seconds(self, size: int) -> float:
        started = clock(self.target)
        # Never committed: the next pass overwrites it.
        self.rows.run(self.trees[size])
        return clock(self.target) - started


def clock(target: Target) -> float:
    """Seconds of a monotonic clock, once the device has finished its work."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order that starts with another one each turn, so that no way always comes first."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def machine(target: Target) -> dict[str, Any]:
    """Where an evaluation ran: processor, device, number format, threads and versions; no name of the machine."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
    return {
        "machine": {"processor": processor(), "device": device, "system": platform.system()},
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(),
                     **{name: version(name) for name in ("draftsmith", "torch", "transformers")}},
    }


def processor() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
