"""One distillation as it is asked for: the settings with their checks, the models, the prompts, their record in the
manifest, and the writers of its rows: each prompt goes to the target, to a draft, or brings its answers as text."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from ...modules import DecodeSettings, Target, UserError
from ...modules.config_checks import (
    MOST_TOKENS,
    CheckedSettings,
    Positive,
    Processes,
    Rows,
    RowsOrNone,
    Seed,
    Share,
    Whole,
)
from ...modules.files.atomic_files import files_digest
from ...modules.verification.sampling import Temperatures
from ..prompts.chat import ChatTemplate
from ..prompts.given_answers import GivenAnswers, GivenText, Turn, join_turns
from ..prompts.prompt import LeftOutError, Message, Prompt, is_given
from ..prompts.prompt_files import ReadPrompts, Source
from ..prompts.sources import OwnPrompts, PromptConfig
from ..store.token_store import SOURCES, Manifest, SourceName
from .answer_server import AnswerServer, ServerAnswerer, check_address
from .answering import Answerer, Conversation, Writer, source_of

PACKAGES = ("draftsmith", "safetensors", "tokenizers", "torch", "transformers")  # Their versions decide a shard's bytes
SAID: Message = {"role": "assistant", "content": "a"}  # The shortest answer, of a trial: answers fill the context
AUTO = "auto"  # Workers: as many as GPUs or threads, as long as prompts and memory last
LIMITS = ("budget_tokens", "budget_minutes")  # Settings that end the answers and change none of them; None is no limit
TrainFormat = Literal["own", "fastest", "float32", "bfloat16"]
"""Number formats for train prompts. A target in float16 has another hash of its weights than in float32."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedSettings):
    """Number, length and sampling of the answers, and their writers."""

    section: ClassVar[str] = "distill"

    shard_prompts: Rows = 128
    """Prompts of one shard, which a killed run makes again, and which the target writes before it answers the first:
    with prompts of its own, no more than slots. States that are to be stored are in memory until then."""
    slots: Rows = 32
    """Answers generated at once; a finished one makes room for the next prompt of its shard."""
    max_new_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 192
    """Longest answer, in tokens; longer ones are cut and marked."""
    temperatures: Temperatures = (0.0,)
    """Sampling temperatures of the answers, given to the prompts in turn; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: Share = 1.0
    """Sample within this share of the probability."""
    budget_tokens: Whole | None = None
    """Stop after the shard that reaches this many answer tokens; None stops when the prompts are used up. A larger
    number adds answers to a folder that is complete."""
    budget_minutes: Positive | None = None
    """End all answers after this many minutes, interrupted runs included; the first batch of train prompts and a few
    held-out ones still get the first 32 tokens of theirs. Not repeatable; tokens are."""
    validation_prompts: RowsOrNone = 32
    """Prompts held out: answered greedily to choose checkpoints and the tree by, and once more at temperature 1, by
    which trees for sampled answers are sized. Where minutes are short 12 of them are answered, where none is left 4;
    more minutes answer the rest."""
    test_prompts: RowsOrNone = 0
    """Prompts held out for evaluation, written to test.jsonl."""
    seed: Seed = 0
    """Seed of the prompts that the target writes and of sampled answers."""
    answered_by: SourceName | dict[SourceName, Share] = "target"
    """Writer of the training rows. target: the target answers; text: answers and plain documents of the prompts are
    taken as they are; draft: an artifact's draft answers, for objectives that learn from the target's distribution.
    A mapping gives several their shares of the train prompts, such as {target: 0.5, draft: 0.5}; they sum to 1.
    Held-out prompts are always answered by the target."""
    draft: str | None = None
    """Folder of the artifact whose draft answers."""
    train_dtype: TrainFormat = "own"
    """Number format in which the target writes prompts and answers those of the training split: own is that of the
    target; fastest is bfloat16 where it was measured to decode `slots` rows faster on this processor, which the run's
    folder keeps. Held-out prompts are always answered in the target's own format."""
    engine: str = "own"
    """Writer of the target's answers to train prompts. own: this project's decoding loop; an address: an inference
    server of the same model, which must return token ids, http://host:port/v1 of vLLM or another OpenAI-style server
    with `return_token_ids`, or http://host:port/generate of SGLang. Its key, where it asks for one, is the
    environment's DRAFTSMITH_SERVER_KEY. Its answers are compared with the target's first, and may differ from one run
    to the next; finished shards do not. Held-out prompts and drafts' rows are always decoded here."""
    states_from: str | None = None
    """Engine that gives the target's states in place of its own passes, for a target beyond one machine: the address
    http://host:port/v1 of vLLM with `extract_hidden_states`, or a folder in which an engine takes requests, such as
    /dev/shm/states. They are compared with the target's own states at a few rows first. null: the target's own."""
    workers: Processes | Literal["auto"] | None = None
    """Processes that are started here to answer train prompts together, each with one thread of the processor (all of
    them where one shard is all there is), or on a GPU of its own; no more than there are GPUs, or shards of prompts
    where their number is known. null: one process with all threads. auto: one for each GPU, or for each thread of torch
    (OMP_NUM_THREADS), at most eight and as many as memory holds copies of the target. The same command on another
    machine with the same disk joins in. Their number and their ends change no byte of the data, as long as one kind of
    machine answers with one number of threads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # What shares leave open would all go to the last writer.
        if isinstance(given := self.answered_by, dict):
            total = sum(given.values())
            if not math.isclose(total, 1, abs_tol=1e-6):
                shown = ", ".join(f"{name}: {share}" for name, share in given.items())
                raise UserError(f"the shares of distill.answered_by must sum to 1, got {total:g} ({shown})")
        if ("draft" in self.shares) != (self.draft is not None):
            raise UserError(
                f"distill.draft is {self.draft}, but a draft writes {self.shares.get('draft', 0.0):.0%} of the train "
                "rows; name an artifact's folder where a draft writes, and only there")
        if self.states_from is not None and "://" in self.states_from:
            check_address(self.states_from, "distill.states_from must be a folder or")
        if self.server is not None:
            check_address(self.server)
        # Drafts' rows and held-out ones are decoded here whatever the engine: without a share it would have no work.
        if self.engine != "own" and "target" not in self.shares:
            raise UserError(f"distill.engine is {self.engine}, which answers for the target, and distill.answered_by "
                            f"is {self.answered_by}; set a share of the target, or distill.engine: own")
        if self.server is not None and self.train_dtype != "own":
            raise UserError(f"a server answers in its own number format, but distill.train_dtype is "
                            f"{self.train_dtype}; set train_dtype: own, or distill.engine: own")

    @property
    def server(self) -> str | None:
        """Address of the server that answers; None where none does."""
        return None if self.engine == "own" else self.engine

    @property
    def shares(self) -> dict[SourceName, float]:
        """Share of each writer among the training prompts."""
        given = {self.answered_by: 1.0} if isinstance(self.answered_by, str) else self.answered_by
        return {name: given[name] for name in SOURCES if name in given}


def require_enough(prompts: PromptConfig, config: DistillConfig) -> None:
    """Refuse a file whose prompts cannot be read, or would all be held out, before the target is loaded: UserError as
    that of `ReadPrompts.skipped`, or with the numbers of prompts."""
    if prompts.origin != "file":
        return
    source, held = ReadPrompts(prompts, config.seed), config.validation_prompts + config.test_prompts
    there = (source.total or 0) - len(source.skipped())
    if there <= held:
        raise UserError(
            f"{prompts.path} gives {there} prompts, and {held} are to be held out (distill.validation_prompts "
            f"{config.validation_prompts}, distill.test_prompts {config.test_prompts}), which leaves none to train on; "
            "give more prompts, or lower these numbers")


def raised_limits(former: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Limits of answer tokens and minutes that are higher in `wanted` than in `former`, by name; both are settings of
    the answers, as a manifest's recipe has them."""
    return {limit: wanted[limit] for limit in LIMITS if former.get(limit) is not None
            and (wanted[limit] is None or wanted[limit] > former[limit])}


