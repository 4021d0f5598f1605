"""Number of the processes of this machine that answer the prompts of a recipe together."""

import resource
import sys
from pathlib import Path

import torch

from ...data import ReadPrompts
from ...modules import TargetConfig
from ..recipe import Recipe

MOST_ON_CPU = 8  # Most processes of `auto` on a CPU, each with a copy of the target: more gain a small one nothing
MEMINFO = Path("/proc/meminfo")  # File in which Linux says how much memory is free
CGROUP = Path("/sys/fs/cgroup")  # Where a container's limit of memory stands, if it has one (cgroups, version 2)


def worker_count(recipe: Recipe, gpus: int | None) -> int:
    """Processes that answer here: never more than GPUs, where it has some, or than shards of prompts. `gpus` is that of
    `gpus_of`; None for GPUs that are not here, whose number the recipe alone can tell."""
    asked = recipe.distill.workers
    if asked is None:
        return 1
    if isinstance(asked, int):
        wanted = min(asked, gpus or asked)
    else:
        wanted = 1 if gpus is None else gpus or min(torch.get_num_threads(), MOST_ON_CPU)
    shards = most_shards(recipe)
    return wanted if shards is None else max(1, min(wanted, shards))


def on_gpu(target: TargetConfig) -> bool:
    """True for a target on a GPU: on one that is here, or that the recipe names wherever it is."""
    kind = target.device.partition(":")[0]
    return kind == "cuda" or (kind == "auto" and torch.cuda.is_available())


def gpus_of(target: TargetConfig) -> int:
    """GPUs that hold one copy of the target each: one where the recipe names it or spreads the target; 0 on a CPU."""
    if not (torch.cuda.is_available() and on_gpu(target)):
        return 0
    chosen = target.device not in ("auto", "cuda") or target.placement != "replicated"
    return 1 if chosen else torch.cuda.device_count()


def prompt_count(recipe: Recipe) -> int | None:
    """Number of a recipe's prompts, None where nothing limits it; UserError if their file cannot be read."""
    prompts = recipe.prompts
    if prompts.origin == "file" and Path(prompts.path or "").is_file():
        return ReadPrompts(prompts, recipe.distill.seed).total
    return prompts.limit


def most_shards(recipe: Recipe) -> int | None:
    """Most shards that the train prompts of a recipe make; None where nothing limits them. Raises as `prompt_count`."""
    count, config = prompt_count(recipe), recipe.distill
    if count is None:
        return None
    return max(0, -(-(count - config.validation_prompts - config.test_prompts) // config.shard_prompts))


def fitting(count: int, resident: int) -> int:
    """As many of `count` processes, this one included, as fit into memory, each twice as large as this one is now:
    `resident` bytes, its target loaded and its cache not made."""
    # Bytes that processes can still take, of the machine and within its container's limit.
    known = []
    if MEMINFO.is_file():
        known += [int(line.split()[1]) * 1024 for line in MEMINFO.read_text().splitlines() if "MemAvailable" in line]
    limit, used, details = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if all(file.is_file() for file in (limit, used, details)) and limit.read_text().strip() != "max":
        # Pages of files count as used, but are given back.
        files = dict(line.split() for line in details.read_text().splitlines()).get("inactive_file", "0")
        known.append(int(limit.read_text()) - int(used.read_text()) + int(files))
    if not known:
        return count
    # This one grows too.
    return min(count, max(1, (max(0, min(known)) + resident) // (2 * resident)))


def resident_bytes() -> int:
    """Memory of this process: the interpreter with the libraries that every stage has loaded too."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
