"""Files that differ after the tiny recipe was killed (`kill -9`, or signals) at random moments and resumed.

    python tests/benchmarks/kill_and_resume.py --kills 10
    python tests/benchmarks/kill_and_resume.py --kills 20 --signals KILL,TERM,INT,HUP --families all

Kills any stage, compares all bytes with an undisturbed run, and prints one row for each kill. Exits with 1 when any
shard or artifact differs, or a signal ends with another exit code than its own or without its sentence.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from draftsmith.trainers import families

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"
STAGES = {1: "distillation", 2: "encoding", 3: "training", 4: "artifact", 5: "evaluation"}
LONGER = ("--train.max_steps", "300", "--evaluate.limit", "1", "--evaluate.speed_prompts", "0")
"""Training takes about as long as distillation, so that kills hit both."""
MACHINE_FILES = {"stats.json", "tuning.json"}
"""Files about the machine and the time, which may differ."""
SENTENCE = "the same command goes on from here"
"""The end of what a signalled run says."""


@dataclass(frozen=True)
class Kill:
    """One kill."""

    number: signal.Signals
    stage: int
    seconds: float
    shards: int


class Attempt:
    """One process that runs the recipe; a thread follows its output to know the stage."""

    def __init__(self, out: Path, extra: tuple[str, ...]) -> None:
        recipe = () if "--config" in extra else ("--config", str(RECIPE))
        words = [sys.executable, "-P", "-m", "draftsmith.recipes", "run", *recipe, *extra, "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self.log = out.with_suffix(".log").open("ab")
        # A shell's background jobs, and what they start, ignore SIGINT.
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True,
                                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        self.stage, self.started = 0, time.monotonic()
        self.spent: dict[int, float] = {}
        self.reader = threading.Thread(target=self._follow, daemon=True)
        self.reader.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):
                now = time.monotonic()
                self.spent[self.stage] = now - self.started
                self.stage, self.started = int(line[1]), now

    def finish(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait()
        self.reader.join()
        self.log.close()
        return code

    def kill_in_work(self, delay: float, number: signal.Signals) -> int | None:
        """Signal the process after `delay` seconds of work; the stage, or None when it ended first."""
        worked, last = 0.0, time.monotonic()
        while self.process.poll() is None:
            time.sleep(0.01)
            now = time.monotonic()
            worked, last = worked + (now - last) * (self.stage > 0), now
            if worked >= delay and self.stage > 0:
                stage = self.stage
                self.process.send_signal(number)
                code = self.finish()
                if code not in (0, -number if number == signal.SIGKILL else 128 + number):
                    raise SystemExit(f"{number.name} in the stage {STAGES[stage]} ended with exit code {code}")
                return stage if code else None
        return None


def fingerprints(out: Path) -> dict[str, str]:
    """SHA-256 of every file of data and artifact that two equal runs must share."""
    files = [file for folder in ("data", "artifact") for file in sorted((out / folder).rglob("*"))
             if file.is_file() and file.name not in MACHINE_FILES]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def undisturbed(out: Path, extra: tuple[str, ...] = ()) -> float:
    """Run once to the end; returns the seconds of work in the stages that are killed later."""
    attempt = Attempt(out, extra)
    if attempt.finish() != 0:
        raise SystemExit(f"the undisturbed run failed; see {out.with_suffix('.log')}")
    return sum(seconds for stage, seconds in attempt.spent.items() if stage)


def disturbed(out: Path, kills: int, work: float, chance: random.Random, extra: tuple[str, ...] = (),
              signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)) -> list[Kill]:
    """Kill up to `kills` times, each time resuming in the same folder, then let it finish."""
    done: list[Kill] = []
    while len(done) < kills:
        attempt = Attempt(out, extra)
        delay, number = chance.uniform(0, work / 3), chance.choice(signals)
        stage = attempt.kill_in_work(delay, number)
        if stage is None:
            if attempt.finish() != 0:
                raise SystemExit(f"a resumed run failed; see {out.with_suffix('.log')}")
            break
        done.append(Kill(number, stage, delay, len(list((out / "data").glob("train-*.safetensors")))))
    else:
        undisturbed(out, extra)
    told, asked = out.with_suffix(".log").read_text().count(SENTENCE), [kill.number for kill in done]
    if told != len(asked) - asked.count(signal.SIGKILL):
        raise SystemExit(f"{told} sentences for the signals {[number.name for number in asked]}")
    return done


def compare(folder: Path, kills: int, seed: int, extra: tuple[str, ...] = (),
            signals: tuple[signal.Signals, ...] = (signal.SIGKILL,), *, show: bool = True) -> list[str]:
    """Names of files that differ between runs killed `kills` times in all and an undisturbed run."""
    chance = random.Random(seed)
    work = undisturbed(folder / "peace", extra)
    expected, different, total, series = fingerprints(folder / "peace"), [], 0, 0
    while total < kills:
        out = folder / f"killed-{series}"
        for kill in disturbed(out, kills - total, work, chance, extra, signals):
            total += 1
            if show:
                print(f"{total:>4}  {kill.number.name:<8} {STAGES[kill.stage]:<13} {kill.seconds:>8.2f} s "
                      f"{kill.shards:>8}  run {series}", flush=True)
        found = fingerprints(out)
        different += sorted(f"{out.name}/{name}" for name in expected.keys() | found.keys()
                            if expected.get(name) != found.get(name))
        series += 1
    if show:
        print(f"{len(expected)} files of shards and artifact, {series} killed runs")
    return different


def recipe_of(family: str, folder: Path) -> tuple[str, ...]:
    """Options by which the tiny recipe trains a family with that family's own settings."""
    folder.mkdir()
    file = folder / "recipe.yaml"
    file.write_text(f"extends: {RECIPE}\nfamily: {family}\n")
    return ("--config", str(file), *LONGER)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10, help="kills in all, of each family")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the moments")
    parser.add_argument("--signals", default="KILL", help="any of KILL,TERM,INT,HUP, drawn by chance")
    parser.add_argument("--families", default="medusa", help="names of families, or all")
    given = parser.parse_args()
    signals = tuple(signal.Signals[f"SIG{name}"] for name in given.signals.split(","))
    names = families.family_names() if given.families == "all" else given.families.split(",")
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-kill-"))
    different: list[str] = []
    try:
        for name in names:
            print(f"{name}, seed {given.seed}\nkill  signal   stage          work done   shards", flush=True)
            different += compare(folder / name, given.kills, given.seed, recipe_of(name, folder / name), signals)
        print("\n".join([f"DIFFERENT {name}" for name in different]) or "all bytes equal to the undisturbed run's")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
