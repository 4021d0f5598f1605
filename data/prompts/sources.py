"""Sources of prompts: the settings, and the prompts that the target itself writes (Magpie, arXiv:2406.08464).

An instruct model that continues the tokens before a user's turn writes a message like a user's. Its text up to the end
of that turn is a prompt. After nothing but its chat template it writes those that are commonest in its training data. A
system prompt before the user's turn steers it (section 2.2): those here say what the assistant is for, and the message
that a user sends to such an assistant is written next. They do not stay in the training data: the prompt is answered as
if it had come by itself. A target too small to follow them goes on from the first words of such a message instead,
which stay."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...modules import DecodeSettings, DecodeStats, Generation, Request, Target, UserError, decode
from ...modules.config_checks import CheckedSettings, Whole
from ...modules.decoding.requests import repeats_itself
from ...modules.files.json_records import require_ordinary
from ...modules.verification.sampling import GREATEST_TEMPERATURE, LEAST_TEMPERATURE
from .chat import ChatTemplate
from .prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class PromptConfig(CheckedSettings):
    """Origin of the prompts, and which of them are read."""

    section: ClassVar[str] = "prompts"

    origin: Literal["own", "file", "dataset"] = "own"
    """own: the target writes them (arXiv:2406.08464); file: JSON Lines, a JSON array or Parquet; dataset: one of
    `datasets`."""
    path: str | None = None
    """File of the prompts (origin file), plain or gzipped, or hub name or local folder of the dataset (origin
    dataset)."""
    subset: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    """Split of the dataset."""
    revision: str | None = None
    """Commit or tag of a dataset on the hub."""
    streaming: bool = False
    """Read the dataset while it downloads instead of downloading it first."""
    column: str | None = None
    """Column or key of the conversation or the prompt, where it is none of the known ones."""
    limit: Whole | None = None
    """Read this many rows and no more; None reads all."""
    shuffle: bool = False
    """Shuffle the prompts by the seed of the run (a streamed dataset: within a buffer of 10,000)."""
    most_skipped: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of rows that cannot be read, that the chat template refuses, or that leave no room for an answer:
    they are skipped, counted and listed in data/skipped.jsonl. With more of them nothing is answered. Where a budget
    may end the work, or a stream has no limit, the first 10,000 rows are looked at before, others in their turn. 0
    stops at the first such row."""
    max_prompt_tokens: Whole | None = None
    """Leave out prompts longer than this, in tokens, all their turns together and no answers: they are listed, and do
    not count for `most_skipped`. None leaves out those without room for an answer."""
    own_max_tokens: Whole = 64
    """Longest prompt the target may write (origin own), in tokens; longer ones are dropped."""
    own_temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Temperature at which the target writes prompts (origin own)."""
    own_kinds: tuple[str, ...] | None = None
    """Kinds of prompts that the target writes (origin own), drawn for each prompt with equal chance: a system prompt
    that is not kept asks for coding, dialogue, extraction, humanities, math, reasoning, retrieval, rewriting, roleplay,
    stem, summary, translation or writing, and none for `any`; `all` is all of them. None asks for nothing."""
    own_openings: bool = False
    """Give the first words of each prompt of a kind (own_kinds), drawn from a list, for the target to go on from, in
    place of a system prompt, which a small target hardly follows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.origin == "own") != (not self.path):
            found = "null" if self.path is None else repr(self.path)
            raise UserError(f"prompts.origin is {self.origin} and prompts.path is {found}; give the path of a file or "
                            "the name of a dataset with origin file or dataset, and only there")
        if self.origin == "file":
            require_ordinary(Path(self.path or ""))
            if Path(self.path or "").is_dir():
                raise UserError(f"prompts.path {self.path} is a folder; name a file in it, or read all its files with "
                                "--prompts.origin dataset")
        if self.own_kinds is not None:
            named_kinds(self.own_kinds)
        elif self.own_openings:
            raise UserError("prompts.own_openings is true, but prompts.own_kinds is null, and an opening is that of a "
                            "kind; set prompts.own_kinds: [all], or leave prompts.own_openings out")


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that is not used."""

    row: str  # Its place: a file with the line or the number of the row, or a dataset with the number
    reason: str  # The sentence that says what is wrong, and what to do
    wanted: bool = False  # True where the source or the recipe leaves it out on purpose

    @property
    def kind(self) -> str:
        """The reason up to the values of this row and the remedy: rows of one kind are counted together."""
        return re.split(r", got | \(|;|: ", self.reason)[0].strip()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Consecutive candidates."""

    prompts: list[tuple[int, Prompt]]  # The usable ones, each with its number
    read: int  # Number of candidates; fewer than asked for when the source has no more
    repeated: int = 0  # Usable ones that are left out of `prompts`, since the data have them
    skipped: tuple[Skipped, ...] = ()  # Unusable ones that `ReadPrompts.skipped` has not looked at


