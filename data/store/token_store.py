"""Token shards, and the manifest with their hashes. Nothing here is pickled. Then the tokens of a shard that training
learns as labels: answers up to a phrase that they repeat to their end, and prompts that the target wrote; and counts of
them, by which a reduced draft vocabulary is chosen, with its coverage.

Small models fall into such repetitions when they answer greedily. They are easy to draft: they lift every measured
length, and say little about other text.

Shapes: T tokens of all rows one after another, R rows, S = R + 1 borders of rows, P prompts, Q entries of the draft
vocabulary, V vocabulary."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from ...modules import TargetIdentity, UserError
from ...modules.config_checks import Natural
from ...modules.files.atomic_files import file_sha256, write_atomically
from ...modules.files.folders import sole_writer
from ...modules.files.json_records import read_json, record_of, require_ordinary, shortened
from ..prompts.chat import Surroundings

FORMAT_VERSION = 7  # Layout of shards and manifest
MANIFEST = "manifest.json"
T = TypeVar("T")
SourceName = Literal["target", "text", "draft"]
SplitName = Literal["train", "validation"]
SOURCES: tuple[SourceName, ...] = ("target", "text", "draft")
"""target: the target's own answers; text: what the prompt source brings; draft: answers that an artifact's draft wrote,
on which the target's distribution is learnt (arXiv:2310.08461, section 4). A shard stores the place in this list."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One conversation as the target saw it."""

    tokens: tuple[int, ...]  # Prompt and answer
    supervised: tuple[bool, ...]  # True for the tokens that the assistant wrote
    prompt: int  # Number of its prompt, also the key of its random stream
    temperature: float = 0.0  # Sampling temperature of the answer; 0 is greedy
    source: SourceName = "target"  # Writer of the supervised tokens


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """Rows of tokens, one after another."""

    tokens_T: Tensor  # Token ids, int32
    supervised_T: Tensor  # Written by the assistant, bool
    starts_S: Tensor  # Start index of each row and end of the last: R + 1 entries, int64
    prompts_R: Tensor  # Number of each row's prompt, int64
    temperatures_R: Tensor  # Temperature of each row, float32
    sources_R: Tensor  # Writer of the row, as its index in `SOURCES`, uint8
    keys_P: Tensor  # Hash of each prompt of the shard (`DistillTask.key`), int64; later shards must not repeat them

    @classmethod
    def from_rows(cls, rows: Sequence[Row], keys: Sequence[int]) -> "TokenShard":
        """Lay rows one after another."""
        lengths = torch.tensor([0] + [len(row.tokens) for row in rows], dtype=torch.int64)
        return cls(tokens_T=torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int32),
                   supervised_T=torch.tensor([flag for row in rows for flag in row.supervised], dtype=torch.bool),
                   starts_S=lengths.cumsum(0), prompts_R=torch.tensor([row.prompt for row in rows], dtype=torch.int64),
                   temperatures_R=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
                   sources_R=torch.tensor([SOURCES.index(row.source) for row in rows], dtype=torch.uint8),
                   keys_P=torch.tensor(list(keys), dtype=torch.int64))

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.prompts_R)

    def answered_at(self, temperature: float | None) -> list[int]:
        """Rows whose answers have this temperature; all rows for None."""
        return [row for row, found in enumerate(self.temperatures_R.tolist()) if temperature in (None, found)]

    def span(self, row: int) -> tuple[int, int]:
        """First index of a row and the one after its last."""
        return int(self.starts_S[row]), int(self.starts_S[row + 1])

    def to_bytes(self) -> bytes:
        """The safetensors file; equal shards give equal bytes."""
        # A slice of a tensor would be written with gaps, which the format does not know.
        return save({name: tensor.contiguous() for name, tensor in vars(self).items()})

    @classmethod
    def read(cls, file: Path, sha256: str | None = None) -> "TokenShard":
        """Read a shard, checking its hash if one is given. Raises UserError when it is missing or corrupted."""
        # The bytes that are checked are those that are read: a file could be replaced between two looks.
        data = read_bytes(file)
        if sha256 is not None and hash_bytes(data) != sha256:
            raise UserError(corrupted(file))
        try:
            return cls(**load(data))
        except (SafetensorError, TypeError) as error:
            raise UserError(corrupted(file)) from error


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """Entry of one shard in the manifest."""

    file: str  # Name inside the folder
    split: SplitName  # The part of the data that it belongs to
    sha256: str  # Hash of the file's bytes
    candidates: Natural  # Prompts read or written for it, before filtering
    prompts: Natural  # Number of prompts in it
    rows: Natural  # Number of rows in it; a conversation takes several where the template rewrites earlier turns
    by_target: Natural  # Number of these that the target answered
    by_text: Natural  # Number of these that are given text
    by_draft: Natural  # Number of these that a draft answered
    tokens: Natural  # Tokens in all rows
    supervised: Natural  # Tokens written by the assistant
    answers: Natural  # Assistant turns
    truncated: Natural  # Answers cut by the length limit
    full: Natural  # Conversations that end early because the target's context does

    @property
    def number(self) -> int:
        """The number in its file's name."""
        return int(self.file.removesuffix(".safetensors").rpartition("-")[2])

    def __post_init__(self) -> None:
        # States are written next to it under a name made of this one, and the next shard has the number after its own.
        if re.fullmatch(rf"{self.split}-[0-9]{{5,18}}\.safetensors", self.file) is None:
            raise ValueError(f"file must be the name of a file in the folder, {self.split}-00000.safetensors or one "
                             f"with another number, got {self.file!r}")


