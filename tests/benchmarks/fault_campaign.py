"""Faults of the machine for every family's tiny run and the other commands: kills, disks, signals, damage.

    python tests/benchmarks/fault_campaign.py --state faults.jsonl

Each case ends in one sentence and leaves nothing half-written, and the same command then finishes with the bytes of an
undisturbed run. Finished cases are kept in the state file: a campaign that was stopped goes on. Commands run in
processes forked from this one. Prints one row for each family and command, and exits with 1 when a case does not hold.
"""

import argparse
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Two processes share the cores; both must be known before torch is imported.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from support.processes import Disturbance, Ended, call, import_everything

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"
FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "falcon", "kangaroo", "prompt_tokens", "hidden_transfer", "draft_lm",
            "medusa2")
QUICK = ("--config", str(RECIPE), "--train.max_steps", "6", "--train.validate_every", "3", "--train.checkpoint_every",
         "2", "--distill.budget_tokens", "150", "--distill.shard_prompts", "6", "--distill.max_new_tokens", "24",
         "--distill.validation_prompts", "4", "--prompts.own_max_tokens", "48", "--tree.searched_nodes", "6",
         "--tree.used_nodes", "4", "--evaluate.max_new_tokens", "12", "--evaluate.limit",
         "1", "--evaluate.speed_prompts", "0")
DISKS = (1, 8, 16, 32, 64, 120, 180)  # Largest files that may be written, in KiB
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Signals and the exit codes that they must lead to."""
MACHINE_FILES = {"stats.json", "tuning.json"}  # Files about the machine and the time, which may differ
DAMAGED = ("data/manifest.json", "data/train-00000.safetensors", "data/validation-00000.safetensors", "data/test.jsonl",
           "train/best.safetensors", "train/last.ckpt", "train/result.json", "artifact/config.json",
           "artifact/model.safetensors", "artifact/tuning.json", "stages.json")
"""Files of a run that are damaged."""


@dataclass(frozen=True)
class Subject:
    """A command that is disturbed."""

    words: tuple[str, ...]  # with {out} for the folder of a run
    source: str = ""  # family whose finished run lies in {out} before
    compared: tuple[str, ...] = ("data/**/*", "artifact/**/*")  # must have the bytes of an undisturbed command's
    resumed: bool = True  # what a stopped command has done is kept; the stages that it announces can be signalled
    sentences: int = 1  # most that say what is wrong: a row of the comparison of families is a command of its own


def run_of(family: str) -> tuple[str, ...]:
    """The command line of a tiny run, for {out}."""
    states = ("--batch.states", "computed") if family == "medusa2" else ()
    return (*QUICK, "--family", family, *states, "--out", "{out}")


SUBJECTS = {
    **{family: Subject(("run", *run_of(family))) for family in FAMILIES},
    "families": Subject(("families", "--config", "{out}/rows.yaml"), compared=("data/**/*",), sentences=2),
    "specdec": Subject(("specdec", "--artifact", "{out}/artifact", "--data", "{out}/data", "--temperatures", "[0,1]",
                        "--labels.examples", "150"),
                       source="draft_lm", resumed=False),
    "evaluate": Subject(("evaluate", "--artifact", "{out}/artifact", "--out", "{out}/evaluation", "--limit", "2"),
                        source="medusa", resumed=False),
    "export": Subject(("export", "--artifact", "{out}/artifact", "--format", "medusa", "--out", "{out}/exported"),
                      source="medusa", compared=("data/**/*", "artifact/**/*", "exported/**/*"), resumed=False),
}


class Bench:
    """The folder of a campaign, with what an undisturbed command of each subject leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[str, Ended] = {}
        self.bytes: dict[str, dict[str, str]] = {}

    def undisturbed(self, name: str) -> Path:
        """The folder of a subject's command that nothing happened to."""
        out = self.folder / f"{name}-calm"
        if name not in self.ended:
            self.prepare(name, out)
            self.ended[name] = self.call(name, out)
            if self.ended[name].code != 0:
                raise SystemExit(f"the undisturbed {name} failed: {self.ended[name].said[-2000:]}")
            self.bytes[name] = self.fingerprints(name, out)
        return out

    def renamed(self, name: str) -> list[str]:
        """Names of what an undisturbed command renames, in order, in the folder of its case."""
        out = self.undisturbed(name)
        return [str(Path(new).relative_to(out)) if Path(new).is_relative_to(out) else new
                for new in self.ended[name].renamed]

    def prepare(self, name: str, out: Path) -> None:
        """Make the folder of a case, with the finished run that the command needs."""
        shutil.rmtree(out, ignore_errors=True)
        if source := SUBJECTS[name].source:
            shutil.copytree(self.undisturbed(source), out)
        out.mkdir(exist_ok=True)
        if name == "families":
            write_rows(out)

    def call(self, name: str, out: Path, disturbance: Disturbance | None = None) -> Ended:
        """Run a subject's command."""
        return call([word.format(out=out) for word in SUBJECTS[name].words], self.folder, disturbance)

    def fingerprints(self, name: str, out: Path) -> dict[str, str]:
        """SHA-256 of every file that two equal commands must share."""
        files = {file for pattern in SUBJECTS[name].compared for file in out.glob(pattern)
                 if file.is_file() and file.name not in MACHINE_FILES}
        return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}

    def finished(self, name: str, out: Path) -> str:
        """The fault that is left after the same command was called again; empty when all bytes are as undisturbed."""
        self.undisturbed(name)
        ended = self.call(name, out)
        if ended.code != 0 or not ended.clean():
            return f"the second call ended with {ended.code}: {ended.last}"
        if left := half_written(out):
            return f"half-written: {left}"
        expected, found = self.bytes[name], self.fingerprints(name, out)
        different = [file for file in expected.keys() | found.keys() if expected.get(file) != found.get(file)]
        return f"other bytes: {', '.join(sorted(different))}" if different else ""


