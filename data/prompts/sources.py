"""Prompts from a file or a dataset, in the usual four shapes."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ...modules import UserError
from ...modules.files.bounded_reading import PROMPT_BYTES, bounded_json, read_bounded_text, require_ordinary
from ...modules.files.json_records import problem
from ...modules.verification.sampling import GREATEST_TEMPERATURE, LEAST_TEMPERATURE
from .prompt import Message, Prompt
from .prompt_kinds import named_kinds

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
"""Roles by their names in OpenAI-like `messages` and in ShareGPT `conversations`."""
STREAM_BUFFER = 10_000
"""Rows a streamed dataset is shuffled among."""


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Origin of the prompts, and which of them are read."""

    origin: Literal["own", "file", "dataset"] = "own"
    """own: the target writes them (arXiv:2406.08464); file: a JSONL file; dataset: a name or folder for `datasets`."""
    path: str | None = None
    """JSONL file: one object a line with prompt, messages, conversations (ShareGPT), turns (Spec-Bench) or, for a plain
    document, text."""
    name: str | None = None
    """Hub name or local folder of the dataset (origin dataset)."""
    subset: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    """Split of the dataset."""
    revision: str | None = None
    """Commit or tag of a dataset on the hub."""
    streaming: bool = False
    """Read the dataset while it downloads instead of downloading it first."""
    column: str | None = None
    """Column or key with the prompt text, where it is none of prompt, messages, conversations, turns."""
    limit: int | None = None
    """Read at most this many prompts; None reads all."""
    shuffle: bool = False
    """Shuffle the prompts by the seed of the run (a streamed dataset: within a buffer of 10,000)."""
    skip_malformed: bool = False
    """Leave out rows that are in none of the known shapes instead of stopping at the first."""
    max_prompt_tokens: int | None = None
    """Leave out prompts longer than this, in tokens, all their turns together and no answers; None stops at a prompt
    that leaves no room for an answer."""
    own_max_tokens: int = 64
    """Longest prompt the target may write (origin own), in tokens; longer ones are dropped."""
    own_temperature: float = 1.0
    """Temperature at which the target writes prompts (origin own)."""
    own_kinds: tuple[str, ...] | None = None
    """Kinds of prompts that the target writes (origin own), drawn for each prompt with equal chance: a system prompt
    that is not kept asks for coding, dialogue, extraction, humanities, math, reasoning, retrieval, rewriting, roleplay,
    stem, summary, translation or writing, and none for `any`; `all` is all of them. None asks for nothing."""
    own_openings: bool = False
    """Give the first words of each prompt of a kind (own_kinds), drawn from a list, for the target to go on from, in
    place of a system prompt, which a small target hardly follows."""

    def __post_init__(self) -> None:
        needed = {"file": self.path, "dataset": self.name, "own": "nothing"}
        if not needed[self.origin]:
            key = "path" if self.origin == "file" else "name"
            raise UserError(f"prompts.origin {self.origin} needs prompts.{key}; give it")
        for key, origin, value in (("path", "file", self.path), ("name", "dataset", self.name)):
            if value is not None and self.origin != origin:
                raise UserError(f"prompts.{key} is {value!r}, but prompts.origin is {self.origin}, which does not read "
                                f"it; set prompts.origin to {origin}, or leave prompts.{key} out")
        if self.origin == "file":
            require_ordinary(Path(self.path or ""))
        if self.own_kinds is not None:
            named_kinds(self.own_kinds)
        elif self.own_openings:
            raise UserError("prompts.own_openings is true, but prompts.own_kinds is null, and an opening is that of a "
                            "kind; set prompts.own_kinds: [all], or leave prompts.own_openings out")
        for key in ("limit", "max_prompt_tokens", "own_max_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"prompts.{key} must be at least 1, got {value}")
        if not LEAST_TEMPERATURE <= self.own_temperature <= GREATEST_TEMPERATURE:
            raise UserError(f"prompts.own_temperature must lie between {LEAST_TEMPERATURE:g} and "
                            f"{GREATEST_TEMPERATURE:g}, got {self.own_temperature}; try 1.0")


def parse_prompt(row: Any, where: str, column: str | None = None) -> Prompt:
    """Make a prompt of one row: `prompt`, `messages`, `conversations` or `turns`, or the text under `column`.

    A row with none of them but `text` is a plain document.

    Raises:
        UserError: naming `where` and what is wrong.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}; write one object a line")
    identifier = _text({"question_id": str(row.get("question_id", where))}, "question_id", where)
    category, system = (None if row.get(key) is None else _text(row, key, where) for key in ("category", "system"))
    if column is not None or "prompt" in row:
        return Prompt.from_turns(_text(row, column or "prompt", where), id=identifier, system=system, category=category)
    if "turns" in row:
        texts = row["turns"]
        if not isinstance(texts, list) or not texts:
            raise UserError(f"{where}: turns must be a list of texts, got {_short(texts)}")
        turns = [_text({"turns": text}, "turns", where) for text in texts]
        return Prompt.from_turns(*turns, id=identifier, system=system, category=category)
    for key, speaker, words in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in row:
            messages = _conversation(row[key], speaker, words, where, system)
            return Prompt(messages=messages, id=identifier, category=category)
    if "text" in row:
        return Prompt(document=_text(row, "text", where), id=identifier, category=category)
    raise UserError(
        f"{where}: none of prompt, messages, conversations, turns, text among the keys "
        f"{sorted(map(str, row))}; rename one or set prompts.column"
    )


def read_prompts(path: str | Path, *, column: str | None = None, skip_malformed: bool = False) -> list[Prompt]:
    """Read a JSONL file of prompts, one to a line.

    Raises:
        UserError: if the file is missing, unreadable or empty, or a line is malformed (the message says which).
    """
    file = Path(path)
    # Only "\n" ends a line: splitlines() would also cut JSON strings at U+2028.
    lines = read_text(file, "prompts").rstrip("\n").split("\n")
    rows = ((f"{file.name}:{number}", line) for number, line in enumerate(lines, 1)) if any(lines) else iter(())

    def parse(line: str, where: str) -> Prompt:
        if not line.strip():
            raise UserError(f"{where}: the line is empty; delete it, or write a JSON object there")
        try:
            row = bounded_json(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON ({problem(error)}); write one object a line") from error
        return parse_prompt(row, where, column)

    prompts = list(_parsed(rows, parse, skip_malformed))
    if not prompts:
        raise UserError(f'{file} holds no prompt; write one JSON object a line, such as {{"prompt": "..."}}')
    return prompts


def read_text(file: Path, what: str) -> str:
    """Text of a UTF-8 file. Raises UserError naming `what` it should have been."""
    try:
        return read_bounded_text(file, PROMPT_BYTES)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read the {what} {file}: {error.strerror}; check the path") from error


def load_prompts(config: PromptConfig, seed: int) -> Iterator[Prompt]:
    """Yield the prompts of a file or dataset, in an order that is a pure function of the config and `seed`.

    Raises:
        UserError: if the source cannot be read or a row is malformed.
    """
    if config.origin != "file":
        return islice(_from_dataset(config, seed), config.limit)
    prompts = read_prompts(config.path or "", column=config.column, skip_malformed=config.skip_malformed)
    if config.shuffle:
        random.Random(seed).shuffle(prompts)
    return islice(prompts, config.limit)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Consecutive candidates."""

    prompts: list[tuple[int, Prompt]]
    """The usable ones, each with its number."""
    read: int
    """Number of candidates; fewer than asked for when the source has no more."""


class ReadPrompts:
    """Candidates from a file or dataset.

    Raises:
        UserError: if the source cannot be read or a row is malformed.
    """

    def __init__(self, config: PromptConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.position = 0
        self.rest = load_prompts(config, seed)
        self.total = config.limit
        """Largest number of candidates, where that is known."""
        # To count a dataset's rows may mean to download all of it.
        if config.origin == "file":
            lines = sum(1 for line in read_text(Path(config.path or ""), "prompts").split("\n") if line.strip())
            self.total = lines if config.limit is None else min(config.limit, lines)

    def take(self, start: int, count: int) -> Taken:
        """Candidates start to start + count - 1; going back reads the source from its start again."""
        # Shards come in any order where other processes take some; a source only goes forward.
        if start < self.position:
            self.rest, self.position = load_prompts(self.config, self.seed), 0
        for _ in islice(self.rest, start - self.position):
            self.position += 1
        found = [(start + place, prompt) for place, prompt in enumerate(islice(self.rest, count))]
        self.position += len(found)
        return Taken(prompts=found, read=len(found))


def _from_dataset(config: PromptConfig, seed: int) -> Iterator[Prompt]:
    # Prompts of one's own and of files need no such package, which is large.
    try:
        import datasets
    except ImportError as error:
        raise UserError("prompts.origin dataset needs the package datasets; pip install 'draftsmith[train]'") from error
    name = str(config.name)
    with _explained(config):
        # A folder that `save_to_disk` wrote; `load_dataset` would read its files as data of another kind.
        if any((Path(name) / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            data: Any = saved[config.split] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            data = datasets.load_dataset(name, config.subset, split=config.split, streaming=config.streaming,
                                         revision=config.revision)
        if config.shuffle:
            data = data.shuffle(seed=seed, buffer_size=STREAM_BUFFER) if config.streaming else data.shuffle(seed=seed)

    def rows() -> Iterator[tuple[str, Any]]:
        # A streamed dataset fails only when its rows are read.
        with _explained(config):
            for number, row in enumerate(data):
                yield f"{config.name}[{config.split}]:{number}", row

    return _parsed(rows(), lambda row, where: parse_prompt(row, where, config.column), config.skip_malformed)


@contextmanager
def _explained(config: PromptConfig) -> Iterator[None]:
    """Report an error of `datasets` about a name, split or file in one sentence."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except (DatasetsError, OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load the dataset {config.name!r}, split {config.split!r}: {reason}; "
            "check prompts.name, prompts.subset and prompts.split"
        ) from error


def _parsed(
    rows: Iterable[tuple[str, Any]], parse: Callable[[Any, str], Prompt], skip_malformed: bool
) -> Iterator[Prompt]:
    for where, row in rows:
        try:
            prompt = parse(row, where)
        except UserError:
            if not skip_malformed:
                raise
            continue
        yield prompt


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    """Text under a key of a row. Raises UserError where there is none."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key} must be text that is not empty, got {_short(value)}")
    # JSON can write what no file of prompts, answers or shards could hold as UTF-8.
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise UserError(f"{where}: {key} holds half of a surrogate pair, which is no character; write the whole one")
    return value


def _conversation(
    value: Any, speaker: str, words: str, where: str, system: str | None
) -> tuple[Message, ...]:
    """Alternating messages; assistant messages before the first user turn are left out.

    Args:
        value: the messages, as a row has them.
        speaker: key of a message's role.
        words: key of its text.
        where: place of the row, for messages.
        system: system prompt of the row; one among the messages comes first.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: expected a list of messages that is not empty, got {_short(value)}; give each as an "
                        "object with its speaker and its text")
    messages = list[tuple[str, str | None]]()
    for message in value:
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: a message must be an object, got {_short(message)}")
        # Data sets mix the two shapes: some `conversations` hold messages with a role and content.
        keys = (speaker, words) if speaker in message else ("role", "content")
        role = _text(message, keys[0], where)
        if role not in ROLES:
            raise UserError(f"{where}: {keys[0]} must be one of {sorted(ROLES)}, got {role!r}")
        # An answer that is empty is none: it is asked for.
        empty = ROLES[role] == "assistant" and not message.get(keys[1])
        messages.append((ROLES[role], None if empty else _text(message, keys[1], where)))
    if messages[0][0] == "system":
        system, messages = messages[0][1], messages[1:]
    # ShareGPT cut long conversations anywhere: a part may start with an answer whose question is lost.
    while messages and messages[0][0] == "assistant":
        messages = messages[1:]
    for number, (role, _) in enumerate(messages):
        wanted = ("user", "assistant")[number % 2]
        if role != wanted:
            raise UserError(f"{where}: message {number + 1} must be the {wanted}'s, got {role}; let the two take turns")
    if not messages:
        raise UserError(f"{where}: no user message; there is nothing to answer")
    spoken = [*([] if system is None else [("system", system)]), *messages]
    return tuple({"role": role} if text is None else {"role": role, "content": text} for role, text in spoken)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
