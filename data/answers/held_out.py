"""Held-out prompts: those that validation answers, and those that only evaluations ask."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from ...modules import SIZING_TEMPERATURE, DecodeSettings, DecodeStats, UserError
from ..prompts.prompt import Prompt
from ..prompts.self_prompting import OwnPrompts, Source
from ..prompts.sources import ReadPrompts, Skipped
from ..store.shard_states import ShardStates
from ..store.token_store import HeldOut, hash_bytes, write_bytes
from .answer_server import AnswerServer, ServerAnswerer
from .answering import Answerer, Conversation, shard_of, states_of
from .data_folder import SKIPPED, DataFolder
from .distill_task import DistillTask
from .progress import Progress

TEST = "test.jsonl"
TRAIN_SHARE = 0.5
"""Share of `distill.budget_minutes` that held-out text leaves to training text, without which it is of no use."""
PROBED = 4
"""Validation prompts that are answered in any case; where minutes are given, their time says how many fit next."""
HELD_OUT_ROUNDS = 20
"""Largest number of rounds in which candidates for held-out prompts are read."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutPrompts:
    """The first usable prompts of a source, which no training sees."""

    task: DistillTask
    """The distillation."""
    source: Source
    """Of candidates."""
    folder: DataFolder
    """Of the data; it holds none yet."""
    progress: Progress
    """Counts prompts and answer tokens."""
    stats: DecodeStats = field(default_factory=DecodeStats)
    """Passes of the target over them."""

    def set_aside(self, states: ShardStates) -> None:
        """Choose them, answer those of validation, and write both parts, then the manifest.

        Raises:
            UserError: if there are too few, a test prompt is a plain document, or the disk is full.
        """
        config = self.task.config
        first, wanted = config.validation_prompts, config.validation_prompts + config.test_prompts
        skipped = self.source.skipped() if isinstance(self.source, ReadPrompts) else []
        # They are known before the first answer, and are found again wherever rows are read.
        counts = self.folder.list_skipped(skipped)
        if skipped:
            commonest = sorted(counts.items(), key=lambda one: -one[1])[:3]
            log.warning("%d rows are skipped, which %s lists: %s%s", len(skipped), self.folder.out / SKIPPED, "; ".join(
                f"{number} × {kind}" for kind, number in commonest), "; ..." if len(counts) > len(commonest) else "")
        # Rows are looked at again when it is their turn.
        unwritten = dict(self.task.unwritten)
        for part, rows in unwritten.items():
            log.warning("the chat template leaves out the %s of %d rows; set target.chat_template to one that writes "
                        "them, or leave such rows out", part, rows)
        held, candidates, repeated = self._chosen(wanted, skipped)
        if len(held) < wanted:
            raise UserError(
                f"only {len(held)} usable prompts among the first {candidates}, but {wanted} are to be held out; "
                "give more prompts, or lower distill.validation_prompts and distill.test_prompts"
            )
        # A resumed run knows the held-out prompts, not those left over from the last round.
        held = held[:wanted]
        if any(prompt.document is not None for _, prompt in held[first:]):
            raise UserError("plain documents are no prompts to be asked in an evaluation; set distill.test_prompts: 0")
        out, lines = self.folder.out, list[str]()
        for number, prompt in held[first:]:
            lines.append(json.dumps({**prompt.row, "number": number}, ensure_ascii=False) + "\n")
        data = "".join(lines).encode()
        write_bytes(out / TEST, data)
        manifest = replace(self.folder.manifest, candidates=candidates, repeated=repeated,
                           skipped=self.folder.list_skipped(skipped), unwritten=unwritten,
                           held_out=HeldOut(file=TEST, sha256=hash_bytes(data), prompts=len(held) - first))
        if first:
            conversations = self._answered(held[:first], states.taps)
            keys = [self.task.asked_key(prompt) for _, prompt in held[:first]]
            shard, record, content = shard_of("validation", 0, conversations, keys, candidates)
            write_bytes(out / record.file, content)
            states.add(states.write(record, shard, states_of(conversations)))
            manifest = replace(manifest, shards=(record,))
        self.folder.held = {self.task.asked_key(prompt) for _, prompt in held}
        self.folder.save(manifest)

    def _chosen(self, wanted: int, skipped: list[Skipped]) -> tuple[list[tuple[int, Prompt]], int, int]:
        """(usable prompts without repetitions, at least as many as wanted where there are; candidates read; those of
        them that repeat others). More rows may be skipped on the way."""
        held: dict[int, tuple[int, Prompt]] = {}
        position = repeated = 0
        with self.progress.stage("held-out prompts", wanted, "prompt"):
            own = isinstance(self.source, OwnPrompts)
            for _ in range(HELD_OUT_ROUNDS) if own else count():
                missing, before = wanted - len(held), len(held)
                if missing <= 0:
                    break
                # A target that writes prompts fills its slots at no more cost.
                wished = max(missing, self.task.config.slots) if own else missing
                taken = self.source.take(position, wished)
                skipped += taken.skipped
                for number, prompt in taken.prompts:
                    repeated += (key := self.task.asked_key(prompt)) in held
                    held.setdefault(key, (number, prompt))
                position += taken.read
                self.progress.advance("prompt", len(held) - before)
                if not own and taken.read < wished:
                    break
        return list(held.values()), position, repeated

    def _answered(self, prompts: Sequence[tuple[int, Prompt]], taps: tuple[int, ...] | None) -> list[Conversation]:
        """Validation prompts, answered by the target in its own number format: greedily, and once more by drawing at
        the temperature by which trees for sampled rows are sized, without filters."""
        task, config, found = self.task, self.task.config, list[Conversation]()
        settings = DecodeSettings(batch_size=config.slots, top_k=config.top_k, top_p=config.top_p, seed=config.seed)

        def answer(these: Sequence[tuple[int, Prompt]]) -> None:
            for temperature, sampling in ((0.0, settings), (SIZING_TEMPERATURE, replace(settings, top_k=0, top_p=1.0))):
                given = task.template, sampling, config.max_new_tokens, partial(self.progress.advance, "tok")
                answerer = Answerer(task.target, *given, on_slots=self.progress.count_slots)
                if task.target.placement.slow and config.server is not None:
                    answerer = ServerAnswerer(AnswerServer(config.server), task.target, *given)
                found.extend(answerer.answer(these, (temperature,), taps=taps))
                self.stats.add(answerer.stats)

        with self.progress.stage("held-out answers", 2 * len(prompts) * config.max_new_tokens, "tok"):
            if config.budget_minutes is None:
                answer(prompts)
                return found
            taken, took, each = 0, 0.0, math.inf
            if isinstance(self.source, OwnPrompts) and (wrote := self.source.stats).busy_slots:
                # Prompts that the target wrote were decoded by the same slots: each slot of a pass gave a token.
                each = 2 * config.max_new_tokens * wrote.seconds / wrote.busy_slots
            while taken < len(prompts):
                started = self.folder.seconds
                left = (1 - TRAIN_SHARE) * 60 * config.budget_minutes - started
                # Measured anew after each part: rows that are answered together cost less each than few, and a smaller
                # part takes about as long as the one before.
                fits = int(left / max(each, 1e-9)) if left >= took else 0
                if not (part := prompts[taken:taken + (fits if taken else max(PROBED, fits))]):
                    break
                answer(part)
                taken, took = taken + len(part), self.folder.seconds - started
                each = took / len(part)
        if taken < len(prompts):
            log.warning("%d of %d validation prompts were answered: held-out text gets at most half of "
                        "distill.budget_minutes %g; raise it, or lower distill.validation_prompts", taken, len(prompts),
                        config.budget_minutes)
        # As without minutes: greedy answers first.
        return sorted(found, key=lambda one: one.temperature)