def write_rows(out: Path) -> None:
    """Write a recipe of the comparison of families: a baseline and a row of the tiny target."""
    tiny = yaml.safe_load(RECIPE.read_text())
    tiny["distill"] |= {"budget_tokens": 300, "validation_prompts": 4}
    (out / "small.yaml").write_text(yaml.safe_dump(tiny))
    rows: dict[str, Any] = {name: tiny[name] for name in ("target", "prompts", "distill", "tree")}
    rows |= {"out": str(out), "minutes": 0.02, "rows": ["prompt_lookup", str(out / "small.yaml")],
             "evaluate": {"max_new_tokens": 12, "speed_prompts": 0, "limit": 1}}
    (out / "rows.yaml").write_text(yaml.safe_dump(rows))


def half_written(out: Path) -> str:
    """Names of partial files and folders that a finished or refused command left."""
    return ", ".join(path.name for path in out.rglob(".*.partial*"))


# Cases ---------------------------------------------------------------------------------------------------------------


def killed(bench: Bench, name: str, out: Path, case: str) -> str:
    """A kill at a random moment."""
    bench.undisturbed(name)
    moment = random.Random(f"{name} {case}").uniform(0.0, bench.ended[name].seconds)
    bench.call(name, out, Disturbance(after=moment))
    return bench.finished(name, out)


def renamed(bench: Bench, name: str, out: Path, case: str) -> str:
    """A kill just before a rename."""
    bench.call(name, out, Disturbance(rename=int(case)))
    return bench.finished(name, out)


def full(bench: Bench, name: str, out: Path, case: str) -> str:
    """A disk that is full: no file may be larger than so many KiB."""
    ended = bench.call(name, out, Disturbance(most_kib=int(case)))
    if ended.code not in (0, 2) or not any(ended.clean(count) for count in range(1, SUBJECTS[name].sentences + 1)):
        return f"ended with {ended.code}: {ended.last}"
    if left := half_written(out):
        return f"half-written: {left}"
    return bench.finished(name, out)


def signalled(bench: Bench, name: str, out: Path, case: str) -> str:
    """A signal some moments after a stage, or the command, began."""
    sent_name, stage = case.split()
    sent = signal.Signals[sent_name]
    delay = random.Random(f"{name} {case}").uniform(0.0, 0.4)
    ended = bench.call(name, out, Disturbance(sent=sent, stage=f"[{stage}/" if stage != "start" else "", delay=delay))
    # A stage may have ended before the signal came.
    if ended.code not in (0, SIGNALS[sent]) or "Traceback" in ended.said:
        return f"ended with {ended.code} in place of {SIGNALS[sent]}: {ended.last}"
    if ended.code and "stopped by" not in ended.said:
        return f"not a word: {ended.last}"
    return bench.finished(name, out)


def damaged(bench: Bench, name: str, out: Path, case: str) -> str:
    """A file of a finished run with a byte changed, cut short or emptied: it is noticed, or made again."""
    shutil.copytree(bench.undisturbed(name), out, dirs_exist_ok=True)
    kind, file = case.split(" ", 1)
    whole = bytearray((out / file).read_bytes())
    at = random.Random(f"{name} {case}").randrange(len(whole))
    whole[at] ^= 0xFF
    (out / file).write_bytes({"flipped": bytes(whole), "cut": bytes(whole[:at]), "empty": b""}[kind])
    trained = call([word.format(out=out) for word in ("train", *run_of(name))], bench.folder)
    generated = call(["generate", "--artifact", str(out / "artifact"), "--prompt", "hi", "--max_new_tokens", "4"],
                     bench.folder)
    for one in (trained, generated):
        if one.code not in (0, 2) or not one.clean():
            return f"ended with {one.code}: {one.last}"
    if trained.code == 0 and bench.fingerprints(name, out) != bench.bytes[name]:
        return "other bytes, and not a word"
    return ""


