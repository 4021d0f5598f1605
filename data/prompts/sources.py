"""Prompts of a file or a dataset: which rows are read, which are skipped, and why."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...modules import UserError
from ...modules.config_checks import CheckedSettings, Whole
from ...modules.files.json_records import require_ordinary
from ...modules.verification.sampling import GREATEST_TEMPERATURE, LEAST_TEMPERATURE
from .prompt import Prompt
from .prompt_files import decoded, file_rows
from .prompt_kinds import named_kinds
from .rows import LeftOutError, parse_prompt

STREAM_BUFFER = 10_000  # Rows a streamed dataset is shuffled among; of one without limit looked at beforehand


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


class ReadPrompts:
    """Candidates from a file or dataset: its rows, in an order that is a pure function of the settings and the seed.
    `check` raises UserError for the number and the prompt of one that cannot be used; `whole` is True where all rows
    are used, and False where a budget may end the work before."""

    def __init__(self, config: PromptConfig, seed: int, check: Callable[[int, Prompt], None] = lambda *_: None,
                 whole: bool = True) -> None:
        self.config, self.seed, self.check = config, seed, check
        endless = config.origin == "dataset" and config.streaming and config.limit is None
        self.looked = STREAM_BUFFER if endless or not whole else None  # Rows looked at before an answer; None: all
        self.checked, self.bad = 0, dict[int, Skipped]()  # Rows that `skipped` has looked at, and the unusable ones
        self.position = 0
        self.rest = self._rows()
        self.total = config.limit  # Largest number of candidates, where that is known
        # To count a dataset's rows may mean to download all of it.
        if config.origin == "file":
            self.total = sum(1 for _ in islice(file_rows(Path(config.path or "")), config.limit))

    def _rows(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        rows = (file_rows(Path(config.path or ""), self.seed if config.shuffle else None) if config.origin == "file"
                else _dataset_rows(config, self.seed))
        return islice(rows, config.limit)

    def _prompt(self, number: int, place: str, row: Any) -> Prompt | Skipped:
        if number in self.bad:
            return self.bad[number]
        try:
            prompt = read_row(row, place, self.config.column)
            if number >= self.checked:
                self.check(number, prompt)
        except UserError as error:
            return Skipped(row=place, reason=str(error).removeprefix(f"{place}: "),
                           wanted=isinstance(error, LeftOutError))
        return prompt

    def take(self, start: int, count: int) -> Taken:
        """Candidates start to start + count - 1, without those to be skipped; going back reads from the start again."""
        # Shards come in any order where other processes take some; a source only goes forward.
        if start < self.position:
            self.rest, self.position = self._rows(), 0
        for _ in islice(self.rest, start - self.position):
            self.position += 1
        found = [self._prompt(start + place, *row) for place, row in enumerate(islice(self.rest, count))]
        self.position += len(found)
        prompts = [(start + place, one) for place, one in enumerate(found) if isinstance(one, Prompt)]
        late = () if self.looked is None else tuple(
            one for place, one in enumerate(found, start) if isinstance(one, Skipped) and place >= self.looked)
        return Taken(prompts=prompts, read=len(found), skipped=late)

    def skipped(self) -> list[Skipped]:
        """The rows that are not used, of all rows, or of the first 10,000 where it is open how many are read. Raises
        UserError if the source cannot be read or holds no row, or as `require_few` does."""
        found, number = dict[int, Skipped](), 0
        for number, row in enumerate(islice(self._rows(), self.looked), 1):
            if isinstance(one := self._prompt(number - 1, *row), Skipped):
                found[number - 1] = one
                if not self.config.most_skipped and not one.wanted:
                    break
        if not number:
            raise UserError(f'{self.config.path} holds no prompt; write one JSON object a line, such as '
                            '{"prompt": "..."}')
        self.require_few([*found.values()], number)
        self.checked, self.bad = number, found
        return [*found.values()]

    def require_few(self, found: Sequence[Skipped], rows: int) -> None:
        """Refuse a source of which more of its `rows` are to be skipped, those `found`, than the recipe allows. Raises
        UserError."""
        most, bad = self.config.most_skipped, [one for one in found if not one.wanted]
        if len(bad) > most * rows:
            kinds = Counter(one.kind for one in bad).most_common(3)
            first = {one.kind: one for one in reversed(bad)}
            reasons = "; ".join(f"{count:,} like {first[kind].row}: {first[kind].reason}" for kind, count in kinds)
            raise UserError(f"{len(bad):,} of {rows:,} rows of {self.config.path} cannot be used, and "
                            f"prompts.most_skipped {most:g} allows fewer: {reasons}")


def read_row(row: Any, place: str, column: str | None = None) -> Prompt:
    """The prompt of a row as its source gives it. Raises UserError naming its place."""
    try:
        value = decoded(row)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return parse_prompt(value, place, column)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a file of prompts, all of them usable. Raises UserError if the file is missing, unreadable or empty, or a
    row is malformed (the message says which)."""
    prompts = [read_row(row, place) for place, row in file_rows(Path(path))]
    if not prompts:
        raise UserError(f'{path} holds no prompt; write one JSON object a line, such as {{"prompt": "..."}}')
    return prompts


def _dataset_rows(config: PromptConfig, seed: int) -> Iterator[tuple[str, Any]]:
    # Prompts of one's own and of files need no such package, which is large.
    try:
        import datasets
    except ImportError as error:
        raise UserError("prompts.origin dataset needs the package datasets; pip install 'draftsmith[train]'") from error
    name = str(config.path)
    from datasets.exceptions import DatasetsError

    try:
        # A folder that `save_to_disk` wrote; `load_dataset` would read its files as data of another kind.
        if any((Path(name) / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            data: Any = saved[config.split] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            data = datasets.load_dataset(name, config.subset, split=config.split, streaming=config.streaming,
                                         revision=config.revision)
        if config.shuffle:
            data = data.shuffle(seed=seed, buffer_size=STREAM_BUFFER) if config.streaming else data.shuffle(seed=seed)
        # A streamed dataset fails only when its rows are read.
        for number, row in enumerate(data):
            yield f"{name}[{config.split}]:{number}", row
    except UserError:
        raise
    except (DatasetsError, OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load the dataset {config.path!r}, split {config.split!r}: {reason}; "
                        "check prompts.path, prompts.subset and prompts.split") from error
