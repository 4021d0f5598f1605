"""Processes that answer the prompts of one run together: the first leads the command, the others help it to answer. And
the existing draft that may write training rows in place of the target, with the objectives that these suit."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import yaml

from ...data import Manifest, WantedStates, Writer, distill
from ...data.answers.distill_task import AUTO
from ...data.answers.shard_queue import clear_queue
from ...export import load_artifact
from ...export.stored_drafter import CONFIG
from ...modules import TargetConfig, UserError
from ...modules.files.atomic_files import file_sha256
from ...modules.files.folders import FolderLocks, has_locks
from ...modules.processes import Processes
from ...trainers import DraftModule
from ..reading.command_line import Parsed, process_words, trust_words
from ..recipe import Recipe, prompt_count
from ..terminal import HELPS, say
from .training_folder import refuse_growth
from .workspace import Workspace

LOCK = "workers.lock"  # File in a run's folder whose lock the leading process holds
RANK = "LOCAL_RANK"  # Variable of the environment that numbers the processes of a machine, as torchrun sets it
MOST_ON_CPU = 8  # Most processes of `auto` on a CPU, each with a copy of the target: more gain a small one nothing
MEMINFO = Path("/proc/meminfo")  # File in which Linux says how much memory is free
CGROUP = Path("/sys/fs/cgroup")  # Where a container's limit of memory stands, if it has one (cgroups, version 2)


def is_shared(recipe: Recipe) -> bool:
    """True if several processes may answer the prompts of a recipe."""
    return recipe.distill.workers is not None and recipe.data is None


def started_to_help() -> bool:
    """True if this process was started together with the one that leads, by it or by torchrun."""
    return HELPS in os.environ or Processes.launched().world > 1


@contextmanager
def leading(out: Path) -> Iterator[bool]:
    """Context that says whether this process leads the run in a folder: the first that asks, as long as it lives."""
    if HELPS in os.environ:
        yield False
        return
    locks = FolderLocks(out / LOCK)
    try:
        leads = locks.take(0)
        if not locks.work and started_to_help():
            raise UserError(f"the disk of {out} has no locks, without which processes share no folder; start one "
                            "process alone, or choose an --out on another disk")
        yield leads
    finally:
        locks.close()


def answers(workspace: Workspace, states: Sequence[WantedStates], *, grow: bool = True) -> Manifest:
    """The answers of the run, complete: by this process alone, or together with others where the recipe says so.
    Trainings will read the given states; with `grow`, data that others have completed with lower limits may grow."""
    recipe = workspace.recipe
    # What is measured for this machine is measured before the others start, who would disturb it; how many have room
    # follows from the memory of this one with its target.
    target, config, train_target = workspace.target, workspace.distill_config, workspace.train_target()
    # Of several processes each has one thread from the first held-out prompt on, whatever its processor has: a result
    # that depends on their number is then the same in all, also where one of them works alone.
    shared = is_shared(recipe) and most_shards(recipe) != 1 and has_locks(workspace.out)
    with helpers(workspace), one_thread() if shared else nullcontext():
        manifest = distill(target, recipe.prompts, config, workspace.template, workspace.data,
                        train_target=train_target, writer=writer_of(workspace), states=states,
                        progress=HELPS not in os.environ, grow=grow)
    clear_queue(workspace.data)
    return manifest


def help_to_answer(workspace: Workspace, states: Sequence[WantedStates]) -> None:
    """Answer prompts of a run that another process leads, until its answers are complete. Raises UserError as `answers`
    does, and if a training was made on these data.

    A process that was started together with the leading one may find complete data which that one is about to let
    grow."""
    refuse_growth(workspace, workspace.training)
    if workspace.answered_data is not None and not (started_to_help() and workspace.raised_limits):
        say("     another process leads this run, and its answers are complete")
        return
    say("     another process leads this run; this one helps to answer its prompts")
    workspace.check()
    # A process that came by itself would let the data grow under the run that has just completed them.
    answers(workspace, states, grow=started_to_help())
    say("     the answers are complete; the leading process goes on")


def on_own_device(workspace: Workspace) -> Workspace:
    """The workspace with the target on the GPU of this process's number, where the machine has several."""
    target, count = workspace.recipe.target, torch.cuda.device_count()
    if RANK not in os.environ or target.device not in ("auto", "cuda") or count < 2:
        return workspace
    device = f"cuda:{int(os.environ[RANK]) % count}"
    recipe = replace(workspace.recipe, target=replace(target, device=device))
    return Workspace(Parsed(values=recipe, settings=workspace.settings))


@contextmanager
def helpers(workspace: Workspace) -> Iterator[None]:
    """Context in which other processes of this machine help to answer, as many as `workers_here` says with this one;
    none where this process is one of several already, or the disk has no locks.

    They are killed at its end: that costs nothing but the shards that they were answering."""
    alone = RANK in os.environ or not has_locks(workspace.out)
    workers = 1 if alone else workers_here(workspace.recipe)
    if workers == 1:
        yield
        return
    processes: list[subprocess.Popen[bytes]] = []
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(workspace.settings, file, sort_keys=False)
        file.flush()
        try:
            for rank in range(1, workers):
                # A group of its own, so that Ctrl-C reaches the leading process alone; that says what a helper would.
                processes.append(subprocess.Popen(
                    process_words("distill", file.name, trust_words(workspace.recipe)), process_group=0,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, RANK: str(rank), HELPS: "1", "OMP_NUM_THREADS": "1"}))
            yield
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch computes with one thread."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def workers_here(recipe: Recipe) -> int:
    """Processes that answer on this machine, this one included, which has loaded the target.

    Where `auto` leaves threads of a processor idle, that is reported; a single shard is answered with all of them."""
    gpus = gpus_of(recipe.target)
    count = worker_count(recipe, gpus)
    if recipe.distill.workers != AUTO or gpus:
        return count
    threads, count = min(torch.get_num_threads(), MOST_ON_CPU), fitting(count, resident_bytes())
    if count < threads and most_shards(recipe) != 1:
        say(f"     {count} of {threads} threads answer, each in a process of its own: there are no more shards of "
            "prompts, or no more memory; distill.workers null answers with all threads of one process")
    return count


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


def writer_of(workspace: Workspace) -> Writer | None:
    """The draft that the recipe names; None where no draft writes."""
    config = workspace.recipe.distill
    if config.draft is None:
        return None
    # Nothing is counted yet; whether text is learnt follows from the settings alone.
    counts_V = torch.zeros(workspace.target.vocab_size, dtype=torch.long)
    require_teacher(workspace.recipe.module(workspace.target, counts_V))
    artifact = load_artifact(Path(config.draft), workspace.target, trust=workspace.recipe.trust)
    # By the artifact's config.json, which holds the hash of its weights.
    return Writer.of(artifact.drafter, file_sha256(Path(config.draft) / CONFIG))


def require_teacher(module: DraftModule) -> None:
    """Refuse to learn text that a draft wrote as if it were the target's. Raises UserError."""
    # Without a teacher the tokens are the labels, as if the target had written them.
    if not module.needs_teacher:
        raise UserError("a draft writes train rows, from which only the target's distribution can be learnt, but "
                        f"objective is {module.config.objective} and the text is learnt as it stands; choose another "
                        "objective, such as soft (and keep: target for Medusa-2), or distil without distill.draft")
