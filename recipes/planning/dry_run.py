"""A recipe tried on the target's shape alone, so that a misfit is reported before hours of work; and the number of the
processes of this machine that answer its prompts together.
"""

import resource
import shutil
import sys
from pathlib import Path
from typing import Literal

import torch

from ...data import Manifest, ReadPrompts, WantedStates
from ...data.store.feature_shards import format_named, unlisted
from ...data.store.feature_store import in_words, nearest
from ...data.store.token_store import MANIFEST
from ...modules import FASTEST, Target, TargetConfig, Topology, UserError, parse_joined, policy_named
from ...modules.target.loading.loading import gguf_of
from ...trainers import DraftModule
from ..recipe import Recipe
from .planned_work import opening

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


Choice = Literal["stored", "computed"]  # Origins of states that `auto` chooses between
MOST_OF_DISK = 0.9  # Share of the free disk that stored states fill at most: the rest of a run is written there too


def dry_run(recipe: Recipe, target: Target) -> DraftModule:
    """The recipe's module with its drafter, built from shapes without values; the target is that of `sketch_target`.

    UserError if the family or its settings do not fit the target, rows or the tree have no room for its guesses, a
    policy asks for more than the family answers, states are to be stored that training changes, or the target cannot be
    placed as the recipe says."""
    target.placement.require_fit(target.model, recipe.train.world, gguf=gguf_of(recipe.target) is not None)
    module = recipe.module(target, torch.ones(target.vocab_size))
    module.configure_model()
    if module.changes_target and recipe.batch.states not in ("computed", "auto"):
        raise UserError(f"batch.states is {recipe.batch.states!r}, but {type(module).__name__} trains the target, "
                        "whose states change with every step; set batch.states: computed")
    if target.placement.slow:
        answers = recipe.distill
        decodes = recipe.data is None and (
            answers.server is None or recipe.prompts.origin == "own" or "draft" in answers.shares)
        if decodes or (module.needs_states and answers.states_from is None):
            raise UserError("target.placement disk reads every layer anew for a pass, so that an engine must answer "
                            "and give states; set distill.engine and distill.states_from to its address, and "
                            "prompts.origin to file, and let no draft write answers")
    if recipe.distill.states_from is not None and recipe.batch.states == "computed":
        raise UserError(f"distill.states_from is {recipe.distill.states_from}, whose states are stored, but batch."
                        "states is computed; set batch.states: stored, or leave distill.states_from out")
    steps, length = module.drafter.trained_steps, recipe.batch.row_length
    if length < steps + 2:
        raise UserError(f"{steps} draft steps need rows of at least {steps + 2} tokens, but batch.row_length is "
                        f"{length}; raise it, or train fewer steps")
    reach, nodes = module.drafter.reach, recipe.tree.searched_nodes
    if reach is not None and reach >= nodes:
        raise UserError(f"a tree of tree.searched_nodes {nodes} is at most {nodes - 1} tokens deep, but this drafter "
                        f"guesses {reach}; raise tree.searched_nodes to at least {reach + 1}, or guess fewer tokens")
    widest = Topology.from_paths([(), *((rank,) for rank in range(nodes - 1))])
    for name in recipe.evaluate.policy_names:
        if name == FASTEST:
            # Static, which every family answers.
            continue
        policy_named(parse_joined(name).own, widest, module.drafter)
    return module


def choose_states(recipe: Recipe, module: DraftModule, data: Path) -> tuple[Choice, str]:
    """(origin of the states with `batch.states: auto`, its reason): stored if they fit into the free disk of the data's
    folder, finished or to come. UserError if a manifest or a file of prompts cannot be read."""
    start, config = "batch.states auto takes", recipe.distill
    if not module.needs_states:
        return "computed", f"{start} computed: training reads tokens alone"
    if module.changes_target:
        return "computed", f"{start} computed: training changes the target, and its states with it"
    if config.states_from is not None:
        return "stored", f"{start} stored: {config.states_from} gives them"
    wanted = WantedStates(taps=module.drafter.taps, form=recipe.batch.states_format)
    if (data / MANIFEST).is_file() and (manifest := Manifest.load(data)).complete:
        form = format_named(wanted.form, module.target.dtype)
        tokens = sum(record.tokens for record in unlisted(data, manifest, wanted.taps, form))
    else:
        prompts = prompt_count(recipe)
        limits = [config.budget_tokens, None if prompts is None else prompts * config.max_new_tokens]
        answers = min((limit for limit in limits if limit is not None), default=None)
        if answers is None:
            return "computed", (f"{start} computed: nothing limits the answers before they are written, so that the "
                                "size of their states is not known; set distill.budget_tokens, or batch.states: stored")
        # States are stored at the tokens of prompts too.
        tokens = round(answers * (1 + opening(recipe) / config.max_new_tokens))
    size, free = wanted.bytes(tokens, module.target), shutil.disk_usage(nearest(data)).free
    choice: Choice = "stored" if size <= MOST_OF_DISK * free else "computed"
    return choice, (f"{start} {choice}: the states of {tokens:,} tokens would take {in_words(size)} more, and the disk "
                    f"has {in_words(free)} free")