UNSTEERED = "any"  # The kind that no system prompt asks for
ALL_KINDS = "all"  # Stands for every kind, the unsteered one included
_ASSISTANT = "You are an AI assistant for {}. The user's message {}"
_PURPOSES = {
    "coding": ("programmers", "asks for a short program or for an explanation of a piece of code, and names the "
               "language."),
    "dialogue": ("everyday conversation", "talks about the user's day, plans or feelings and asks for advice."),
    "extraction": ("extracting information", "contains a short text and asks for certain facts in it as a list or as "
                   "JSON."),
    "humanities": ("students of history, philosophy, politics and art", "asks for an explanation, a comparison or a "
                   "discussion of a topic."),
    "math": ("mathematics", "is an exercise with all its numbers: arithmetic, algebra, geometry or probability."),
    "reasoning": ("logic", "is a puzzle or a question about a situation whose answer takes several steps of thought."),
    "retrieval": ("questions about documents", "contains a paragraph and asks a question that the paragraph answers."),
    "rewriting": ("editing", "contains a sentence or a short paragraph and asks to correct it, or to rewrite it in "
                  "another style."),
    "roleplay": ("role play", "asks the assistant to speak as a certain character in a certain situation."),
    "stem": ("science and engineering", "asks how something in physics, chemistry, biology or technology works."),
    "summary": ("summarising", "contains a short text and asks for a summary in one or two sentences."),
    "translation": ("translation", "contains a sentence and asks to translate it from one language into another."),
    "writing": ("writers", "asks for an email, a story, a poem, a description or another short text."),
}
SYSTEM_PROMPTS = {kind: _ASSISTANT.format(*purpose) for kind, purpose in _PURPOSES.items()}  # By kind
OPENINGS = {
    "coding": ("Write Python code that", "Implement a function in Java that", "How do I use",
               "Debug the following code:", "Show me an example of", "Write a Bash script that",
               "Create a class in C++ that", "What is wrong with", "Convert this code from Python to JavaScript:",
               "Write a regular expression that", "In Python, how can I"),
    "dialogue": ("I feel", "Today I", "My best friend", "I have been thinking about", "Hi! I just",
                 "Do you think I should", "My daughter", "Last weekend we", "I can't decide", "How was your",
                 "My boss"),
    "extraction": ("Extract all names and places from the following text:",
                   "List the products with their prices as JSON:", "From the paragraph below, pick out",
                   "Read this email and tell me who", "Which numbers occur in",
                   "Put the facts of this article into a table:", "Classify the following sentences:",
                   "Identify the main events in this text:"),
    "humanities": ("Who was", "Compare the philosophy of", "What caused the", "Discuss the influence of",
                   "Explain how the", "When did the", "What role did", "Give me an overview of the history of",
                   "How did art", "Is it right to", "What are the main arguments for"),
    "math": ("Calculate", "If 5", "Solve the equation", "A store sells", "What is the area of", "Find the value of",
             "Simplify the expression", "A car drives", "In a class of", "Maria has", "Prove that",
             "What is the sum of", "How many different"),
    "reasoning": ("There are four", "Suppose that", "All cats", "Tom is taller than", "You have two",
                  "A man walks into", "Which one does not belong:", "If it rains", "What comes next:", "Yesterday was",
                  "Is it possible that"),
    "retrieval": ("Read the following passage and answer the question.", "According to this article, what",
                  "Answer from the text below:", "Passage:", "Based on the following document,", "Context:"),
    "rewriting": ("Correct the grammar of this sentence:", "Make the following paragraph shorter:", "Rephrase:",
                  "Improve this text:", "Change the following sentence into the passive voice:", "Edit this email:",
                  "Write the following text in simpler words:", "Paraphrase the sentence"),
    "roleplay": ("Speak as", "You are now a", "Let's play a game. You are", "From now on you are",
                 "Answer as if you were", "Take the role of", "Imagine you're", "I want you to act as",
                 "We are in a castle."),
    "stem": ("How do", "Why does", "What happens when", "Explain what", "What are the properties of", "Describe the",
             "What causes", "How is energy", "What is the function of", "How can scientists measure", "Define"),
    "summary": ("Summarize the following text in one sentence:", "Give me the main points of this article:", "TL;DR:",
                "What is the main idea of this paragraph?", "Write a short summary of", "Shorten this report:"),
    "translation": ("Translate into French:", "Translate the following sentence from English to Spanish:",
                    "How do you say", "What does this mean in English:", "Give me the German word for"),
    "writing": ("Write a story about", "Write a song about", "Help me write", "Write a letter to", "Write an essay on",
                "Compose a poem", "Write a blog post about", "Describe a", "Write a dialogue between",
                "Give me a title for", "Continue this story:", "Write an advertisement for"),
}  # Words with which a message of each kind may begin


