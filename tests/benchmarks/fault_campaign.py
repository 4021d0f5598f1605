"""Faults of the machine for the tiny recipe of every family: kills, renames, full disks, signals and damaged files.

    python tests/benchmarks/fault_campaign.py --state faults.jsonl

Each case ends in one sentence and leaves nothing half-written, and the same command then finishes with the bytes of an
undisturbed run. Finished cases are kept in the state file: a campaign that was stopped goes on. Prints one row for each
part, ready for the table in tests/README.md, and exits with 1 when a case does not hold.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml")
FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "falcon", "draft_lm", "medusa2")
QUICK = ("--config", RECIPE, "--train.max_steps", "6", "--train.validate_every", "3", "--train.checkpoint_every", "2",
         "--distill.budget_tokens", "300", "--distill.validation_prompts", "4", "--evaluate.limit", "1",
         "--evaluate.speed_prompts", "0")
DISKS = (8, 16, 32, 64, 120, 180)
"""Largest files that may be written, in KiB."""
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Signals and the exit codes that they must lead to."""
MACHINE_FILES = {"stats.json", "tuning.json"}
"""Files about the machine and the time, which may differ."""
KILL_AT_RENAME = """
import os, signal, sys
left = [int(sys.argv.pop(1))]
def dying(function):
    def wrapped(*given, **named):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)
    return wrapped
os.replace, os.rename = dying(os.replace), dying(os.rename)
from draftsmith.recipes.__main__ import main
sys.exit(main())
"""
"""A process that kills itself just before its n-th rename."""


@dataclass(frozen=True)
class Ended:
    """End of a command."""

    code: int
    said: str

    @property
    def clean(self) -> bool:
        """True for an end without a traceback, with one sentence where the code is that of a user's mistake."""
        sentences = sum("draftsmith: error: " in line for line in self.said.replace("\r", "\n").splitlines())
        return "Traceback" not in self.said and (self.code != 2 or sentences == 1)


class Bench:
    """The folder of a campaign, with an undisturbed run of each family.

    Args:
        folder: for all runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calm: dict[str, tuple[dict[str, str], float]] = {}

    def words(self, family: str, out: Path, command: str = "run") -> list[str]:
        """The command line of a tiny run."""
        states = ("--batch.states", "computed") if family == "medusa2" else ()
        return [command, *QUICK, "--family", family, *states, "--out", str(out)]

    def call(self, words: list[str], *, program: tuple[str, ...] = ("-m", "draftsmith.recipes"), most_kib: int = 0,
             act: Callable[[subprocess.Popen[str]], None] | None = None) -> Ended:
        """Run a command to its end in a process of its own, under a limit of file sizes, with something done to it."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        limit = (most_kib * 1024,) * 2
        process = subprocess.Popen(
            [sys.executable, *program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, cwd=self.folder, preexec_fn=(
                (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)) if most_kib else None))
        if act is not None:
            act(process)
        said, _ = process.communicate()
        return Ended(process.returncode, said)

    def undisturbed(self, family: str) -> tuple[dict[str, str], float]:
        """(fingerprints, seconds) of a run that nothing happened to."""
        if family not in self.calm:
            out, started = self.folder / f"{family}-calm", time.monotonic()
            ended = self.call(self.words(family, out))
            if ended.code != 0:
                raise SystemExit(f"the undisturbed run of {family} failed: {ended.said[-2000:]}")
            self.calm[family] = fingerprints(out), time.monotonic() - started
        return self.calm[family]

    def finished(self, family: str, out: Path) -> str:
        """The fault that is left after the same command was called again; empty when all bytes are as undisturbed."""
        ended = self.call(self.words(family, out))
        if ended.code != 0 or not ended.clean:
            return f"the resumed run ended with {ended.code}: {ended.said[-300:]}"
        if left := [path.name for path in out.rglob(".*.partial")]:
            return f"half-written: {', '.join(left)}"
        expected, found = self.undisturbed(family)[0], fingerprints(out)
        different = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        return f"other bytes: {', '.join(sorted(different))}" if different else ""


def fingerprints(out: Path) -> dict[str, str]:
    """SHA-256 of every file of data and artifact that two equal runs must share."""
    files = [file for folder in ("data", "artifact") for file in sorted((out / folder).rglob("*"))
             if file.is_file() and file.name not in MACHINE_FILES]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# Cases ---------------------------------------------------------------------------------------------------------------


def killed(bench: Bench, family: str, out: Path, case: str) -> str:
    """A kill at a random moment."""
    moment = random.Random(f"{family} {case}").uniform(2.0, bench.undisturbed(family)[1])

    def kill(process: "subprocess.Popen[str]") -> None:
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.kill()

    bench.call(bench.words(family, out), act=kill)
    return bench.finished(family, out)


def renamed(bench: Bench, family: str, out: Path, case: str) -> str:
    """A kill just before a rename."""
    bench.call([case, *bench.words(family, out)], program=("-c", KILL_AT_RENAME))
    return bench.finished(family, out)


def full(bench: Bench, family: str, out: Path, case: str) -> str:
    """A disk that is full: no file may be larger than so many KiB."""
    ended = bench.call(bench.words(family, out), most_kib=int(case))
    if ended.code not in (0, 2) or not ended.clean:
        return f"ended with {ended.code}: {ended.said[-300:]}"
    if left := [path.name for path in out.rglob(".*.partial")]:
        return f"half-written: {', '.join(left)}"
    return bench.finished(family, out)


