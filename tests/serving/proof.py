"""Proof that a serving engine loads what is exported here: its cases, their run, and what must come out. Commands and
Python of an exported README.md are read and started as they stand there."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.error import URLError
from urllib.request import urlopen

from draftsmith.export.layouts.parts.gguf_file import FLOAT32
from serving.overfitted import STEPS, Texts, folder_of, write_drafters


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder that an engine loads."""

    name: str  # The drafter
    layout: str  # The format of its export
    weights: str = FLOAT32  # Number format of its matrices
    asked: tuple[tuple[str, Any], ...] = ()  # The settings for the engine, by its own names
    wrong: str = ""  # Reason why fewer drafts must be accepted; empty where all of them must be
    change: Callable[[Path], None] | None = None  # The change of the folder that makes it wrong
    printed: bool = False
    """Whether the engine is started by the command that the folder's README.md prints, as it stands."""
    least: float = 1.0
    """Least share of drafted tokens that must be accepted, and must not be with a wrong folder: rounding may cost a
    few."""
    fewer: bool = False  # Whether drafts must have fewer tokens than they were trained for, as the settings ask


class Engine(Protocol):
    """A serving engine in an environment of its own, with the files of a proof in one folder."""

    @property
    def python(self) -> Path:
        """Interpreter of that environment."""

    def prepare(self, texts: Texts) -> None:
        """Write what it needs beyond the folders of target and drafters."""

    def plain(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Answers without drafts, and the engine's name and version."""

    def drafted(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with drafts, with the numbers of drafts, drafted and accepted tokens."""

    def printed(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same as the folder's README.md tells to."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case as an engine ran it."""

    engine: str
    name: str
    layout: str
    weights: str
    wrong: str
    loses: str  # The same where the folder is right and the engine leaves a part of it out
    equal: int  # Answers that are those of the engine without drafts
    answers: int
    drafts: int
    drafted: int
    accepted: int
    holds: bool  # Whether it is as expected


def outcome(case: Case, engine: Engine, work: Path, texts: Texts, plain: list[list[int]]) -> Outcome:
    """Run a case; its folder is named from `work`."""
    folder = folder_of(case.name, case.layout, case.weights)
    if case.change is not None:
        changed = Path("changed", case.wrong) / folder
        shutil.copytree(work / folder, work / changed)
        case.change(work / changed)
        folder = changed
    run = (engine.printed if case.printed else engine.drafted)(case, folder, texts.prompts)
    equal = sum(map(list.__eq__, run["answers"], plain))
    every = run["accepted"] >= case.least * run["drafted"] > 0
    as_asked = run["drafts"] > 0 and (not case.fewer or run["drafted"] < STEPS * run["drafts"])
    return Outcome(engine=run["engine"], name=case.name, layout=case.layout, weights=case.weights, wrong=case.wrong,
                   loses="" if case.change else case.wrong, equal=equal, answers=len(plain), drafts=run["drafts"],
                   drafted=run["drafted"], accepted=run["accepted"],
                   holds=equal == len(plain) and as_asked and every != bool(case.wrong))


def line(found: Outcome) -> str:
    """A row of the table."""
    name = found.name + ("" if found.weights == FLOAT32 else f", {found.weights}") + (
        f", {found.wrong}" if found.wrong else "") + (
        ", fewer tokens as a table asks" if 0 < found.drafted < STEPS * found.drafts else "")
    return (f"| {name} | {found.layout} | {found.equal} of {found.answers} | {found.drafts} | {found.accepted} of "
            f"{found.drafted} | {'as it must be' if found.holds else 'WRONG'} |")


def prove(engine: Engine, cases: Sequence[Case], work: Path, drafters: Path) -> list[Outcome]:
    """Run cases in a folder, as many side by side as there are cores."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    for case in cases:
        formats, asked = wanted.setdefault(case.name, []), (case.layout, case.weights)
        formats += [] if asked in formats else [asked]
    texts = write_drafters(work, wanted, engine.python, drafters, partial(print, flush=True))
    engine.prepare(texts)
    alone = engine.plain(texts.prompts)
    plain = alone["answers"]
    if plain != texts.answers:
        raise RuntimeError(f"{alone['engine']} without drafts gives "
                           f"{len(plain) - sum(map(list.__eq__, plain, texts.answers))} of {len(plain)} other answers "
                           "than transformers")
    print(f"\n{alone['engine']}, drafts of {STEPS} tokens; without drafts its answers are those of transformers\n\n"
          "| drafter | format | equal answers | drafts | accepted | |\n|---|---|---|---|---|---|", flush=True)
    # An engine spends most of a case on its start, with one core. A printed command may take all cores and a port.
    cores = min(4, os.cpu_count() or 1)
    found = dict[int, Outcome]()
    for printed, side_by_side in ((False, cores), (True, 1)):
        os.environ["OMP_NUM_THREADS"] = str(cores // side_by_side)
        chosen = [place for place, case in enumerate(cases) if case.printed is printed]
        with ThreadPoolExecutor(side_by_side) as pool:
            for place, one in zip(chosen, pool.map(lambda place: outcome(cases[place], engine, work, texts, plain),
                                                   chosen), strict=True):
                found[place] = one
                print(line(one), flush=True)
    return [found[place] for place in range(len(cases))]


# What a README.md prints ----------------------------------------------------------------------------------------------

_PATIENCE = 7200
"""Seconds after which a server hangs: vLLM first compiles the layers, for minutes on a quiet CPU and ten times as long
on a busy one."""
_SHOWN = 2000  # Last characters of a failed command that are shown


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language in Markdown."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The words of each command in Markdown."""
    return [shlex.split(line) for block in blocks(text, "bash") for line in block.splitlines()]


def command(folder: Path, *start: str) -> list[str]:
    """The words of the one command in a folder's README.md that starts so."""
    found, = (words for words in commands((folder / "README.md").read_text()) if words[: len(start)] == [*start])
    return found


def environment(python: Path, settings: dict[str, str] | None = None) -> dict[str, str]:
    """The variables of a shell in which an engine's environment is active."""
    return {**os.environ, "PATH": f"{python.absolute().parent}{os.pathsep}{os.environ['PATH']}", **(settings or {})}


def ran(words: Sequence[str], folder: Path, python: Path) -> str:
    """The output of a command that was typed in a folder. Raises RuntimeError if it fails."""
    done = subprocess.run(words, cwd=folder, env=environment(python), text=True, errors="replace", check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-_SHOWN:]}")
    return done.stdout


@contextmanager
def server(words: Sequence[str], folder: Path, variables: dict[str, str], health: str) -> Iterator[None]:
    """A server that was started in a folder, while the block runs."""
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    try:
        until = time.monotonic() + _PATIENCE
        while not _answers(health):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{shlex.join(words)} does not answer:\n{log.read_text()[-_SHOWN:]}")
            time.sleep(1)
        yield
    finally:
        # The whole group: an engine is a process of its own.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(timeout=30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5):
            return True
    except (URLError, OSError):
        return False