def shard_file(split: SplitName, number: int) -> str:
    """Name of a shard's file."""
    return f"{split}-{number:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The file of prompts that are only ever evaluated."""

    file: str  # Name inside the folder; JSONL
    sha256: str  # Hash of the file's bytes
    prompts: Natural  # Number of prompts in it

    def __post_init__(self) -> None:
        # States are written next to it under a name made of this one: it must lead to no other folder.
        if Path(self.file).name != self.file:
            raise ValueError(f"file must be the name of a file in the folder, got {self.file!r}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a folder of shards: a pure function of the recipe, without times and paths."""

    target: TargetIdentity  # Identity of the target that wrote the answers
    template_hash: str  # Hash of the chat template and its settings
    recipe: dict[str, dict[str, Any]]  # Prompt source, sampling settings, budget and seed
    versions: dict[str, str]  # Versions of the packages that decide the bytes
    candidates: int = 0  # Prompts read or written so far, all splits
    shards: tuple[ShardRecord, ...] = ()  # Finished shards in the order they were made
    held_out: HeldOut | None = None  # Prompts kept for evaluation; None when none were asked for
    repeated: int = 0  # Candidates left out because the data have them already
    skipped: dict[str, int] = field(default_factory=dict)  # Rows of the source that cannot be used, by reason
    unwritten: dict[str, int] = field(default_factory=dict)  # Rows of which the chat template leaves something out
    complete: bool = False  # True once the budget is spent or the prompts are used up

    def split(self, name: str) -> tuple[ShardRecord, ...]:
        """Shards of one split, train or validation."""
        return tuple(shard for shard in self.shards if shard.split == name)

    def total(self, split: str, count: str) -> int:
        """Sum of one count of ShardRecord over a split, such as total("train", "supervised")."""
        return sum(int(getattr(shard, count)) for shard in self.split(split))

    @property
    def hash(self) -> str:
        """SHA-256 of the manifest's bytes: the identity of the data."""
        return hash_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The JSON file; equal manifests give equal bytes."""
        # Times and paths stay out: equal recipes give equal bytes on any machine.
        content = {"format_version": FORMAT_VERSION, **vars(self)}
        content["target"] = self.target.fields()
        content["shards"] = [asdict(shard) for shard in self.shards]
        content["held_out"] = None if self.held_out is None else asdict(self.held_out)
        return _json({**content, "sha256": hash_bytes(_json(content))})

    def save(self, folder: Path) -> None:
        """Write `manifest.json` in one step."""
        write_bytes(folder / MANIFEST, self.to_bytes())

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read `manifest.json`; UserError if it is missing, no manifest, of another format version, or was changed."""
        file = Path(folder) / MANIFEST
        if not file.exists():
            raise UserError(f"{folder} holds no {MANIFEST}; make the data with draftsmith distill, or name its folder")
        remedy = f"delete the folder {file.parent} and distil again"
        content = read_json(file, remedy)
        if not isinstance(content, dict) or "format_version" not in content:
            raise UserError(corrupted(file))
        # Of another version neither the fields nor the hash need be as here.
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise UserError(f"{file} has format version {shortened(version)}, this version reads {FORMAT_VERSION}; "
                            f"{remedy}")
        digest = content.pop("sha256", None)
        # Every field is written, also those that have a default while a manifest grows.
        if missing := sorted({one.name for one in fields(cls)} - content.keys()):
            raise UserError(f"{file} is damaged: its content lacks {', '.join(missing)}; {remedy}")
        # A hash over the content as it is read, not over the bytes: other tools may write it with other spaces.
        if digest != hash_bytes(_json({"format_version": version, **content})):
            raise UserError(corrupted(file))
        return record_of(cls, content, str(file), remedy)


# Files ---------------------------------------------------------------------------------------------------------------


def _json(content: Mapping[str, Any]) -> bytes:
    """Readable JSON; equal contents give equal bytes."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def hash_bytes(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def hash_file(file: Path) -> str:
    """SHA-256 of a file in hex. Raises UserError when it cannot be read."""
    # Files of states may be larger than memory: they are read in parts.
    return _read(file, file_sha256)


def read_bytes(file: Path) -> bytes:
    """A file's bytes. Raises UserError when it cannot be read."""
    return _read(file, Path.read_bytes)


def _read(file: Path, read: Callable[[Path], T]) -> T:
    # A pipe or a device in the folder would be read for ever.
    require_ordinary(file)
    try:
        return read(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; delete the folder {file.parent} and distil again"
                        ) from error


def corrupted(file: Path) -> str:
    """Message about a file whose content has changed."""
    return (
        f"{file} is corrupted (its content is not what was written); delete the folder {file.parent} and distil again")


def write_bytes(file: Path, data: bytes) -> None:
    """Write a file whole or not at all, even when the process is killed."""
    write_atomically(file, lambda partial: partial.write_bytes(data))


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file whole or not at all; returns its SHA-256 in hex."""
    # Another recipe may start on the same data meanwhile, and remove what nobody is writing.
    with sole_writer(file):
        write_atomically(file, lambda partial: save_file(dict(tensors), partial))
    return hash_file(file)


# Labels ---------------------------------------------------------------------------------------------------------------


LONGEST_PERIOD = 64  # Longest phrase whose repetition is looked for, in tokens
LEAST_REPEATED = 16  # Fewest repeated tokens of a repetition; also at least two repetitions of the phrase


def learned_tokens(shard: TokenShard, around: Surroundings | None = None) -> Tensor:
    """True at the tokens that are learned as labels, bool [T]; `around` are the tokens around a prompt that the target
    wrote, if it is learned."""
    learned_T = shard.supervised_T.clone()
    for _, first, stop in repetitions(shard):
        learned_T[first:stop] = False
    if around is not None:
        before, after = list(around.before), list(around.after)
        for row in range(shard.num_rows):
            start, stop = shard.span(row)
            tokens = shard.tokens_T[start:stop].tolist()
            # A row without a learned answer stays out. One that is laid out otherwise, such as that of a later turn,
            # has no prompt to learn.
            if after and learned_T[start:stop].any() and tokens[: len(before)] == before:
                ends = (place for place in range(len(before), len(tokens))
                        if tokens[place : place + len(after)] == after)
                learned_T[start + len(before) : start + next(ends, len(before))] = True
    return learned_T


def prompts_learnable(prompts: Mapping[str, Any]) -> bool:
    """True if the prompts of data, made by this section of a recipe, can be labels: text of the target that follows its
    chat template alone, or given first words.

    Given words are learned like the text after them: the target's probabilities are right after any. Prompts that a
    system prompt asked for followed other tokens than those of the data."""
    steered = prompts.get("own_kinds") is not None and not prompts.get("own_openings")
    return prompts.get("origin") == "own" and not steered


def repetition_start(answer: Sequence[int]) -> int | None:
    """Tokens of an answer before the first repetition of the phrase that it repeats to its end; None without one. The
    last token may be another one, such as that of the end; of several phrases that fit, such as one and twice the same,
    the one with the earliest repetition counts."""
    starts = list[int]()
    # The last token may be that of the end, which is not repeated.
    for end in (len(answer), len(answer) - 1):
        for period in range(1, min(LONGEST_PERIOD, end // 3) + 1):
            place = end
            while place > period and answer[place - 1] == answer[place - 1 - period]:
                place -= 1
            if end - place >= max(LEAST_REPEATED, 2 * period):
                starts.append(place)
    return min(starts, default=None)


def repetitions(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
    """(row, first repeated token, end of the answer) of every answer that repeats a phrase to its end, by place."""
    for row, start, stop in answers(shard):
        kept = repetition_start(shard.tokens_T[start:stop].tolist())
        if kept is not None:
            yield row, start + kept, stop


def answers(shard: TokenShard) -> Iterator[tuple[int, int, int]]:
    """(row, first token, end) of every unbroken run of supervised tokens, by place in the shard."""
    for row in range(shard.num_rows):
        start, stop = shard.span(row)
        flags_N = shard.supervised_T[start:stop].to(torch.int8)
        edges = torch.diff(flags_N, prepend=flags_N.new_zeros(1), append=flags_N.new_zeros(1)).nonzero()[:, 0].tolist()
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            yield row, start + first, start + end


def count_labels(folder: str | Path, around: Surroundings | None = None) -> Tensor:
    """Number of times that each token of the vocabulary is a label in training, see `learned_tokens`: int64 [V].
    UserError if the folder holds no manifest, or a shard is corrupted."""
    manifest = Manifest.load(folder)
    counts_V = torch.zeros(manifest.target.vocab_size, dtype=torch.int64)
    for record in manifest.split("train"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        counts_V += torch.bincount(shard.tokens_T[learned_tokens(shard, around)], minlength=len(counts_V))
    return counts_V


def coverage(folder: str | Path, ids_Q: Tensor) -> float:
    """Share of the tokens of held-out greedy answers that a draft vocabulary holds; 1 where none are held out.
    UserError if the folder holds no manifest, or a shard is corrupted."""
    inside = total = 0
    # Checkpoints and trees for greedy decoding are chosen by these answers too.
    for record in Manifest.load(folder).split("validation"):
        shard = TokenShard.read(Path(folder) / record.file, record.sha256)
        for row in shard.answered_at(0.0):
            place = slice(*shard.span(row))
            labels_N = shard.tokens_T[place][shard.supervised_T[place]]
            inside, total = inside + int(torch.isin(labels_N, ids_Q.cpu()).sum()), total + len(labels_N)
    return inside / total if total else 1.0