def signalled(bench: Bench, family: str, out: Path, case: str) -> str:
    """A signal some moments after a stage began."""
    name, stage = case.split()
    sent = signal.Signals[name]

    def send(process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"[{stage}/"):
                time.sleep(random.Random(f"{family} {case}").uniform(0.05, 0.6))
                process.send_signal(sent)
                return

    ended = bench.call(bench.words(family, out), act=send)
    # A stage may have ended before the signal came.
    if ended.code not in (0, SIGNALS[sent]) or "Traceback" in ended.said:
        return f"ended with {ended.code} in place of {SIGNALS[sent]}: {ended.said[-300:]}"
    return bench.finished(family, out)


def damaged(bench: Bench, family: str, out: Path, case: str) -> str:
    """A file of a finished run with a byte changed, cut short or emptied: it is noticed, or made again."""
    bench.undisturbed(family)
    shutil.copytree(bench.folder / f"{family}-calm", out)
    kind, name = case.split(" ", 1)
    whole = bytearray((out / name).read_bytes())
    at = random.Random(f"{family} {case}").randrange(len(whole))
    whole[at] ^= 0xFF
    (out / name).write_bytes({"flipped": bytes(whole), "cut": bytes(whole[:at]), "empty": b""}[kind])
    ended = bench.call(bench.words(family, out, "train"))
    generated = bench.call(["generate", "--artifact", str(out / "artifact"), "--prompt", "hi", "--max_new_tokens", "4"])
    for one in (ended, generated):
        if one.code not in (0, 2) or not one.clean:
            return f"ended with {one.code}: {one.said[-300:]}"
    if ended.code == 0 and fingerprints(out) != bench.undisturbed(family)[0]:
        return "other bytes, and not a word"
    return ""


def damaged_gguf(bench: Bench, family: str, out: Path, case: str) -> str:
    """The embedded target's GGUF file with a byte of its header changed, or cut short."""
    from draftsmith.modules.target.loading import find_default_gguf

    source = find_default_gguf()
    if source is None:
        return ""
    kind, at = case.split()
    content = bytearray(source.read_bytes())
    content[int(at)] ^= 0xFF
    file = bench.folder / "damaged.gguf"
    file.write_bytes(content if kind == "flipped" else content[: int(at)])
    ended = bench.call(["plan", *QUICK, "--family", family, "--target.name", str(file)])
    return "" if ended.code in (0, 2) and ended.clean else f"ended with {ended.code}: {ended.said[-300:]}"


PARTS: dict[str, Callable[[Bench, str, Path, str], str]] = {
    "kill at a random moment": killed, "kill at a rename": renamed, "full disk": full, "signal": signalled,
    "damaged file": damaged, "damaged GGUF": damaged_gguf,
}
FILES = ("data/manifest.json", "data/train-00000.safetensors", "data/validation-00000.safetensors", "data/test.jsonl",
         "train/best.safetensors", "train/last.ckpt", "train/result.json", "artifact/config.json",
         "artifact/model.safetensors", "artifact/tuning.json", "stages.json")
"""Files of a run that are damaged."""


def cases(part: str, family: str, kills: int) -> Iterator[str]:
    """Names of the cases of a part, which say what is done."""
    if part == "kill at a random moment":
        yield from map(str, range(kills))
    elif part == "kill at a rename":
        yield from map(str, range(1, 4 * kills + 1))
    elif part == "full disk":
        yield from map(str, DISKS)
    elif part == "signal":
        yield from (f"{sent.name} {stage}" for sent in SIGNALS for stage in range(1, 6))
    elif part == "damaged file":
        yield from (f"{kind} {name}" for kind in ("flipped", "cut", "empty") for name in FILES)
    elif family == FAMILIES[0]:
        yield from (f"{kind} {at}" for kind in ("flipped", "cut") for at in (0, 4, 8, 16, 24, 100, 1000, 100_000))


def performed(bench: Bench, state: Path, wanted: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Do the cases that the state file does not have; returns all of them."""
    known = [json.loads(line) for line in state.read_text().splitlines()] if state.is_file() else []
    done = {(one["part"], one["family"], one["case"]) for one in known}
    for part, family, case in wanted:
        if (part, family, case) in done:
            continue
        out = bench.folder / "case"
        shutil.rmtree(out, ignore_errors=True)
        known.append({"part": part, "family": family, "case": case, "wrong": PARTS[part](bench, family, out, case)})
        print(f"{part}, {family}, {case}: {known[-1]['wrong'] or 'holds'}", file=sys.stderr, flush=True)
        with state.open("a") as stream:
            stream.write(json.dumps(known[-1]) + "\n")
    return [one for one in known if (one["part"], one["family"], one["case"]) in set(wanted)]


def table(results: list[dict[str, str]]) -> str:
    """The results as a Markdown table of parts and families."""
    families = [family for family in FAMILIES if any(one["family"] == family for one in results)]
    lines = [f"| fault | {' | '.join(families)} |", f"|---|{'---|' * len(families)}"]
    for part in PARTS:
        cells = []
        for family in families:
            found = [one for one in results if (one["part"], one["family"]) == (part, family)]
            cells.append(f"{sum(not one['wrong'] for one in found)} of {len(found)}" if found else "")
        if any(cells):
            lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=Path("faults.jsonl"), help="file of the finished cases")
    parser.add_argument("--kills", type=int, default=5, help="random kills of each family; four times as many renames")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--family", choices=FAMILIES, help="one family alone")
    given = parser.parse_args()
    wanted = [(part, family, case) for part in PARTS if given.only in (None, part)
              for family in FAMILIES if given.family in (None, family) for case in cases(part, family, given.kills)]
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-faults-"))
    try:
        results = performed(Bench(folder), given.state, wanted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(results))
    return 1 if any(one["wrong"] for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
