"""Proof that vLLM loads what is exported here: `make test-serving`.

Every family and layout is overfitted on a few greedy answers of a tiny random target, exported, and loaded by vLLM in
another environment: its answers must be its own without drafts, and it must accept every drafted token. Controls, whose
tapped layers are shifted by one or whose bias vLLM drops, must be accepted less. Prints a table; `--record` keeps it in
export/README.md.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.export.engines.vllm_process import VllmProcess
from serving.engine_table import record
from serving.overfitted import ANSWER_TOKENS, PROMPT_TOKENS, STEPS, Texts, write_drafters

LAYERS = "eagle_aux_hidden_state_layer_ids"
EVERY = "every draft"
FEWER = "fewer drafts"


def shifted(folder: Path) -> None:
    """Name the layer before each tapped one, as if the ids counted outputs."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[LAYERS] = [layer - 1 for layer in config[LAYERS]]
    path.write_text(json.dumps(config))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder that vLLM loads."""

    name: str
    """The drafter."""
    layout: str
    """The format of its export."""
    method: str | None = None
    """vLLM's name of the method; None where the folder is served as the model itself."""
    settings: tuple[tuple[str, Any], ...] = ()
    """More keys of vLLM's configuration of drafts."""
    loader: tuple[tuple[str, Any], ...] = ()
    """Extra settings for loading."""
    wrong: str = ""
    """Reason why fewer drafts must be accepted; empty where all of them must be."""
    change: Callable[[Path], None] | None = None
    """The change of the folder that makes it wrong."""

    @property
    def expected(self) -> str:
        """The drafts that vLLM must accept."""
        return FEWER if self.wrong else EVERY

    def speculative(self, folder: str) -> dict[str, Any] | None:
        """vLLM's configuration of drafts."""
        if self.method is None:
            return None
        return {"method": self.method, "model": folder, "num_speculative_tokens": STEPS, **dict(self.settings)}


CASES = (
    Case(name="draft_lm", layout="huggingface", method="draft_model"),
    Case(name="draft_lm, mask tokens", layout="huggingface", method="draft_model",
         settings=(("parallel_drafting", True),)),
    Case(name="eagle", layout="eagle", method="eagle"),
    Case(name="eagle, bias", layout="eagle", method="eagle", wrong="vLLM drops the bias"),
    Case(name="eagle3", layout="eagle", method="eagle3"),
    Case(name="eagle3", layout="eagle", method="eagle3", wrong="layers shifted by one", change=shifted),
    Case(name="eagle3.1", layout="eagle", method="eagle3"),
    Case(name="eagle3, other norms", layout="eagle", method="eagle3"),
    Case(name="eagle3, two layers", layout="eagle", method="eagle3"),
    Case(name="eagle3, narrow", layout="eagle", method="eagle3"),
    Case(name="eagle3", layout="speculators"),
    Case(name="eagle3", layout="speculators", wrong="layers shifted by one", change=shifted),
    Case(name="eagle3.1", layout="speculators"),
    Case(name="eagle3, two layers", layout="speculators"),
    Case(name="medusa", layout="medusa", method="medusa"),
    Case(name="medusa", layout="medusa-vllm", method="medusa", loader=(("enable_weights_track", False),)),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case as vLLM ran it."""

    engine: str
    name: str
    layout: str
    wrong: str
    equal: int
    """Answers that are those of vLLM without drafts."""
    answers: int
    drafts: int
    drafted: int
    accepted: int
    holds: bool
    """Whether it is as expected."""


def outcome(case: Case, engine: VllmProcess, work: Path, texts: Texts, plain: list[list[int]]) -> Outcome:
    """Run a case."""
    folder = Path(case.layout) / case.name
    if case.change is not None:
        changed = Path("changed") / folder
        shutil.copytree(work / folder, work / changed)
        case.change(work / changed)
        folder = changed
    result = engine.run("target" if case.method else str(folder), case.speculative(str(folder)), texts.prompts,
                        max_tokens=ANSWER_TOKENS, loader=dict(case.loader))
    run = result["runs"][0]
    equal = sum(map(list.__eq__, run["answers"], plain))
    every = run["drafted"] == run["accepted"] > 0
    return Outcome(engine=result["engine"], name=case.name, layout=case.layout, wrong=case.wrong, equal=equal,
                   answers=len(plain), drafts=run["drafts"], drafted=run["drafted"], accepted=run["accepted"],
                   holds=equal == len(plain) and run["drafts"] > 0 and every == (case.expected == EVERY))


def line(found: Outcome) -> str:
    """A row of the table."""
    name = found.name + (f", {found.wrong}" if found.wrong else "")
    return (f"| {name} | {found.layout} | {found.equal} of {found.answers} | {found.drafts} | {found.accepted} of "
            f"{found.drafted} | {'as it must be' if found.holds else 'WRONG'} |")


def prove(python: Path, cases: list[Case], work: Path) -> list[Outcome]:
    """Run cases in a folder, one engine after the other."""
    wanted: dict[str, list[str]] = {}
    for case in cases:
        formats = wanted.setdefault(case.name, [])
        formats += [] if case.layout in formats else [case.layout]
    texts = write_drafters(work, wanted, partial(print, flush=True))
    engine = VllmProcess(python, work, context=PROMPT_TOKENS + ANSWER_TOKENS + 24)
    plain = engine.run("target", None, texts.prompts, max_tokens=ANSWER_TOKENS)["runs"][0]["answers"]
    print(f"vLLM without drafts: {sum(map(list.__eq__, plain, texts.answers))} of {len(plain)} answers are those of "
          "transformers\n", flush=True)
    print("| drafter | format | equal answers | drafts | accepted | |\n|---|---|---|---|---|---|", flush=True)
    found = []
    for case in cases:
        found.append(outcome(case, engine, work, texts, plain))
        print(line(found[-1]), flush=True)
    return found


def main() -> int:
    """Exit code: 0 if every case is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--only", default="", help="part of the name or the format of the cases that are run")
    parser.add_argument("--record", action="store_true", help="write figures.json and the tables of export/README.md")
    parser.add_argument("--work", type=Path, help="empty folder that is kept")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in f"{case.name} {case.layout}"]
    with tempfile.TemporaryDirectory() as scratch:
        found = prove(given.python, cases, given.work or Path(scratch))
    wrong = [one for one in found if not one.holds]
    if given.record and not wrong and not given.only:
        record([asdict(one) for one in found])
    print(f"\n{len(found) - len(wrong)} of {len(found)} cases are as they must be")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
