"""Held-out prompts: those that validation answers, and those that only evaluations ask."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from ...modules import SIZING_TEMPERATURE, DecodeSettings, DecodeStats, UserError
from ..prompts.prompt import Prompt
from ..prompts.prompt_files import decoded, file_rows
from ..prompts.rows import parse_prompt
from ..prompts.self_prompting import OwnPrompts, Source
from ..prompts.sources import ReadPrompts, Skipped
from ..store.feature_store import ShardStates
from ..store.token_store import HeldOut, hash_bytes, write_bytes
from .answer_server import AnswerServer, ServerAnswerer
from .answering import Answerer, shard_of, states_of
from .data_folder import SKIPPED, DataFolder, Progress
from .distill_task import DistillTask
from .shard_queue import VALIDATION_PROMPTS, FinishedShard

TEST = "test.jsonl"
HELD_OUT_SHARE = 0.5  # Share of the minutes that are left which validation prompts get, at most
FEW, FEWEST = 12, 4
"""Validation prompts that are answered where all would take more than half of that share, or nobody knows how long they
take, and where no minute is left."""
HELD_OUT_ROUNDS = 20  # Largest number of rounds in which candidates for held-out prompts are read
log = logging.getLogger(__name__)


def set_aside(task: DistillTask, source: Source, folder: DataFolder, progress: Progress) -> None:
    """Choose the first usable prompts of a source, which no training sees, for data that hold none yet, and write both
    parts, then the manifest. UserError if there are too few, a test prompt is a plain document, or the disk is full."""
    config = task.config
    first, wanted = config.validation_prompts, config.validation_prompts + config.test_prompts
    skipped = source.skipped() if isinstance(source, ReadPrompts) else []
    # They are known before the first answer, and are found again wherever rows are read.
    counts = folder.list_skipped(skipped)
    if skipped:
        commonest = sorted(counts.items(), key=lambda one: -one[1])[:3]
        log.warning("%d rows are skipped, which %s lists: %s%s", len(skipped), folder.out / SKIPPED, "; ".join(
            f"{number} × {kind}" for kind, number in commonest), "; ..." if len(counts) > len(commonest) else "")
    # Rows are looked at again when it is their turn.
    unwritten = dict(task.unwritten)
    for part, rows in unwritten.items():
        log.warning("the chat template leaves out the %s of %d rows; set target.chat_template to one that writes "
                    "them, or leave such rows out", part, rows)
    held, candidates, repeated = _chosen(task, source, progress, wanted, skipped)
    if len(held) < wanted:
        raise UserError(
            f"only {len(held)} usable prompts among the first {candidates}, but {wanted} are to be held out; "
            "give more prompts, or lower distill.validation_prompts and distill.test_prompts")
    if any(prompt.document is not None for _, prompt in held[first:]):
        raise UserError("plain documents are no prompts to be asked in an evaluation; set distill.test_prompts: 0")
    out = folder.out
    if first:
        write_bytes(out / VALIDATION_PROMPTS, _rows(held[:first]))
    data = _rows(held[first:])
    write_bytes(out / TEST, data)
    manifest = replace(folder.manifest, candidates=candidates, repeated=repeated,
                       skipped=folder.list_skipped(skipped), unwritten=unwritten,
                       held_out=HeldOut(file=TEST, sha256=hash_bytes(data), prompts=len(held) - first))
    folder.held = {task.asked_key(prompt) for _, prompt in held}
    folder.save(manifest)


def _chosen(task: DistillTask, source: Source, progress: Progress, wanted: int, skipped: list[Skipped]
            ) -> tuple[list[tuple[int, Prompt]], int, int]:
    """(usable prompts without repetitions, as many as wanted where there are; candidates up to the last of
    them; those that repeat others). More rows may be skipped on the way."""
    held: dict[int, tuple[int, Prompt]] = {}
    position = repeated = 0
    with progress.stage("held-out prompts", wanted, "prompt"):
        own = isinstance(source, OwnPrompts)
        for _ in range(HELD_OUT_ROUNDS) if own else count():
            missing, before = wanted - len(held), len(held)
            if missing <= 0:
                break
            # A target that writes prompts fills its slots at no more cost; the rest are the first train prompts.
            wished = max(missing, task.config.slots) if own else missing
            taken = source.take(position, wished)
            skipped += taken.skipped
            position += taken.read
            for number, prompt in taken.prompts:
                repeated += (key := task.asked_key(prompt)) in held
                held.setdefault(key, (number, prompt))
                if len(held) == wanted:
                    position = number + 1 if own else position
                    break
            progress.advance("prompt", len(held) - before)
            if not own and taken.read < wished:
                break
    return list(held.values()), position, repeated


def answer_validation(task: DistillTask, folder: DataFolder, states: ShardStates, each: float,
                      on_tokens: Callable[[int], None]) -> tuple[FinishedShard, DecodeStats]:
    """(the shard of validation prompts, the passes for it), answered by the target in its own number format: greedily,
    and at the temperature by which trees for sampled rows are sized, in one batch.

    `each` is the seconds that an answer of the train split took so far; 0 where that is not known. `on_tokens` gets the
    tokens of each answer in a pass. UserError if the prompts cannot be read, or the disk is full."""
    config, deadline = task.config, folder.deadline
    rows = [(decoded(row), place) for place, row in file_rows(folder.out / VALIDATION_PROMPTS)]
    taken = prompts = [(row["number"], parse_prompt(row, place)) for row, place in rows]
    if deadline is not None:
        share = HELD_OUT_SHARE * max(0.0, deadline - time.monotonic())
        # Where a server answers train prompts, the pace of the loop here is not known either.
        unknown = not each or (config.server is not None and not task.target.placement.slow)
        if not share or unknown or 2 * len(prompts) * each > share / 2:
            taken = prompts[:FEW if share else FEWEST]
        deadline = time.monotonic() + share
    # Filters would change drawn answers alone.
    given = task.template, DecodeSettings(batch_size=config.slots, seed=config.seed), config.max_new_tokens, on_tokens
    answerer = Answerer(task.target, *given)
    if task.target.placement.slow and config.server is not None:
        answerer = ServerAnswerer(AnswerServer(config.server), task.target, *given)
    conversations = answerer.answer(taken, (0.0, SIZING_TEMPERATURE), deadline, states.taps,
                                    assured={number for number, _ in taken[:FEW]}, every=True)
    keys = [task.asked_key(prompt) for _, prompt in prompts]
    text, record, content = shard_of("validation", 0, conversations, keys, folder.manifest.candidates)
    write_bytes(folder.out / record.file, content)
    files = states.write(record, text, states_of(conversations))
    shard = FinishedShard(read=0, fresh=0, repeated=0, record=record, states=files, cut=record.prompts < len(prompts))
    return shard, answerer.stats


def _rows(prompts: Sequence[tuple[int, Prompt]]) -> bytes:
    """Numbered prompts as a file, one a line."""
    return "".join(json.dumps({**prompt.row, "number": number}, ensure_ascii=False) + "\n"
                   for number, prompt in prompts).encode()
