"""Proof that a serving engine loads what is exported here: its cases, how they are run, and what must come out."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
    return Outcome(engine=run["engine"], name=case.name, layout=case.layout, weights=case.weights, wrong=case.wrong,
                   loses="" if case.change else case.wrong, equal=equal, answers=len(plain), drafts=run["drafts"],
                   drafted=run["drafted"], accepted=run["accepted"],
                   holds=equal == len(plain) and run["drafts"] > 0 and every != bool(case.wrong))


def line(found: Outcome) -> str:
    """A row of the table."""
    name = found.name + ("" if found.weights == FLOAT32 else f", {found.weights}") + (
        f", {found.wrong}" if found.wrong else "")
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
