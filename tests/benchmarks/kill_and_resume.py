"""Files that differ after the tiny recipe was killed (`kill -9`) at random moments and resumed.

    python tests/benchmarks/kill_and_resume.py --kills 10

Kills distillation and training, compares all bytes with an undisturbed run, and prints one row for each kill. Exits
with 1 when any shard or artifact differs.
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

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"
STAGES = {1: "distillation", 2: "encoding", 3: "training", 4: "artifact", 5: "evaluation"}
KILLED_IN = (1, 2, 3)
LONGER = ("--train.max_steps", "300", "--evaluate.limit", "1", "--evaluate.speed_prompts", "0")
"""Training takes about as long as distillation, so that kills hit both."""
MACHINE_FILES = {"stats.json", "tuning.json"}
"""Files about the machine and the time, which may differ."""


@dataclass(frozen=True)
class Kill:
    """One kill."""

    stage: int
    seconds: float
    shards: int


class Attempt:
    """One process that runs the recipe; a thread follows its output to know the stage."""

    def __init__(self, out: Path, extra: tuple[str, ...]) -> None:
        words = [sys.executable, "-P", "-m", "draftsmith.recipes", "run", "--config", str(RECIPE), "--out",
                 str(out), *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self.log = out.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True)
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

    def kill_in_work(self, delay: float) -> int | None:
        """Kill the process after `delay` seconds of work in KILLED_IN; the stage, or None when they ended first."""
        worked, last = 0.0, time.monotonic()
        while self.process.poll() is None and self.stage <= max(KILLED_IN):
            time.sleep(0.01)
            now = time.monotonic()
            worked, last = worked + (now - last) * (self.stage in KILLED_IN), now
            if worked >= delay and self.stage in KILLED_IN:
                stage = self.stage
                os.kill(self.process.pid, signal.SIGKILL)
                self.finish()
                return stage
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
    return sum(attempt.spent.get(stage, 0.0) for stage in KILLED_IN)


def disturbed(out: Path, kills: int, work: float, chance: random.Random, extra: tuple[str, ...] = ()) -> list[Kill]:
    """Kill up to `kills` times, each time resuming in the same folder, then let it finish."""
    done: list[Kill] = []
    while len(done) < kills:
        attempt = Attempt(out, extra)
        delay = chance.uniform(0, work / 3)
        stage = attempt.kill_in_work(delay)
        if stage is None:
            if attempt.finish() != 0:
                raise SystemExit(f"a resumed run failed; see {out.with_suffix('.log')}")
            return done
        done.append(Kill(stage, delay, len(list((out / "data").glob("train-*.safetensors")))))
    undisturbed(out, extra)
    return done


def compare(folder: Path, kills: int, seed: int, extra: tuple[str, ...] = (), *, show: bool = True) -> list[str]:
    """Names of files that differ between runs killed `kills` times in all and an undisturbed run."""
    chance = random.Random(seed)
    work = undisturbed(folder / "peace", extra)
    expected, different, total, series = fingerprints(folder / "peace"), [], 0, 0
    while total < kills:
        out = folder / f"killed-{series}"
        for kill in disturbed(out, kills - total, work, chance, extra):
            total += 1
            if show:
                print(f"{total:>4}  {STAGES[kill.stage]:<13} {kill.seconds:>8.2f} s {kill.shards:>8}  run {series}",
                      flush=True)
        found = fingerprints(out)
        different += sorted(f"{out.name}/{name}" for name in expected.keys() | found.keys()
                            if expected.get(name) != found.get(name))
        series += 1
    if show:
        print(f"{len(expected)} files of shards and artifact, {series} killed runs")
    return different


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10, help="kills in all")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the moments")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-kill-"))
    print(f"seed {given.seed}\nkill  stage          work done   shards")
    try:
        different = compare(folder, given.kills, given.seed, LONGER)
        print("\n".join([f"DIFFERENT {name}" for name in different]) or "all bytes equal to the undisturbed run's")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
