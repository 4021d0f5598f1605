"""Distillation: the target answers prompts, and the answers are stored as shards of training tokens.

Every run takes its shards from a queue in the folder of the data, alone or with other processes. A shard is a pure
function of the recipe and its number: its prompts are found without the answers of other shards, it has a fixed size,
each answer has its own stream of random numbers, and the token budget counts whole shards in the order of their
numbers. So the data have the same bytes whatever the number of processes and whichever of them end early; one that dies
costs the shard that it was answering. Where a training will read the target's states, they are stored with the shard
(`shard_states`).
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ...modules import Target
from ...modules.files.folder_locks import FolderLocks
from ..prompts.chat import ChatTemplate
from ..prompts.sources import PromptConfig
from ..store.feature_store import WantedStates
from ..store.shard_states import ShardStates
from ..store.token_store import Manifest
from .data_folder import DataFolder
from .distill_config import DistillConfig
from .distill_task import DistillTask
from .engine_answering import EngineAnswerer
from .held_out import HeldOutPrompts
from .progress import Progress
from .shard_answering import ShardAnswering
from .shard_queue import HELD_OUT, LOCKS, clear_queue
from .writers import Writer

TRUNCATED_SHARE = 0.3  # A larger share of answers cut by the length limit deserves a warning
log = logging.getLogger(__name__)


def distill(target: Target, prompts: PromptConfig, config: DistillConfig, template: ChatTemplate, out: str | Path, *,
            train_target: Target | None = None, writer: Writer | None = None, states: Sequence[WantedStates] = (),
            progress: bool = True, grow: bool = True) -> Manifest:
    """Work on a folder of token shards, with every other process that does, until it is complete.

    Args:
        target: answers the prompts.
        prompts: where they come from.
        config: how much is answered, and how. With `budget_minutes` answers end after them; how much that is depends on
            the machines.
        template: of the target's tokenizer.
        out: folder of test.jsonl, validation-00000.safetensors, train-*.safetensors, manifest.json and stats.json. A
            folder started with the same recipe is finished; a complete one is left as it is, or gets more answers where
            a limit of tokens or minutes is higher than it was and nothing else is different.
        train_target: the same target in the number format that `config.train_dtype` names, where it names one; it
            writes prompts and answers those of the train split.
        writer: the draft of the artifact that `config.draft` names, where a draft writes rows.
        states: the target's states that each training will read from disk. Those of shards with decoded rows are
            recorded while they are decoded, and stored in the target's number format; `encode` adds the others.
        progress: show progress bars.
        grow: add answers to complete data of lower limits; False where another process uses them, and they are refused.

    Raises:
        UserError: if the recipe does not fit the source, the target or what `out` holds; a higher limit would add no
            answer; a finished shard is corrupted; the disk is full or its file system has no locks; or no token would
            be supervised.
    """
    trained = train_target or target
    task = DistillTask(target=target, train_target=trained, prompts=prompts, config=config, template=template,
                       writer=writer)
    source, folder = task.source(), DataFolder(Path(out), task.manifest(), config)
    bar = Progress(shown=progress, seconds_left=lambda: folder.seconds_left)
    shards = ShardAnswering(task, source, folder, bar)
    stored = ShardStates(target, folder.out, states)
    # What pays on this machine decides no byte of the data.
    with target.reproducible(), trained.reproducible(), closing(FolderLocks(folder.out / LOCKS)) as locks:
        with locks.holding(HELD_OUT):
            folder.resume(source.total, task.asked_key, grow=grow)
            if not folder.manifest.complete:
                stored = ShardStates(target, folder.out, folder.agreed_states(states))
                with bar.stage("trial of the engine", None, "tok"):
                    # The project's own loop is what others are compared with.
                    if isinstance(shards.writers.target, EngineAnswerer):
                        shards.writers.target.check()
            if folder.manifest.held_out is None:
                # A disk without room is reported now, not after the first answers.
                folder.write_stats(shards.amounts(stored))
                HeldOutPrompts(task, source, folder, bar).set_aside()
                folder.write_stats(shards.amounts(stored))
        if not folder.manifest.complete:
            shards.work(locks, stored)
            answers, cut = (folder.manifest.total("train", count) for count in ("answers", "truncated"))
            # Of several processes those that help show no progress, and leave the warning to the first one.
            if (progress or config.workers is None) and cut > TRUNCATED_SHARE * answers:
                log.warning("%d of %d answers were cut at %d tokens%s: drafts will rarely learn an end; raise "
                            "distill.max_new_tokens%s", cut, answers, config.max_new_tokens, *(
                                (" or when the minutes were over", " or distill.budget_minutes") if folder.late
                                else ("", "")))
    clear_queue(folder.out)
    return folder.manifest