@dataclass(frozen=True, kw_only=True)
class DistillTask:
    """Arguments of a distillation that fit one another: UserError if the recipe does not fit the source or the target,
    ValueError if a caller gives a writer without `distill.draft`, or another target than `train_dtype` names."""

    target: Target  # Answers held-out prompts; its identity and its states are those of the data
    train_target: Target  # In the number format of `distill.train_dtype`: writes prompts and answers those of training
    prompts: PromptConfig
    config: DistillConfig
    template: ChatTemplate  # Of the target's tokenizer
    writer: Writer | None  # The draft that writes rows; None where none does
    unwritten: Counter[str] = field(default_factory=Counter, init=False)
    """Checks of rows of which the chat template leaves something out, by what: tools, tool calls, thoughts."""

    def __post_init__(self) -> None:
        prompts, config, context = self.prompts, self.config, self.target.context_length
        endless = config.budget_tokens is None and config.budget_minutes is None and prompts.limit is None
        if prompts.origin == "own" and endless:
            raise UserError("prompts of the target have no limit; set distill.budget_tokens, distill.budget_minutes or "
                            "prompts.limit")
        if prompts.origin == "own" and "text" in config.shares:
            raise UserError("prompts.origin own has no ready-made answers; set distill.answered_by: target")
        if config.max_new_tokens >= context:
            raise UserError(f"distill.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the "
                            f"target's context of {context} tokens; lower it")
        if prompts.max_prompt_tokens is not None and prompts.max_prompt_tokens + config.max_new_tokens > context:
            raise UserError(f"prompts.max_prompt_tokens {prompts.max_prompt_tokens} and distill.max_new_tokens "
                            f"{config.max_new_tokens} exceed the target's context of {context} tokens; lower one")
        if (self.writer is None) != (config.draft is None):
            raise ValueError("distill.draft names an artifact and the writer is its draft; give both or neither")
        wanted = self.target.dtype if config.train_dtype == "own" else getattr(torch, config.train_dtype, None)
        if self.train_target.dtype is not wanted:
            raise ValueError(f"train_target is in {self.train_target.dtype}, and distill.train_dtype is "
                             f"{config.train_dtype}; fastest is measured by draftsmith.recipes")
        self.train_target.identity.require_same(self.target.identity)

    def source(self) -> Source:
        """The candidates for prompts. Raises UserError if the target cannot write them as the recipe asks."""
        config = self.config
        if self.prompts.origin == "own":
            # Written prompts that do not fit are left out in silence: here it shows that none can.
            self.check(0, Prompt.from_turns("a", id="0"))
            return OwnPrompts(self.train_target, self.template, self.prompts, seed=config.seed, slots=config.slots,
                              check=self.check)
        return ReadPrompts(self.prompts, config.seed, self.check,
                           whole=config.budget_tokens is None and config.budget_minutes is None)

    def answerer(self, target: Target, settings: DecodeSettings, on_tokens: Callable[[int], None],
                 on_slots: Callable[[int, int], None] | None = None, *, served: bool = True) -> Answerer:
        """The answers of a target, or with `served` those of the server that answers for it, if there is one."""
        common = self.template, settings, self.config.max_new_tokens, on_tokens
        if served and self.config.server is not None:
            return ServerAnswerer(AnswerServer(self.config.server), target, *common)
        return Answerer(target, *common, on_slots=on_slots)

    @cached_property
    def given(self) -> GivenAnswers:
        """Turns of the answers that rows bring."""
        return GivenAnswers(self.template)

    def check(self, number: int, prompt: Prompt) -> None:
        """Refuse a prompt that its writer cannot use: nobody answers documents, text brings answers, the template takes
        both, and all turns leave room for an answer. Raises UserError."""
        given = source_of(number, self.config.shares, self.config.seed) == "text"
        if prompt.document is not None:
            # As text it is cut into pieces of any length.
            if not given:
                prompt.history()
            return
        if given and not prompt.learned:
            empty = any(is_given(prompt.messages[place]) for place in prompt.asked if place < len(prompt.messages))
            raise UserError(("one of its answers is empty, and what follows it cannot be learned" if empty else
                             "the row has no answer of its own") + "; give messages with assistant turns, or set "
                            "distill.answered_by: target")
        thoughtless = given and any(one.thoughtless for one in self.given_texts(prompt))
        # Rows that bring answers may be held out, and are asked then.
        texts, between = self.asked_texts(prompt), len(prompt.asked) - 1
        if not all(texts):
            raise UserError("the chat template writes nothing of the prompt; give some text")
        last = texts[-len(texts) // len(prompt.asked) :]
        limit, room = self.prompts.max_prompt_tokens, self.target.context_length - self.config.max_new_tokens
        # No token is shorter than a byte; NFKC writes at most 33 bytes for 3, and a few tokens may stand before a text.
        # To count them takes ten times as long as to render them, and of a large file only a few rows may be too long.
        if 16 + max(len(text.encode()) * (1 if text.isascii() else 11) for text in last) > min(room, limit or room):
            size = max(len(self.template.encode(text)) for text in last) - between
            found = f"{size:,} tokens{' in all its turns' if between else ''}"
            if limit is not None and size > limit:
                raise LeftOutError(f"the prompt is longer than prompts.max_prompt_tokens, got {found}, more than "
                                   f"{limit:,}; nothing is to do")
            if size > room:
                raise UserError(f"the prompt leaves no room for an answer, got {found}, and the target's context of "
                                f"{self.target.context_length:,} less distill.max_new_tokens holds {room:,}; shorten "
                                "it, or lower distill.max_new_tokens")
        self.unwritten.update(self.template.unwritten(prompt.history([SAID] * between), prompt.tools))
        self.unwritten.update(["thoughts"] * thoughtless)

    def asked_texts(self, prompt: Prompt) -> list[str]:
        """Texts that the target reads of a conversation, turn by turn, in each mode that it may get."""
        modes = dict.fromkeys(self.template.mode(prompt, number) for number in range(len(self.template.modes)))
        return [self.template.rendered(prompt.history([SAID] * turn), mode, True, prompt.tools)
                for turn in range(len(prompt.asked)) for mode in modes]

    def given_texts(self, prompt: Prompt) -> list[GivenText]:
        """Texts of the source's own answers that are learned."""
        return [self.given.text(prompt.messages[:place], prompt.messages[place], prompt.tools)
                for place in prompt.learned]

    def asked_key(self, prompt: Prompt) -> int:
        """Signed 64-bit hash of all that reaches the model before the answers that it is asked for."""
        return _hash([prompt.document, self.asked_texts(prompt)])

    def key(self, number: int, prompt: Prompt) -> int:
        """Signed 64-bit hash of all that reaches the model of a train row: equal ones are duplicates."""
        given = source_of(number, self.config.shares, self.config.seed) == "text" and prompt.document is None
        if not given:
            return self.asked_key(prompt)
        return _hash([(one.prompt, one.answer) for one in self.given_texts(prompt)])

    def manifest(self) -> Manifest:
        """The manifest of these data before the first prompt."""
        source = asdict(self.prompts)
        # Files stand there by their content instead of their path, since folders may move.
        if source["path"] is not None and (place := Path(source["path"])).exists():
            source |= {"path": place.name, "sha256": files_digest(place, ("**/*",))}
        # How much may be skipped decides no byte: data that were refused for it go on with another setting.
        del source["most_skipped"]
        answers = {**asdict(self.config), "draft": None if self.writer is None else self.writer.digest}
        # Neither the number of processes nor a server's address decides a byte, nor whoever reads them afterwards.
        del answers["workers"], answers["states_from"], answers["engine"]
        engine = {} if self.config.server is None else {"engine": "server"}
        recipe: dict[str, Any] = json.loads(json.dumps({"prompts": source, "distill": answers | engine}))
        return Manifest(target=self.target.identity, template_hash=self.template.hash, recipe=recipe,
                        versions={name: version(name) for name in PACKAGES})


def _hash(said: Sequence[Any]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(said).encode()).digest()[:8], "little", signed=True)


