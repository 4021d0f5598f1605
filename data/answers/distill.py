"""Distillation: the target answers prompts, and the answers are stored as shards of training tokens.

A shard is a pure function of the recipe, its number and the shards before it: it has its own prompts, each answer has
its own stream of random numbers, and free slots are refilled inside the shard only. So a killed run makes its last
shard again and ends with the same bytes. Where a training will read the target's states, they are stored with the shard
(`shard_states`).
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...modules import SIZING_TEMPERATURE, DecodeSettings, Target, UserError
from ..prompts.chat import ChatTemplate
from ..prompts.self_prompting import OwnPrompts
from ..prompts.sources import Prompt, PromptConfig, ReadPrompts, Source
from ..store.feature_store import WantedStates
from ..store.held_out import prompt_lines, read_held_out
from ..store.shard_states import ShardStates
from ..store.token_store import (
    MANIFEST,
    SOURCES,
    HeldOut,
    Manifest,
    SourceName,
    SplitName,
    TokenShard,
    hash_bytes,
    write_bytes,
)
from .answer_server import AnswerServer
from .answered_shards import shard_of, states_of
from .answering import Answerer, Conversation, take_given
from .continuous_batching import BatchAnswerer
from .distill_config import DistillConfig, check_recipe, describe_recipe, package_versions, raised_limits
from .distill_stats import added, read_stats, write_stats
from .engine_answering import EngineAnswerer
from .progress import Progress
from .server_answering import ServerAnswerer
from .writers import Writer, source_of

TEST = "test.jsonl"
HELD_OUT_ROUNDS = 20
"""Largest number of rounds in which candidates for held-out prompts are read."""
TRUNCATED_SHARE = 0.3
"""A larger share of answers cut by the length limit deserves a warning."""
SIZE_MARGIN = 1.05
"""The shard meant to reach the token budget is a little larger than expected, so that another one is seldom needed."""
BARREN_CANDIDATES = 256
"""Prompts written by the target without a usable one among them after which the run stops."""
log = logging.getLogger(__name__)


def distill(
    target: Target,
    prompts: PromptConfig,
    config: DistillConfig,
    template: ChatTemplate,
    out: str | Path,
    *,
    train_target: Target | None = None,
    writer: Writer | None = None,
    states: Sequence[WantedStates] = (),
    progress: bool = True,
) -> Manifest:
    """Make, or finish, a folder of token shards.

    Args:
        target: answers the prompts.
        prompts: where they come from.
        config: how much is answered, and how.
        template: of the target's tokenizer.
        out: folder of validation-00000.safetensors, test.jsonl, train-*.safetensors, manifest.json and stats.json. A
            folder started with the same recipe is finished; a complete one is left as it is, or gets more answers where
            a limit of tokens or minutes is higher than it was and nothing else is different.
        train_target: the same target in the number format that `config.train_dtype` names, where it names one; it
            writes prompts and answers those of the train split.
        writer: the draft of the artifact that `config.draft` names, where a draft writes rows.
        states: the target's states that each training will read from disk. Those of shards with decoded rows are
            recorded while they are decoded, and stored in the target's number format; `encode` adds the others.
        progress: show progress bars.

    Raises:
        UserError: if the recipe does not fit the source, the target or what `out` holds; a higher limit would add no
            answer; a finished shard is corrupted; the disk is full; or no token would be supervised.
    """
    if config.workers is not None:
        raise ValueError(f"distill.workers is {config.workers}, which is a queue: call distill_from_queue")
    given = target, prompts, config, template, Path(out)
    return Distillation(*given, train_target=train_target or target, writer=writer, states=states,
                        progress=progress).run()


class Distillation:
    """One run of `distill`."""

    def __init__(
        self,
        target: Target,
        prompts: PromptConfig,
        config: DistillConfig,
        template: ChatTemplate,
        out: Path,
        *,
        train_target: Target,
        writer: Writer | None,
        states: Sequence[WantedStates],
        progress: bool,
    ) -> None:
        self.target, self.prompts, self.config, self.template, self.out = target, prompts, config, template, out
        self.train_target = train_target
        self.own = prompts.origin == "own"
        check_recipe(prompts, config, target.context_length)
        config.require_format(target, train_target)
        if (writer is None) != (config.draft is None):
            raise ValueError("distill.draft names an artifact and the writer is its draft; give both or neither")
        self.progress, self.states = Progress(shown=progress), ShardStates(target, out, states)
        settings = DecodeSettings(batch_size=config.slots, top_k=config.top_k, top_p=config.top_p, seed=config.seed)
        self.answerer = self._answerer(train_target, settings)
        self.drafting = Answerer(target, template, settings, config.max_new_tokens, self._count, writer,
                                 on_slots=self.progress.count_slots)
        self.source: Source = (
            OwnPrompts(train_target, template, prompts, seed=config.seed, slots=config.slots,
                       answer_tokens=config.max_new_tokens)
            if self.own
            else ReadPrompts(prompts, config.seed)
        )
        self.manifest = Manifest(
            target=target.identity,
            template_hash=template.hash,
            recipe=describe_recipe(prompts, config, writer),
            versions=package_versions(),
        )
        self.seen: set[int] = set()
        self.before: dict[str, float] = {}
        self.started = time.monotonic()

    def _answerer(self, train_target: Target, settings: DecodeSettings) -> Answerer:
        """Of train prompts."""
        given = train_target, self.template, settings, self.config.max_new_tokens, self._count
        if self.config.engine == "transformers":
            return BatchAnswerer(*given)
        if self.config.server is None:
            return Answerer(*given, on_slots=self.progress.count_slots)
        return ServerAnswerer(AnswerServer(self.config.server), *given)

    def run(self) -> Manifest:
        """Finish the folder. What pays on this machine decides no byte of it."""
        with self.target.reproducible(), self.train_target.reproducible():
            return self._finish()

    def _finish(self) -> Manifest:
        if (self.out / MANIFEST).exists():
            self._resume()
        if self.manifest.complete:
            return self.manifest
        # A folder that cannot be written to is reported now, not after the first shard.
        self._write_stats()
        self._try_engine()
        if self.manifest.held_out is None:
            self._hold_out()
        with self.progress.stage(*self._goal()):
            self._train()
        self._report()
        return self.manifest

    def _try_engine(self) -> None:
        """Compare the engine's answers with the target's, where another engine answers. Raises UserError."""
        if isinstance(self.answerer, EngineAnswerer):
            with self.progress.stage("trial of the engine", None, "tok"):
                self.answerer.check()

    # Earlier runs --------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Continue the folder of an earlier run: complete data of lower limits grow, all others are taken over."""
        found = Manifest.load(self.out)
        if found.complete and self._asks_for_more(found):
            self._grow(found)
        else:
            self._take_over(found)

    def _take_over(self, found: Manifest) -> None:
        """Go on after the finished shards of a run with the same settings. Raises UserError if they are others."""
        wanted = self.manifest
        found.target.require_same(wanted.target)
        self._require_same("the chat template or its settings", found.template_hash, wanted.template_hash)
        for part in ("prompts", "distill"):
            former = found.recipe.get(part, {})
            for key in sorted({*former, *wanted.recipe[part]}):
                self._require_same(f"{part}.{key}", former.get(key), wanted.recipe[part].get(key))
        if not found.complete:
            self._require_same("the installed versions", found.versions, wanted.versions)
        for shard in found.shards:
            self.seen.update(TokenShard.read(self.out / shard.file, shard.sha256).keys_P.tolist())
        if found.held_out is not None:
            self.seen.update(prompt.key for prompt in read_held_out(self.out))
        self.before = read_stats(self.out)
        self.manifest = found

    def _grow(self, complete: Manifest) -> None:
        """Open complete data for the answers that this recipe's higher limits add.

        Raises:
            UserError: if there are none, or the data were made otherwise; the folder then stays complete.
        """
        self._take_over(replace(complete, recipe=self.manifest.recipe, complete=False))
        if (reason := self._spent()) is not None:
            raise UserError(f"no answer would be added to the complete data in {self.out}: {reason}, or go back to the "
                            "former limits")
        # All processes that answer together read it.
        self.manifest.save(self.out)

    def _asks_for_more(self, found: Manifest) -> bool:
        """True if the recipe of an earlier run differs in nothing but lower limits of tokens or minutes."""
        former, wanted = (one.recipe.get("distill", {}) for one in (found, self.manifest))
        higher = raised_limits(former, wanted)
        raised = {**found.recipe, "distill": {**former, **higher}}
        return bool(higher) and raised == self.manifest.recipe

    def _spent(self) -> str | None:
        """The limit that is reached already, or the prompts that are used up, with a remedy; None if there is none."""
        tokens, asked, total = self.manifest.total("train", "supervised"), self.manifest.candidates, self.source.total
        if self.config.budget_tokens is not None and tokens >= self.config.budget_tokens:
            return f"they hold {tokens:,} answer tokens; raise distill.budget_tokens above that"
        if self.config.budget_minutes is not None and self._late():
            return (f"they have taken {self._seconds() / 60:.1f} minutes; raise distill.budget_minutes "
                    f"({self.config.budget_minutes:g}) above that")
        if total is not None and asked >= total:
            return f"all {total:,} prompts have been asked; choose another --out for more prompts"
        return None

    def _require_same(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise UserError(
                f"{self.out} was started with other settings: {what} was {found!r} and is now {wanted!r}; choose "
                "another --out, or go back to the former setting"
            )

    # Prompts ---------------------------------------------------------------------------------------------------------

    def _fresh(self, start: int, count: int) -> tuple[list[tuple[int, Prompt]], int]:
        """(usable prompts among the next candidates, candidates there were): none seen before, none too long."""
        taken = self.source.take(start, count)
        fresh = []
        for number, prompt in taken.prompts:
            if prompt.key not in self.seen and self._fits(prompt):
                self.seen.add(prompt.key)
                fresh.append((number, prompt))
        return fresh, taken.read

    def _fits(self, prompt: Prompt) -> bool:
        if prompt.document is not None:
            return True
        size, limit = len(self.template.prompt(prompt.opening())), self.prompts.max_prompt_tokens
        room = self.target.context_length - self.config.max_new_tokens
        if limit is not None:
            return size <= limit
        if size > room:
            raise UserError(
                f"prompt {prompt.id} has {size} tokens; the target's context of {self.target.context_length} "
                f"less distill.max_new_tokens {self.config.max_new_tokens} leaves {room}. Shorten it, or set "
                f"prompts.max_prompt_tokens to {room} to leave such prompts out"
            )
        return True

    def _hold_out(self) -> None:
        """Set aside and write the validation and test prompts."""
        wanted = self.config.validation_prompts + self.config.test_prompts
        held: list[tuple[int, Prompt]] = []
        position = 0
        with self.progress.stage("held-out prompts", wanted, "prompt"):
            for _ in range(HELD_OUT_ROUNDS):
                missing = wanted - len(held)
                if missing <= 0:
                    break
                fresh, read = self._fresh(position, max(missing, self.config.slots) if self.own else missing)
                held, position = held + fresh, position + read
                self.progress.advance("prompt", len(fresh))
        if len(held) < wanted:
            raise UserError(
                f"only {len(held)} usable prompts among the first {position}, but {wanted} are to be held out; "
                "give more prompts, or lower distill.validation_prompts and distill.test_prompts"
            )
        # A resumed run knows the held-out prompts, not those left over from the last round.
        self.seen = {prompt.key for _, prompt in held[:wanted]}
        self._write_held_out(held[:wanted], position)

    def _write_held_out(self, held: Sequence[tuple[int, Prompt]], position: int) -> None:
        """Write validation, answered greedily and once more by drawing at the temperature by which trees for sampled
        rows are sized, without filters; and test, which only the evaluation reads."""
        first = self.config.validation_prompts
        if any(prompt.document is not None for _, prompt in held[first:]):
            raise UserError("plain documents are no prompts to be asked in an evaluation; set distill.test_prompts: 0")
        data = prompt_lines(held[first:])
        write_bytes(self.out / TEST, data)
        self.manifest = replace(
            self.manifest,
            candidates=position,
            held_out=HeldOut(file=TEST, sha256=hash_bytes(data), prompts=len(held) - first),
        )
        if first:
            with self.progress.stage("held-out answers", 2 * first * self.config.max_new_tokens, "tok"):
                settings = self.answerer.settings
                drawing = replace(settings, top_k=0, top_p=1.0)
                answered = [*self._answered(held[:first], 0.0, settings),
                            *self._answered(held[:first], SIZING_TEMPERATURE, drawing)]
            self._write_shard("validation", answered, [prompt.key for _, prompt in held[:first]], position)
        else:
            self.manifest.save(self.out)

    def _answered(self, prompts: Sequence[tuple[int, Prompt]], temperature: float,
                  settings: DecodeSettings) -> list[Conversation]:
        """Held-out prompts, answered by the target in its own number format."""
        answerer = Answerer(self.target, self.template, settings, self.config.max_new_tokens, self._count,
                            on_slots=self.progress.count_slots)
        answered = answerer.answer(prompts, (temperature,), taps=self._taps())
        self.answerer.stats.add(answerer.stats)
        return answered

    # Shards ----------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Make shards until the budget is spent or the prompts are used up."""
        barren = 0
        while (size := self._next_size()) > 0 and not self._late():
            start = self.manifest.candidates
            fresh, read = self._fresh(start, size)
            self.manifest = replace(self.manifest, candidates=start + read)
            barren = 0 if fresh else barren + read
            conversations = self._converse(fresh)
            self.progress.advance("prompt", read)
            if conversations:
                self._write_shard("train", conversations, [prompt.key for _, prompt in fresh], read)
            elif fresh:
                # The time ran out before the first answer.
                break
            elif self.own and barren >= BARREN_CANDIDATES:
                raise barren_error(barren, self.prompts)
            if read < size:
                break
        if self.manifest.total("train", "supervised") == 0:
            raise nothing_supervised(self.out, self.manifest.candidates)
        # Whether more minutes remain is read from them.
        self._write_stats()
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.save(self.out)

    def _converse(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Conversation]:
        """The conversations of these prompts, in their order, each by the writer drawn for it."""
        dealt: dict[SourceName, list[tuple[int, Prompt]]] = {}
        for number, prompt in prompts:
            name = source_of(number, self.config.shares, self.config.seed)
            if name != "text":
                prompt.opening()  # which a plain document refuses: only text takes it
            dealt.setdefault(name, []).append((number, prompt))
        found: list[Conversation] = []
        for name in SOURCES:
            if name == "text":
                limits = self.target.context_length, self.config.document_tokens
                taken, refused = take_given(dealt.get(name, []), self.template, *limits)
                if refused and not taken and len(self.config.shares) == 1:
                    # All of a shard: the template is at fault. In a mix a shard may hold very few of them.
                    raise refused[0]
                found += taken
            elif name in dealt:
                answerer = self.answerer if name == "target" else self.drafting
                found += answerer.answer(dealt[name], self.config.temperatures, self._deadline(), self._taps())
        return sorted(found, key=lambda one: one.number)

    def _write_shard(
        self, split: SplitName, conversations: Sequence[Conversation], keys: Sequence[int], candidates: int
    ) -> None:
        """Write one shard and its states, then the manifest with its hash."""
        shard, record, data = shard_of(split, len(self.manifest.split(split)), conversations, keys, candidates)
        write_bytes(self.out / record.file, data)
        self.states.add(self.states.write(self._tokens(), record, shard, states_of(conversations)))
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, record))
        self.manifest.save(self.out)
        self._write_stats()

    def _taps(self) -> tuple[int, ...] | None:
        """Layers whose states are recorded in the next shard; None where none are."""
        return self.states.taps(self._tokens())

    def _tokens(self) -> int:
        """Tokens of all finished shards."""
        return sum(record.tokens for record in self.manifest.shards)

    def _count(self, tokens: int) -> None:
        self.progress.advance("tok", tokens)

    # Budget, counts and times ----------------------------------------------------------------------------------------

    def _next_size(self) -> int:
        """Candidates of the next shard; fewer near the end of the token budget, by the yield so far.

        At least as many as there are slots: a smaller shard would leave some idle.
        """
        budget, size = self.config.budget_tokens, self.config.shard_prompts
        if budget is None:
            return size
        done, tried = (self.manifest.total("train", count) for count in ("supervised", "candidates"))
        each = max(done / tried, 1.0) if tried else float(self.config.max_new_tokens)
        wanted = max(self.config.slots, math.ceil(SIZE_MARGIN * (budget - done) / each))
        return min(size, wanted) if done < budget else 0

    def _seconds(self) -> float:
        """Time spent on this folder, interrupted runs included."""
        return self.before.get("seconds", 0.0) + time.monotonic() - self.started

    def _deadline(self) -> float | None:
        minutes = self.config.budget_minutes
        return None if minutes is None else time.monotonic() + 60 * minutes - self._seconds()

    def _late(self) -> bool:
        return self.config.budget_minutes is not None and self._seconds() >= 60 * self.config.budget_minutes

    def _goal(self) -> tuple[str, float | None, str, float]:
        """The progress bar of the answers: (title, total, unit, what is done already)."""
        if self.config.budget_tokens is not None:
            return "answers", self.config.budget_tokens, "tok", self.manifest.total("train", "supervised")
        if self.config.budget_minutes is not None:
            return "answers", 60 * self.config.budget_minutes, "s", self._seconds()
        return "answers", self.source.total, "prompt", self.manifest.candidates

    def _amounts(self) -> dict[str, float]:
        """Sums of this run, by part of the work."""
        parts = {"answers": self.answerer.stats}
        if self.config.draft is not None:
            parts["drafts"] = self.drafting.stats
        if isinstance(self.source, OwnPrompts):
            parts["prompts"] = self.source.stats
        sums = {f"{part}_{name}": value for part, stats in parts.items() for name, value in stats.amounts().items()}
        return {**sums, "states_seconds": self.states.seconds}

    def _write_stats(self) -> None:
        """Write measurements on this machine, summed over the runs that worked on the folder."""
        write_stats(self.out, added(self.before, self._amounts()), self._seconds())

    def _report(self) -> None:
        """Warn when many answers were cut."""
        answers, cut = (self.manifest.total("train", count) for count in ("answers", "truncated"))
        if cut > TRUNCATED_SHARE * answers:
            log.warning(
                "%d of %d answers were cut at %d tokens: drafts will rarely learn an end; raise distill.max_new_tokens",
                cut,
                answers,
                self.config.max_new_tokens,
            )


def barren_error(candidates: int, prompts: PromptConfig) -> UserError:
    """The error of a target whose last prompts are all unusable."""
    return UserError(
        f"none of {candidates} prompts that the target wrote can be used; raise prompts.own_max_tokens "
        f"({prompts.own_max_tokens}), or give prompts in a file (prompts.origin: file)"
    )


def nothing_supervised(out: Path, candidates: int) -> UserError:
    """The error of data without an answer."""
    return UserError(
        f"no train token would be supervised in {out}: after {candidates} prompts, held-out ones included, there is no "
        "answer with a token; give more prompts or a larger budget"
    )