def damaged_gguf(bench: Bench, name: str, _out: Path, case: str) -> str:
    """The embedded target's GGUF file with a byte of its header changed, or cut short."""
    from draftsmith.modules.target.loading.loading import find_default_gguf

    source = find_default_gguf()
    if source is None:
        return "the embedded target is not installed"
    kind, at = case.split()
    content = bytearray(source.read_bytes())
    content[int(at)] ^= 0xFF
    file = bench.folder / "damaged.gguf"
    file.write_bytes(content if kind == "flipped" else content[: int(at)])
    ended = call(["plan", *QUICK, "--family", name, "--target.name", str(file)], bench.folder)
    file.unlink()
    return "" if ended.code in (0, 2) and ended.clean() else f"ended with {ended.code}: {ended.last}"


PARTS: dict[str, Callable[[Bench, str, Path, str], str]] = {
    "kill at a random moment": killed, "kill at a rename": renamed, "full disk": full, "signal": signalled,
    "damaged file": damaged, "damaged GGUF": damaged_gguf,
}


def cases(bench: Bench, part: str, name: str, kills: int) -> Iterator[str]:
    """Names of the cases of a part, which say what is done."""
    if part == "kill at a random moment":
        yield from map(str, range(kills))
    elif part == "kill at a rename":
        yield from (str(number) for number, file in enumerate(bench.renamed(name), 1)
                    if not file.startswith("data/") or name == first_with(bench, file))
    elif part == "full disk":
        yield from map(str, DISKS)
    elif part == "signal":
        stages = ("start", *map(str, range(1, 6))) if SUBJECTS[name].resumed else ("start",)
        yield from (f"{sent.name} {stage}" for sent in SIGNALS for stage in stages)
    elif part == "damaged file" and name in FAMILIES:
        files = [file for file in DAMAGED if (bench.undisturbed(name) / file).is_file()]
        yield from (f"{kind} {file}" for kind in ("flipped", "cut", "empty") for file in files)
    elif part == "damaged GGUF" and name == FAMILIES[0]:
        yield from (f"{kind} {at}" for kind in ("flipped", "cut") for at in (0, 4, 8, 16, 24, 100, 1000, 100_000))


def first_with(bench: Bench, file: str) -> str:
    """The first family whose run renames a file of the data: the same code makes it for the others."""
    return next((name for name in FAMILIES if file in bench.renamed(name)), "")


# The campaign --------------------------------------------------------------------------------------------------------

Case = tuple[str, str, str]  # Part, subject and case


def known_cases(state: Path) -> dict[Case, str]:
    """The fault that was found in each finished case, empty where it held."""
    lines = [json.loads(line) for line in state.read_text().splitlines()] if state.is_file() else []
    return {(one["part"], one["subject"], one["case"]): one["wrong"] for one in lines}


def perform(bench: Bench, state: Path, wanted: list[Case]) -> None:
    """Do cases and note each in the state file."""
    out = bench.folder / "case"
    for part, name, case in wanted:
        bench.prepare(name, out)
        wrong = PARTS[part](bench, name, out, case)
        print(f"{part}, {name}, {case}: {wrong or 'holds'}", file=sys.stderr, flush=True)
        with state.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(json.dumps({"part": part, "subject": name, "case": case, "wrong": wrong}) + "\n")


def perform_in(processes: int, folder: Path, state: Path, subjects: list[str], parts: list[str],
               kills: int) -> list[Case]:
    """Do the cases that the state file does not have, each process those of every so many-th subject; returns all."""
    bench = Bench(folder / "calm")
    bench.folder.mkdir()
    wanted = [(part, name, case) for name in subjects for part in parts for case in cases(bench, part, name, kills)]
    left = [case for case in wanted if case not in known_cases(state)]
    children = []
    for number in range(processes):
        if (child := os.fork()) == 0:
            own = folder / f"process-{number}"
            # The undisturbed folders are read by all; their names are part of what some files hold.
            own.mkdir()
            bench.folder, calm = own, bench.folder
            for made in calm.iterdir():
                (own / made.name).symlink_to(made)
            perform(bench, state, left[number::processes])
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a process of the campaign failed")
    return wanted


def table(results: dict[Case, str]) -> str:
    """The results as a Markdown table: cases that held of all, by subject and part."""
    parts = [part for part in PARTS if any(one[0] == part for one in results)]
    lines = [f"| command | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    for name in [*SUBJECTS, "all"]:
        cells = []
        for part in parts:
            found = [wrong for (of, subject, _), wrong in results.items() if of == part and name in (subject, "all")]
            cells.append(f"{sum(not wrong for wrong in found)} of {len(found)}" if found else "")
        if any(cells):
            lines.append(f"| {name if name not in FAMILIES else f'run, {name}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=Path("faults.jsonl"), help="file of the finished cases")
    parser.add_argument("--kills", type=int, default=10, help="kills of each command at random moments")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the cases")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--subject", choices=SUBJECTS, help="one family or command alone")
    given = parser.parse_args()
    subjects = [given.subject] if given.subject else list(SUBJECTS)
    import_everything()
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-faults-"))
    try:
        wanted = perform_in(given.processes, folder, given.state, subjects,
                            [given.only] if given.only else list(PARTS), given.kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    known = known_cases(given.state)
    print(table({case: known[case] for case in wanted}))
    return 1 if any(known[case] for case in wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
