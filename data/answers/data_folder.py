"""The folder of a distillation: what earlier runs left there, the manifest, measurements of this machine, the time; the
line of each stage, which counts in the stage's own unit, with the tokens per second and the share of idle slots; and
held-out prompts, those that validation answers, and those that only evaluations ask."""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from ...modules import SIZING_TEMPERATURE, DecodeSettings, DecodeStats, UserError
from ...modules.files.json_records import read_json, record_of
from ...modules.progress import ProgressLine
from ..prompts.prompt import Prompt, parse_prompt
from ..prompts.prompt_files import ReadPrompts, Source, decoded, file_rows, read_prompts
from ..prompts.sources import OwnPrompts, Skipped
from ..store.feature_store import ShardStates, WantedStates
from ..store.token_store import MANIFEST, HeldOut, Manifest, TokenShard, corrupted, hash_bytes, read_bytes, write_bytes
from .answering import shard_of, states_of
from .distill_task import LIMITS, DistillConfig, DistillTask, raised_limits
from .shard_queue import QUEUE, VALIDATION_PROMPTS, FinishedShard, remove_cut

STATS = "stats.json"  # File of measurements of this machine: nothing in the data depends on them
SKIPPED = "skipped.jsonl"  # File of the rows that are not used
STATES = "states.json"  # File of the queue with the states that all processes store
TEST = "test.jsonl"
HELD_OUT_SHARE = 0.5  # Share of the minutes that are left which validation prompts get, at most
FEW, FEWEST = 12, 4
"""Validation prompts that are answered where all would take more than half of that share, or nobody knows how long they
take, and where no minute is left."""
HELD_OUT_ROUNDS = 20  # Largest number of rounds in which candidates for held-out prompts are read
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """Line of the current stage. Counts in another unit than the line's only appear as a rate next to it."""

    shown: bool
    seconds_left: Callable[[], float] = lambda: math.inf  # Of a limit in minutes for all stages; infinite without one
    line: ProgressLine | None = None  # None between two stages
    tokens: int = 0  # Tokens of the stage
    busy: int = 0  # Slots with an answer, summed over its passes
    slots: int = 0  # All slots, likewise

    @contextmanager
    def stage(self, title: str, total: float | None, unit: str, done: float = 0) -> Iterator[None]:
        """Show a line for the block; `done` counts work of an earlier run."""
        self.tokens = self.busy = self.slots = 0
        with ProgressLine(title, total, unit, done=done, shown=self.shown, seconds_left=self.seconds_left) as self.line:
            yield
        self.line = None

    def advance(self, unit: str, amount: int) -> None:
        """Count `amount` more of a unit."""
        if self.line is None:
            return
        if unit == "tok":
            self.tokens += amount
        seconds = max(time.monotonic() - self.line.started, 1e-9)
        rate = [f"{self.tokens / seconds:.0f} tok/s"] if self.line.unit != "tok" and self.tokens else []
        idle = [f"{1 - self.busy / self.slots:.0%} of slots idle"] if self.slots else []
        self.line.figures = ", ".join(rate + idle)
        self.line.advance(amount if unit == self.line.unit else 0)

    def settle(self, unit: str, found: int) -> None:
        """Let the line end with the number that the data have: work that they do without was counted too."""
        if self.line is not None and unit == self.line.unit:
            self.line.done = found

    def count_slots(self, busy: int, slots: int) -> None:
        """Count a pass with answers in `busy` of its slots."""
        self.busy, self.slots = self.busy + busy, self.slots + slots


