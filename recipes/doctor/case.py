"""Everything that the checks read: the artifact with its target, the chat template, rows of the training data; and what
one of them finds, with words for a group of rows in which something is wrong."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ...data import ChatTemplate, Manifest, TokenShard
from ...data.store.token_store import SOURCES, Row, ShardRecord, answers
from ...export import Artifact
from ...modules import Target

LEAST_SHARE = 0.03  # Share of rows from which a fault counts: 99 of a hundred samples of 64 have one in a tenth of rows
SHOWN = 3  # Rows of a group that are named


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    name: str  # Name of the check
    figure: str  # The measurement in words; empty where nothing could be measured
    verdict: str  # Its meaning, or why it could not be measured
    remedy: str = ""  # The change to make, with the key of the recipe; empty where nothing is wrong
    follows: str = ""  # Names of faults that explain this one; empty where it stands for itself


def judged(name: str, figure: str, fine: str, *faults: tuple[object, str, str]) -> Finding:
    """The finding of a check of several faults: of each, whether it is there (true or not empty), its verdict and its
    remedy; `fine` is the verdict where none is."""
    there = [(verdict, remedy) for found, verdict, remedy in faults if found]
    return Finding(name=name, figure=figure, verdict="; ".join(verdict for verdict, _ in there) or fine,
                   remedy="; ".join(dict.fromkeys(remedy for _, remedy in there)))


def unchecked(name: str, reason: object) -> Finding:
    """A check that could not be made."""
    return Finding(name=name, figure="", verdict=f"not checked: {reason}")


def group(names: Sequence[str], rows: Iterable[int], least: float = LEAST_SHARE) -> str:
    """Words on some of the rows, "6 of 64 rows (train-00000:3, ...)"; empty where they are too few.

    A group has words of its own: in the mean over all rows, a fault in a tenth of them would vanish."""
    found = [names[row] for row in sorted(set(rows))]
    if not found or len(found) < least * len(names):
        return ""
    shown = ", ".join([*found[:SHOWN], *["..."] * (len(found) > SHOWN)])
    return f"{len(found)} of {len(names)} rows ({shown})"


MOST_ROWS, MOST_SHARDS = 512, 16  # Training rows looked at, and shards they are taken from, both spread over all


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """Rows of the training data, spread over all of it."""

    folder: Path  # The data's
    manifest: Manifest  # The data's
    shard: TokenShard  # The rows, one after another
    places: tuple[tuple[ShardRecord, int, int], ...]  # Of each row: shard, number there, and first token there

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> "DataSample":
        """Rows of a folder of data. Raises UserError if a shard is missing or corrupted."""
        records = spread(manifest.split("train"), MOST_SHARDS)
        rows, places = list[Row](), list[tuple[ShardRecord, int, int]]()
        for record in records:
            shard = TokenShard.read(folder / record.file, record.sha256)
            for number in spread(range(shard.num_rows), -(-MOST_ROWS // len(records))):
                start, stop = shard.span(number)
                rows.append(Row(tokens=tuple(shard.tokens_T[start:stop].tolist()),
                                supervised=tuple(shard.supervised_T[start:stop].tolist()),
                                prompt=int(shard.prompts_R[number]), temperature=float(shard.temperatures_R[number]),
                                source=SOURCES[int(shard.sources_R[number])]))
                places.append((record, number, start))
        return cls(folder=folder, manifest=manifest, shard=TokenShard.from_rows(rows, []), places=tuple(places))

    @property
    def names(self) -> list[str]:
        """Names of the rows, as file:row, counted from 0."""
        return [f"{record.file.removesuffix('.safetensors')}:{number}" for record, number, _ in self.places]

    def tokens(self, row: int) -> list[int]:
        """Tokens of a row."""
        start, stop = self.shard.span(row)
        found: list[int] = self.shard.tokens_T[start:stop].tolist()
        return found

    def answers(self) -> Iterator[tuple[int, int, int]]:
        """(row, first token, end) of every unbroken run of supervised tokens, by place in the row."""
        for row, start, stop in answers(self.shard):
            first, _ = self.shard.span(row)
            yield row, start - first, stop - first

    def is_document(self, row: int) -> bool:
        """True of plain text without a chat template: all of it but a start token is supervised."""
        start, stop = self.shard.span(row)
        return bool(self.shard.supervised_T[start + 1 : stop].all())


@dataclass(frozen=True, kw_only=True)
class Case:
    """An artifact with all that a diagnosis reads next to it."""

    artifact: Artifact  # With the target that verifies its drafts here
    target: Target  # The unchanged target, which wrote the data
    template: ChatTemplate  # As it will be served
    temperature: float = 0.0  # At which the draft is used
    data: DataSample | None = None  # None where there are none here, or they are of no use with this target
    no_data: Finding | None = None  # The reason

    def recipe(self, section: str) -> dict[str, Any]:
        """A section of the recipe that made the artifact, or of the one that made its data; empty where none did."""
        of_data = {} if self.data is None else self.data.manifest.recipe
        made: dict[str, Any] = self.artifact.provenance.get("recipe", {})
        found: dict[str, Any] = {**of_data, **made}.get(section) or {}
        return found


def findings_of(checks: Sequence[Callable[..., Finding | Iterable[Finding]]], *given: Any) -> Iterator[Finding]:
    """The findings of each check of a table in the same evidence."""
    for check in checks:
        found = check(*given)
        yield from [found] if isinstance(found, Finding) else found


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most so many items, one drawn from each of as many equal parts, in order; the same ones every time."""
    if len(items) <= count:
        return list(items)
    # At equal distances the draw would miss, or take alone, what is dealt to rows in turn: temperatures, modes.
    generator = Random(0)
    return [items[int((place + generator.random()) * len(items) / count)] for place in range(count)]
