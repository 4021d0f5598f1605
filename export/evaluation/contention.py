"""Contention: whether other programs slow this machine down, before and while decoding is timed."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...modules import Target, TokenTree, Topology

CONTENTION_BOUND = 0.15  # Share by which a repeated pass may exceed its fastest time before the machine counts as busy
PROBED_SIZES = (1, 8)  # Tokens of the passes that are repeated throughout
REPEATS = 5  # Passes of each size a sample; their median counts
PROBE_CONTEXT = 32  # Tokens that the probed row has read
PROCESSOR_TIMES = Path("/proc/stat")  # Time of each processor since the machine started, by kind of work (Linux)


class ContentionProbe:
    """Repeats a pass of one token and one of eight: a busy machine slows the second far more than the first."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.context = context = min(PROBE_CONTEXT, target.context_length - max(PROBED_SIZES))
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
        for size, seconds in self.samples.items():
            seconds.append(median(self._pass_seconds(size) for _ in range(REPEATS)))

    @property
    def excess(self) -> dict[int, float]:
        """Excess of the slowest sample over the fastest, as a share of it, by size; 0.0 with fewer than two samples."""
        return {size: max(seconds) / min(seconds) - 1 if seconds else 0.0 for size, seconds in self.samples.items()}

    @property
    def contended(self) -> bool:
        """True if any sample exceeded the fastest by more than the bound."""
        return max(self.excess.values()) > CONTENTION_BOUND

    def to_dict(self) -> dict[str, Any]:
        """The samples in short, for the header of an evaluation."""
        return {"bound": CONTENTION_BOUND,
                "best_seconds": {str(size): min(seconds) for size, seconds in self.samples.items() if seconds},
                "worst_excess": {str(size): excess for size, excess in self.excess.items()},
                "samples": len(self.samples[PROBED_SIZES[0]])}

    def _pass_seconds(self, size: int) -> float:
        started = clock(self.target)
        # Never committed: the next pass overwrites it.
        self.rows.run(self.trees[size])
        return clock(self.target) - started


def busy_warning(**looking: Any) -> str | None:
    """Sentence for a machine on which other programs leave fewer free processors than torch has threads; else None.

    It needs no target, so that a run can report it before its first stage. `looking` as of `_idle_shares`."""
    idle = _idle_shares(**looking)
    threads = min(torch.get_num_threads(), len(idle))
    taken = 1 - sum(idle) / threads if threads else 0.0
    return None if taken <= CONTENTION_BOUND else (
        f"the machine is busy: other programs take {taken:.0%} of the processor time that this run needs, so that it "
        "will take longer, or leave work out where minutes limit it, and the speeds in its report will not be "
        "reliable; stop other programs, or measure again with draftsmith evaluate when the machine is quiet")


def use_free_processors(**looking: Any) -> None:
    """Let torch have only as many threads as processors are free, one at least; `looking` as of `_idle_shares`.

    Threads of a pass wait for each other at every layer: next to other programs one is up to ten times as fast as two
    (`tests/benchmarks/pass_cost.py --waiting`)."""
    free = threads = torch.get_num_threads()
    # A program that ends just now is seen by the first look alone.
    for seconds in (0.3, 2.0) if threads > 1 else ():
        idle = _idle_shares(seconds=seconds, **looking)
        if not idle or (free := max(1, round(sum(idle)))) >= threads:
            return
    torch.set_num_threads(free)


def _idle_shares(*, seconds: float = 0.5, times: Path = PROCESSOR_TIMES,
                 sleep: Callable[[float], object] = time.sleep) -> list[float]:
    """Share of some seconds that each processor is idle while this process sleeps; none where `times`, the system's
    file, does not exist. A load average would still count programs that ended a minute ago, and timing a loop would
    notice a second busy processor only with as many threads as decoding uses."""
    if not times.is_file():
        return []
    before = _processor_times(times)
    sleep(seconds)
    after = _processor_times(times)
    return [(after[name][0] - before[name][0]) / max(1, after[name][1] - before[name][1])
            for name in before.keys() & after.keys()]


def _processor_times(path: Path) -> dict[str, tuple[int, int]]:
    """(idle, all) ticks of each processor that this process may use."""
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    found: dict[str, tuple[int, int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, fields = line.partition(" ")
        if name in allowed:
            # user, nice, system, idle, waiting for a disk, two kinds of interrupts, taken by the hypervisor; what
            # follows is part of the first two.
            ticks = [int(field) for field in fields.split()[:8]]
            found[name] = (ticks[3] + ticks[4], sum(ticks))
    return found


def clock(target: Target) -> float:
    """Seconds of a monotonic clock, once the device has finished its work."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order that starts with another one each turn, so that none always comes first."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def machine(target: Target) -> dict[str, Any]:
    """The machine of an evaluation: processor, device, number format, threads and versions, but no host name."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
    return {
        "machine": {"processor": processor(), "device": device, "system": platform.system()},
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(),
                     **{name: version(name) for name in ("draftsmith", "torch", "transformers")}},
    }


def processor() -> str:
    """The processor's model name where the system reports it, else its architecture."""
    # Python reports an architecture at most on Linux, which says nothing of the speed.
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