class DataFolder:
    """Data of one recipe as far as they are made, by this process, others at the same time and runs before. `asked` is
    their manifest before the first prompt. UserError if the folder of unfinished work in it is a link."""

    def __init__(self, out: Path, asked: Manifest, config: DistillConfig) -> None:
        # It is removed as a whole in the end, and another folder's shards would be taken for those of these data.
        if (queue := out / QUEUE).is_symlink():
            raise UserError(f"{queue} is a link to {queue.readlink()}, and unfinished work is kept in a folder of its "
                            "own; remove the link")
        self.out, self.manifest, self.config = out, asked, config
        self.held: set[int] = set()  # Keys of the held-out prompts (`DistillTask.asked_key`), which no train shard has
        self.seen: set[int] = set()  # Keys (`DistillTask.key`) of the manifest's train rows, which are not repeated
        self.answered: set[int] = set()  # Numbers of their prompts
        self.started, self.spent = time.monotonic(), 0.0
        self._counted: dict[str, float] = {}

    def resume(self, total: int | None, key: Callable[[Prompt], int], *, grow: bool) -> None:
        """Take over what an earlier run has left: data of lower limits get the answers that they lack; if they may
        `grow`, complete ones are opened again. `total` prompts are in the source, None where not known; `key` is that
        of `held`.

        UserError if the folder was started with other settings, a finished shard is corrupted, or a higher limit would
        add no answer; complete data then stay complete."""
        # The time that another process needed for the held-out prompts is in its measurements.
        self.started = time.monotonic()
        if not (self.out / MANIFEST).exists():
            return
        found, asked = Manifest.load(self.out), self.manifest
        former = found.recipe.get("distill", {})
        higher = raised_limits(former, asked.recipe["distill"])
        raised = grow and bool(higher) and {**found.recipe, "distill": {**former, **higher}} == asked.recipe
        grows = raised and found.complete
        if raised:
            found = replace(found, recipe=asked.recipe, complete=False)
        self._require_same_settings(found)
        for shard in found.shards:
            text = TokenShard.read(self.out / shard.file, shard.sha256)
            (self.held if shard.split == "validation" else self.seen).update(text.keys_P.tolist())
            self.answered.update(text.prompts_R.tolist())
        if found.held_out is not None:
            self.held.update(map(key, read_held_out(self.out)))
        # Until all are answered, validation prompts are in their file.
        if few := (waiting := self.out / VALIDATION_PROMPTS).is_file():
            self.held.update(map(key, read_prompts(waiting)))
        self.manifest, self.spent = found, read_stats(self.out).get("seconds", 0.0)
        if grows:
            config, tokens, reason = self.config, found.total("train", "supervised"), ""
            few = few and found.total("validation", "prompts") < config.validation_prompts
            if not few and config.budget_tokens is not None and tokens >= config.budget_tokens:
                reason = f"they hold {tokens:,} answer tokens; raise distill.budget_tokens above that"
            elif self.late and "budget_minutes" in higher:
                # The first answers took more than the former minutes: all is there that these give.
                self.manifest = replace(found, complete=True)
            elif self.late:
                reason = (f"they have taken {self.seconds / 60:.1f} minutes; raise distill.budget_minutes "
                          f"({config.budget_minutes:g}) above that")
            elif few:
                self.manifest = replace(found, shards=found.split("train"))
            elif total is not None and found.candidates >= total:
                reason = f"all {total:,} prompts have been asked; choose another --out for more prompts"
            # Data that nothing would be added to stay complete.
            if reason:
                raise UserError(f"no answer would be added to the complete data in {self.out}: {reason}, or go back to "
                                "the former limits")
        if raised:
            if not self.manifest.complete:
                remove_cut(self.out, grows)
            # All processes that answer together read it.
            self.manifest.save(self.out)

    def _require_same_settings(self, found: Manifest) -> None:
        asked = self.manifest
        found.target.require_same(asked.target, what=str(self.out), remedy="choose another --out")
        compared: list[tuple[str, object, object]] = [
            ("the chat template or its settings", found.template_hash, asked.template_hash)]
        for part in ("prompts", "distill"):
            before, now = found.recipe.get(part, {}), asked.recipe[part]
            # A limit that was raised is in nobody's way.
            keys = sorted({*before, *now}, key=lambda key: (key in LIMITS, key))
            compared += [(f"{part}.{key}", before.get(key), now.get(key)) for key in keys]
        # Other versions may answer otherwise, which complete data have no more to do with.
        if not found.complete:
            compared.append(("the installed versions", found.versions, asked.versions))
        for what, former, wanted in compared:
            if former != wanted:
                raise UserError(f"{self.out} was started with other settings: {what} was {former!r} and is now "
                                f"{wanted!r}; choose another --out, or go back to the former setting")

    def agreed_states(self, wanted: Sequence[WantedStates]) -> tuple[WantedStates, ...]:
        """The states that the first process on this folder was asked for, whatever this one was. UserError if their
        file is damaged, or the disk is full."""
        file, remedy = self.out / QUEUE / STATES, "delete it, and the other processes' settings count"
        if not file.is_file():
            write_bytes(file, json.dumps([asdict(one) for one in wanted]).encode())
        return record_of(tuple[WantedStates, ...], read_json(file, remedy), str(file), remedy)

    def is_complete(self) -> bool:
        """True once the manifest of the complete data is there, whoever wrote it. UserError if another process has
        since let them grow by a higher limit."""
        if not self.manifest.complete:
            found = Manifest.load(self.out)
            if found.recipe != self.manifest.recipe:
                raise UserError(f"the limits of the data in {self.out} were raised while this process answered; start "
                                "it again with the same ones, or choose another --out")
            self.manifest = found
        return self.manifest.complete

    def save(self, manifest: Manifest) -> None:
        """Write a manifest that goes on from the one before. Raises UserError if the disk is full."""
        manifest.save(self.out)
        self.manifest = manifest

    def list_skipped(self, found: Sequence[Skipped]) -> dict[str, int]:
        """Add rows to the list of skipped ones; returns the counts of all by reason. UserError if the disk is full."""
        file, lines = self.out / SKIPPED, list[str]()
        # Before anything is held out, only a run that ended can have left a list.
        if self.manifest.held_out is None:
            file.unlink(missing_ok=True)
        if found:
            if file.exists():
                lines = file.read_text(encoding="utf-8").split("\n")[:-1]
            lines += [json.dumps({"row": one.row, "reason": one.reason}, ensure_ascii=False) for one in found]
            # A process may have been killed after it wrote these, and before the manifest.
            write_bytes(file, "".join(f"{line}\n" for line in dict.fromkeys(lines)).encode())
        return dict(sorted((Counter(self.manifest.skipped) + Counter(one.kind for one in found)).items()))

    # Time and measurements -------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Time spent on this folder, interrupted runs included."""
        return self.spent + time.monotonic() - self.started

    @property
    def seconds_left(self) -> float:
        """Seconds until the minutes are over; infinite without a limit."""
        return math.inf if self.config.budget_minutes is None else 60 * self.config.budget_minutes - self.seconds

    @property
    def deadline(self) -> float | None:
        """Value of `time.monotonic()` at which the minutes are over; None without a limit of minutes."""
        return None if self.seconds_left == math.inf else time.monotonic() + self.seconds_left

    @property
    def late(self) -> bool:
        """True once the minutes are over."""
        return self.seconds_left <= 0

    def write_stats(self, amounts: Mapping[str, float] | None = None) -> None:
        """Add this process's sums to the measurements of runs before it and next to it; None writes the time alone."""
        stored, amounts = read_stats(self.out), self._counted if amounts is None else amounts
        sums = {name: stored.get(name, 0.0) + amount - self._counted.get(name, 0.0)
                for name, amount in amounts.items()}
        slots = {name.removesuffix("_total_slots"): total for name, total in sums.items()
                 if name.endswith("_total_slots")}
        shares = {f"{part}_busy_share": sums[f"{part}_busy_slots"] / total if total else 1.0
                  for part, total in slots.items()}
        content = {**stored, **sums, **shares, "seconds": max(self.seconds, stored.get("seconds", 0.0))}
        write_bytes(self.out / STATS, json.dumps(content, indent=2, sort_keys=True).encode())
        self._counted = dict(amounts)


