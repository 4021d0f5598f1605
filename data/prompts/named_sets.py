"""Sets of prompts by name: `sets.yaml` says which files hold them and how a row is asked. Files come from the cache of
the Hub or of `datasets`, or are downloaded into it."""

import difflib
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import jinja2
import yaml
from typing_extensions import TypedDict

from ...modules import UserError
from ...modules.files.json_records import typed
from .prompt import Prompt
from .prompt_files import decoded, file_rows

TABLE = Path(__file__).with_name("sets.yaml")
HANDWRITTEN = "handwritten"  # Name of the prompts that ship with the package, which is not in the table


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """An entry of the table, which explains the fields."""

    name: str
    source: str
    revision: str
    split: str
    files: str
    columns: list[str]
    licence: str
    subset: str | None = None
    ask: str | None = None
    category: str | None = None
    placeholder: str | None = None

    def fetched(self) -> list[Path]:
        """Its files, from the cache or the network. Raises UserError with the command that fetches them."""
        if not self.source.startswith("https://"):
            return sorted(hub_folder(self.source, [self.files], self.revision, kind="dataset").glob(self.files))
        # Not on the Hub. Its revision is in the address, so that the file never changes.
        try:
            from datasets import DownloadConfig, DownloadManager

            return [Path(DownloadManager(download_config=DownloadConfig(use_etag=False)).download(self.source))]
        except (ImportError, OSError) as error:
            raise _missing(self.source, error, self.command) from error

    @property
    def command(self) -> str:
        """The command that fetches its files where there is a network."""
        if self.source.startswith("https://"):
            return f"curl -fLo {self.name}.jsonl {self.source}, and name that file"
        return f"hf download {self.source} --repo-type dataset --revision {self.revision} '--include={self.files}'"

    def prompts(self) -> tuple[list[Prompt], int]:
        """(its prompts, how many rows hold none). Raises UserError if it cannot be read, or has changed."""
        found, rows, where, first, asking = list[Prompt](), 0, "", self.columns[0], jinja2.Template(self.ask or "")
        kinds = dict.fromkeys(self.columns, str) | ({} if self.ask else {first: list[str]})
        kind = TypedDict("Row", kinds)  # type: ignore[misc]
        for file in self.fetched():
            try:
                for place, row in file_rows(file):
                    rows, where = rows + 1, f"{place} of {self.source}: "
                    if isinstance(value := decoded(row), dict):
                        value = {key: value[key] for key in self.columns if key in value}
                    value = typed(value, kind)
                    turns = value[first] if not self.ask else [asking.render(value)] * any(
                        value[key].strip() for key in self.columns if key != self.category)
                    if turns and all(one.strip() and one != self.placeholder for one in turns):
                        found.append(Prompt.from_turns(
                            *turns, id=f"{self.name}:{rows}", category=value.get(self.category)))
                    where = ""
            except UserError as error:
                if isinstance(error.__cause__, ImportError):
                    raise
                # The file itself, not a link to it: the Hub would link to the damaged one again.
                raise UserError(f"the set {self.name} cannot be read: {where}{str(error).rpartition('; ')[0]}; delete "
                                f"{file.resolve()} and fetch it again: {self.command}") from error
            except ValueError as error:
                raise UserError(f"the set {self.name} has changed: {where}{error}, expected was text in the columns "
                                f"{', '.join(self.columns)}; write its prompts into a file, one "
                                '{"prompt": "..."} a line, and name that') from error
        return found, rows - len(found)


def hub_folder(source: str, patterns: list[str], revision: str | None, *, kind: Literal["model", "dataset"]) -> Path:
    """The files of a repository of the Hub that match patterns, from the cache or the network, in its folder. Raises
    UserError with the command that fetches them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        folder = Path(snapshot_download(source, repo_type=kind, revision=revision, allow_patterns=patterns))
        # Of a draft without such files its reader says more.
        if kind == "dataset" and not any(file.exists() for file in folder.glob(patterns[0])):
            raise FileNotFoundError(f"there is no {patterns[0]} in {folder}")
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        words = ["--repo-type", kind, *(["--revision", revision] if revision else []),
                 *(f"--include={pattern}" for pattern in patterns)]
        raise _missing(source, error, shlex.join(["hf", "download", source, *words])) from error
    return folder


def _missing(source: str, error: Exception, command: str) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"{source} is not in the cache and cannot be downloaded ({reason}); check its name, or fetch it "
                     f"where there is a network: {command}")


@cache
def table() -> dict[str, NamedSet]:
    """All entries by name."""
    content = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: NamedSet(name=name, **entry) for name, entry in content.items()}


def set_named(name: str) -> NamedSet | Path:
    """The set of a name, or the path of a file of prompts. Raises UserError for what is neither."""
    # A word alone is meant as a name; what looks like a path is read, or refused by its reader.
    if name not in table() and "/" not in name and "." not in name and not Path(name).exists():
        known = [*table(), HANDWRITTEN]
        close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"
        raise UserError(f"evaluate.prompts names {name!r}, which is neither a set nor a file: {hint}")
    return table().get(name, Path(name))