def named_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds of a list of names. Raises UserError if it is empty, a name is unknown or occurs twice, or `all` stands
    next to others."""
    known = (*SYSTEM_PROMPTS, UNSTEERED)
    if list(names) == [ALL_KINDS]:
        return known
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise UserError(f"prompts.own_kinds must be one or more different names among {', '.join(known)}, or "
                        f"{ALL_KINDS} alone, got {list(names)}; null writes prompts without a system prompt")
    return tuple(names)


def drawn(kinds: Sequence[str], seed: int, number: int) -> tuple[str, str]:
    """(kind, opening) of prompt `number`, each of its list with equal chance; a pure function of the seed and the
    number. The opening of the unsteered kind is empty."""
    # Each has a stream of its own: the kinds are the same whether openings are given or not.
    seeds = (hashlib.sha256(f"{what} {seed} {number}".encode()).digest() for what in ("kind", "opening"))
    kind_stream, opening_stream = (random.Random(int.from_bytes(one[:8], "little")) for one in seeds)
    kind = kind_stream.choice(kinds)
    return kind, opening_stream.choice(OPENINGS.get(kind, ("",)))


OPENING_TOKENS = 16  # Tokens of a prompt by a base model without a template: the start of a text to be continued
TOP_P = 0.95  # Nucleus from which the target draws its prompts
RECORDED = Path(__file__).with_name("recorded.jsonl")
"""Candidates 0, 1, ... that the embedded target wrote once (`tests/benchmarks/record_prompts.py`), since to write them
takes as long as to answer them. First comes `OwnPrompts.origin`, then the text of each, empty where it is unusable."""


class OwnPrompts:
    """Candidates that the target writes, so many slots at once; candidate n is a pure function of the weights, the
    config and the seed of the run. None is written twice: what is recorded for these weights and settings is read, and
    what was written is kept. `check` raises UserError for the number and the prompt of one that cannot be used, which
    is left out.

    Raises UserError if kinds are asked for and the chat template cannot show them."""

    def __init__(self, target: Target, template: ChatTemplate, config: PromptConfig, *, seed: int, slots: int,
                 check: Callable[[int, Prompt], None] = lambda *_: None) -> None:
        self.target, self.template, self.config, self.seed, self.check = target, template, config, seed, check
        self.total = config.limit  # Largest number of candidates; None where there is no limit
        self.around = template.user_turn()
        self.plain = template.source is None
        self.kinds = (UNSTEERED,) if config.own_kinds is None else named_kinds(config.own_kinds)
        self.befores = dict.fromkeys(self.kinds, self.around.before)  # Tokens after which one of each kind is written
        if config.own_kinds is not None and not config.own_openings:
            # The system prompt of each kind stands before its prompts, and must be seen there: a template that drops
            # it would give prompts of no kind at all.
            if self.plain:
                raise UserError("prompts.own_kinds without prompts.own_openings needs a chat template, and this target "
                                "has none; set prompts.own_openings: true")
            for kind in (one for one in self.kinds if one != UNSTEERED):
                asked = f"prompts.own_kinds asks for {kind} by a system prompt, which the chat template of this target"
                try:
                    shown = template.user_turn([{"role": "system", "content": SYSTEM_PROMPTS[kind]}])
                except UserError as error:
                    raise UserError(f"{asked} refuses ({error}); leave prompts.own_kinds out") from error
                if shown == self.around:
                    raise UserError(f"{asked} does not show; leave prompts.own_kinds out")
                self.befores[kind] = shown.before
        self.stats = DecodeStats()
        self.watch: Callable[[], None] = lambda: None  # Called in every pass; what it raises ends the writing
        # An end token of the target ends a message; where the template writes something else after one, that text does.
        end = self.around.after
        stop = () if not end or end[0] in target.eos_ids else (target.tokenizer.decode(list(end)),)
        # Streams of their own: prompt n and answer n would otherwise draw the same numbers.
        stream = int.from_bytes(hashlib.sha256(f"prompts {seed}".encode()).digest()[:8], "little")
        self.settings = DecodeSettings(batch_size=slots, top_p=TOP_P, seed=stream, stop=stop)

    @property
    def origin(self) -> dict[str, Any]:
        """All that decides the candidates, as JSON has it."""
        return {"target": self.target.identity.weights_hash, "tokens": self.target.identity.tokens_hash,
                "befores": {kind: list(tokens) for kind, tokens in self.befores.items()},
                "stop": list(self.settings.stop), "seed": self.seed, "top_p": TOP_P,
                **{name: getattr(self.config, name) for name in ("own_max_tokens", "own_temperature", "own_openings")}}

    @cached_property
    def texts(self) -> dict[int, str]:
        """Candidates that are known, by number; the text of an unusable one is empty."""
        with RECORDED.open(encoding="utf-8") as lines:
            known = json.loads(next(lines)) == self.origin
            return {number: json.loads(line) for number, line in enumerate(lines)} if known else {}

    def take(self, start: int, count: int) -> Taken:
        """Candidates start to start + count - 1, without the unusable ones."""
        limit = self.config.limit
        numbers = range(start, start + (count if limit is None else max(0, min(count, limit - start))))
        self.texts.update(self._written(number for number in numbers if number not in self.texts))
        prompts = []
        for number in numbers:
            if text := self.texts[number]:
                prompt = Prompt.from_turns(text, id=str(number), category="own")
                with suppress(UserError):
                    self.check(number, prompt)
                    prompts.append((number, prompt))
        return Taken(prompts=prompts, read=len(numbers))

    def _written(self, numbers: Iterable[int]) -> dict[int, str]:
        """These candidates, written now."""
        longest = min(OPENING_TOKENS, self.config.own_max_tokens) if self.plain else self.config.own_max_tokens
        openings, requests = dict[int, str](), list[Request]()
        for number in numbers:
            kind, opening = drawn(self.kinds, self.seed, number)
            openings[number] = opening if self.config.own_openings else ""
            first = self.target.tokenizer(openings[number], add_special_tokens=False)["input_ids"]
            tokens = (*self.befores[kind], *first)
            # A kind's system prompt may fill a short context; such a candidate counts as read and unusable.
            if len(tokens) + longest <= self.target.context_length:
                requests.append(Request(tokens, number, longest, self.config.own_temperature))
        found = dict.fromkeys(openings, "")
        if not requests:
            return found
        # Every slot holds a whole chunk of its prompt, so a chunk is no longer than the longest prompt.
        chunk = min(self.settings.prefill_chunk, max(len(request.tokens) for request in requests))
        result = decode(self.target, requests, replace(self.settings, prefill_chunk=chunk),
                        on_tokens=lambda *_: self.watch())
        self.stats.add(result.stats)
        for generation in result.generations:
            number = generation.request.index
            if text := self._text(generation):
                found[number] = f"{openings[number]}{text}".strip()
        return found

    def _text(self, generation: Generation) -> str:
        """The text of a turn, empty where it is not usable: cut off, repetitive, or with special tokens inside."""
        tokens = generation.tokens
        # A base model's text is a beginning that may stop anywhere; a message that was cut is none that a user sends.
        if not self.plain:
            if generation.finish == "length":
                return ""
            if self.settings.stop:
                # The text that ends a turn may share its first token with the turn's last word.
                before = self.target.tokenizer.decode(list(tokens)).split(self.settings.stop[0])[0]
                tokens = list(self.target.tokenizer(before, add_special_tokens=False)["input_ids"])
            else:
                tokens = list(tokens[:-1])
        # Special tokens inside are a turn of another role; repetitions are where a small model got stuck.
        special = set(self.target.tokenizer.all_special_ids)
        if special & set(tokens) or repeats_itself(tokens):
            return ""
        text: str = self.target.tokenizer.decode(tokens)
        return text if any(character.isalpha() for character in text) else ""