def read_stats(folder: Path) -> dict[str, float]:
    """The measurements in a folder of data; none where there is no file. Raises UserError if it is damaged."""
    file = folder / STATS
    if not file.exists():
        return {}
    return record_of(dict[str, float], read_json(file, remedy := "delete it, only times are lost"), str(file), remedy)


def read_held_out(folder: Path) -> list[Prompt]:
    """The prompts of a folder of data that only evaluations ask; none where none were held out. UserError if their file
    is missing or is not the one that distillation wrote."""
    held_out = Manifest.load(folder).held_out
    if held_out is None:
        return []
    file = folder / held_out.file
    if hash_bytes(read_bytes(file)) != held_out.sha256:
        raise UserError(corrupted(file))
    return read_prompts(file) if held_out.prompts else []


# Held-out prompts -----------------------------------------------------------------------------------------------------


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
    for file, asked in ((VALIDATION_PROMPTS, held[:first]), (TEST, held[first:])):
        # Numbered prompts, one a line.
        data = "".join(json.dumps({**prompt.row, "number": number}, ensure_ascii=False) + "\n"
                       for number, prompt in asked).encode()
        if asked or file == TEST:
            write_bytes(folder.out / file, data)
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
    answerer = task.answerer(task.target, DecodeSettings(batch_size=config.slots, seed=config.seed), on_tokens,
                             served=task.target.placement.slow)
    conversations = answerer.answer(taken, (0.0, SIZING_TEMPERATURE), deadline, states.taps,
                                    assured={number for number, _ in taken[:FEW]}, every=True)
    keys = [task.asked_key(prompt) for _, prompt in prompts]
    text, record, content = shard_of("validation", 0, conversations, keys, folder.manifest.candidates)
    write_bytes(folder.out / record.file, content)
    files = states.write(record, text, states_of(conversations))
    shard = FinishedShard(read=0, fresh=0, repeated=0, record=record, states=files, cut=record.prompts < len(prompts))
    return shard, answerer.stats