DOCUMENT_TOKENS = 512  # Longest piece of a plain document, in tokens; each piece is a row of its own


class RowWriters:
    """Writers of the train rows of one task; the calls are those of `Answerer`. UserError if an engine does not take
    the target."""

    def __init__(self, task: DistillTask, on_tokens: Callable[[int], None], on_slots: Callable[[int, int], None]
                 ) -> None:
        config = task.config
        settings = DecodeSettings(batch_size=config.slots, top_k=config.top_k, top_p=config.top_p, seed=config.seed)
        self.task = task
        self.target = task.answerer(task.train_target, settings, on_tokens, on_slots)
        self.draft = Answerer(task.target, task.template, settings, config.max_new_tokens, on_tokens, task.writer,
                              on_slots)

    def conversations(self, prompts: Sequence[tuple[int, Prompt]], deadline: float | None,
                      taps: tuple[int, ...] | None, assured: Set[int] = frozenset()) -> list[Conversation]:
        """The answered prompts in their order, each by the writer drawn for its number; the rest is that of
        `Answerer.answer`."""
        config, dealt = self.task.config, dict[SourceName, list[tuple[int, Prompt]]]()
        for number, prompt in prompts:
            dealt.setdefault(source_of(number, config.shares, config.seed), []).append((number, prompt))
        found: list[Conversation] = []
        for name in SOURCES:
            if name == "text":
                found += take_given(dealt.get(name, []), self.task.template, self.task.target.context_length)
            elif name in dealt:
                answerer = self.target if name == "target" else self.draft
                found += answerer.answer(dealt[name], config.temperatures, deadline, taps, assured=assured)
        return sorted(found, key=lambda one: one.number)


def take_given(prompts: Sequence[tuple[int, Prompt]], template: ChatTemplate, context_length: int
               ) -> list[Conversation]:
    """Use the source's own answers, cutting conversations at the target's context, and plain documents in pieces."""
    found, given = [], GivenAnswers(template)
    for number, prompt in prompts:
        one = Conversation(number=number, prompt=prompt, source="text")
        if prompt.document is not None:
            tokens, flags = template.document(prompt.document)
            length = min(DOCUMENT_TOKENS, context_length)
            # A last token alone would be a row without a label.
            cuts = [slice(start, start + length) for start in range(0, max(1, len(tokens) - 1), length)]
            one.turns = [Turn(prompt=[], answer=tokens)]
            one.lay_out([(tokens[cut], flags[cut]) for cut in cuts])
            found.append(one)
            continue
        one.turns = [given.turn(prompt.messages[:place], prompt.messages[place], prompt.tools)
                     for place in prompt.learned]
        one.full = any(len(turn.prompt) + len(turn.answer) > context_length for turn in one.turns)
        one.lay_out([(tokens[:context_length], flags[:context_length]) for tokens, flags in join_turns(one.turns)])
        found.append(one)
    return found
