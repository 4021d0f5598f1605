"""Training steps by recipe: tokens per second, peak memory, and the share of time in target, vocabulary loss, drafter,
optimizer and data; with `--against plain` next to the textbook's in the same run, and with `--against checkpointing`
next to steps that compute states inside of layers again.

    python tests/benchmarks/training_step.py [--help]

The target has random weights of a stated shape, so that nothing is loaded; the cost of a step does not depend on
them. Its states are computed in the step. Each step reads the same new conversations in every way: packed into rows
by this package, and by the textbook one in each row, padded to the longest, with the logits of all positions and of
all draft steps at once and none in chunks. All ways take turns; the first step of each is not counted. *Data* is the
wait for the next batch: one of this package was packed by a thread during the step before, one of the textbook is
made when due. Of families whose guesses the target makes, its passes over their nodes are part of the drafter. Peak
memory is what a step holds above the weights: allocated on a GPU, and elsewhere the storages of torch's tensors,
counted in a step that is not timed. *Of the card* is the share of its bfloat16 arithmetic (MFU) that the matrix
products and attention of our step take, as torch counts them.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts.shapes import RECIPES, SHAPES, shaped_module, shaped_recipe, shaped_target
from draftsmith.data.datamodule import Prefetched
from draftsmith.data.store.feature_shards import PackedBatch, Piece, packed, pad, plan_bins
from draftsmith.modules import Drafter, DraftLM, Features, Target
from draftsmith.modules.parts.decoder_block import GatedMLP
from draftsmith.recipes.counted_work import CountedStorages
from draftsmith.trainers import DraftModule
from draftsmith.trainers.chunked_losses import VocabularyLoss
from draftsmith.trainers.objectives import weighted_mean_loss
from references.textbook_step import textbook_gradient

PARTS = ("target", "vocabulary loss", "drafter", "optimizer", "data")
PRECISIONS = ("32-true", "bf16-mixed")
SPARE = 10_000  # Number of a step before those of all ways
WARM_UP = 1  # Steps of each way that are not counted
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 operations a second by what the device's name holds, the first one that fits; from NVIDIA's data
sheets."""


@dataclass(frozen=True)
class Way:
    """One implementation in one precision."""

    plain: bool  # Whether it is the textbook's
    precision: str
    checkpointing: bool = False  # Whether states inside of the drafter's layers are computed again in the backward pass

    def __str__(self) -> str:
        again = "activation checkpointing" if self.checkpointing else ""
        return ", ".join(filter(None, ["textbook" if self.plain else "ours", self.precision, again]))


@dataclass
class Taken:
    """Seconds of each part by step, tokens of each step, and the peak memory of one."""

    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    flops_per_token: float = 0.0  # Of our step, also for the textbook's
    card: float = 0.0  # Operations a second that the device offers; 0 where that is not known

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return median(map(sum, zip(*self.parts.values(), strict=True)))

    def to_dict(self) -> dict[str, float]:
        """Tokens per second, the share of the card (0 where it is unknown), peak memory in MiB and the share of each
        part."""
        whole = sum(map(sum, self.parts.values()))
        shares = {f"{part} share": sum(seconds) / whole for part, seconds in self.parts.items()}
        speed = sum(self.tokens) / whole
        return {"tokens_per_second": speed, "flops_per_token": self.flops_per_token,
                "card share": speed * self.flops_per_token / self.card if self.card else 0.0,
                "step_seconds": self.seconds, "peak_mib": self.peak_bytes / 2**20, **shares}


class Clock:
    """Adds the seconds of pieces of a step to its parts; a piece inside another one counts for itself alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict.fromkeys(PARTS, 0.0)
        self._inside: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block, once the device has finished its work."""
        started = self._now()
        self._inside.append(0.0)
        yield
        taken = self._now() - started
        self.seconds[name] += taken - self._inside.pop()
        if self._inside:
            self._inside[-1] += taken

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts for a part."""

        def run(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return run

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class CountedOperations(TorchDispatchMode):
    """A block whose matrix products and attention are counted, by torch's formulas. Its own FlopCounterMode follows
    modules too, by hooks that `torch.autograd.grad` does not take."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formula = kwargs or {}, flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        found = func(*args, **kwargs)
        self.count += formula(*args, **kwargs, out_val=found) if formula else 0
        return found


class Bench:
    """A recipe's module with its optimizer, and steps of it."""

    def __init__(self, target: Target, module: DraftModule, row_length: int, rows: int) -> None:
        self.target, self.module, self.row_length, self.rows = target, module, row_length, rows
        module.train()
        self.optimizer = module.configure_optimizers()["optimizer"]
        self.trained = [weight for weight in module.parameters() if weight.requires_grad]

    def conversations(self, number: int) -> list[Piece]:
        """As many conversations of step `number` as fill the packed rows about once; the last two thirds of each are
        answers. Half of them have less than a third of a row."""
        generator = torch.Generator().manual_seed(number)
        room, found = self.row_length * self.rows, list[Piece]()
        while room >= 16:
            share = torch.rand((), generator=generator).item() ** 1.6
            length = min(room, 16 + int(share * (self.row_length - 16)))
            tokens_N = torch.randint(self.target.vocab_size, (length,), generator=generator)
            found.append(Piece(tokens_N=tokens_N, supervised_N=torch.arange(length) >= length // 3))
            room -= length
        return found

    def batch(self, pieces: Sequence[Piece], plain: bool) -> PackedBatch | Features:
        """The conversations as one batch, which `to` moves to the device."""
        if plain:
            return pad(pieces)
        bins = plan_bins([len(piece.tokens_N) for piece in pieces], self.row_length)
        made = packed([[pieces[index] for index in row] for row in bins], self.row_length)
        return made.moved(torch.Tensor.pin_memory) if self.target.device.type == "cuda" else made

    def feed(self, way: Way, pieces: Sequence[Sequence[Piece]]) -> Prefetched[PackedBatch | Features]:
        """The batches of all steps: those of this package are made ahead."""
        return Prefetched(lambda number: self.batch(pieces[min(number, len(pieces) - 1)], way.plain), 0,
                          0 if way.plain else 1, self.target.device)

    def step(self, way: Way, batches: Iterator[PackedBatch | Features]) -> dict[str, float]:
        """Seconds of the parts of one optimizer step on the next batch."""
        clock = Clock(self.target.device)
        encode = clock.timed("target", self.module.encoded)
        vocabulary = clock.timed("vocabulary loss", VocabularyLoss.__call__)
        with clock.part("data"):
            batch = next(batches).to(self.target.device)
        with (patch.object(self.module, "encoded", encode), patch.object(VocabularyLoss, "__call__", vocabulary),
              clock.part("drafter")):
            count = self.gradient(way, batch, clock)
        with clock.part("optimizer"):
            for weight in self.trained:
                if weight.grad is not None:
                    weight.grad.div_(max(float(count), 1.0))
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return clock.seconds

    def gradient(self, way: Way, batch: Features, clock: Clock) -> Tensor:
        """Back-propagate the summed loss; returns its weighted count."""
        recompute(self.module.drafter, way.checkpointing)
        mixed = torch.autocast(self.target.device.type, torch.bfloat16, enabled=way.precision == "bf16-mixed")
        if way.plain:
            return textbook_gradient(self.module, batch, mixed, clock.part)
        with mixed:
            learned = self.module.loss(batch)
        learned.total.backward()
        return weighted_mean_loss(learned.sums_KC, learned.weights)[1]

    def peak(self, way: Way, batches: Iterator[PackedBatch | Features]) -> int:
        """Bytes of memory that a step holds at its peak above what was held before."""
        if self.target.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.target.device)
            torch.cuda.reset_peak_memory_stats(self.target.device)
            self.step(way, batches)
            return torch.cuda.max_memory_allocated(self.target.device) - before
        with CountedStorages() as tally:
            self.step(way, batches)
        return tally.peak


def recompute(drafter: Drafter, wanted: bool) -> None:
    """Turn activation checkpointing on, or off again."""
    if wanted:
        drafter.recompute_layers()
    elif isinstance(drafter, DraftLM):
        drafter.decoder.gradient_checkpointing_disable()
    for part in drafter.modules():
        if isinstance(part, GatedMLP):
            part.recomputed = wanted


def measure(bench: Bench, ways: Sequence[Way], steps: int, deadline: float = float("inf")) -> dict[str, Taken | str]:
    """Steps of all ways in turn; a way that needs more memory than there is has the reason in place of its figures."""
    found: dict[str, Taken | str] = {str(way): Taken() for way in ways}
    pieces = [bench.conversations(number) for number in range(WARM_UP + steps)]
    feeds, flops = [bench.feed(way, pieces) for way in ways], 0.0
    batches = [iter(feed) for feed in feeds]
    for number in range(WARM_UP + steps):
        for way, coming in zip(ways, batches, strict=True):
            taken = found[str(way)]
            if isinstance(taken, str) or (taken.tokens and time.monotonic() > deadline):
                continue
            try:
                if number == 0:
                    if not flops:
                        # The optimizer's moments would count for the first way alone.
                        spare = bench.conversations(SPARE)
                        with CountedOperations() as counter:
                            bench.step(way, iter([bench.batch(spare, way.plain)]))
                        flops = counter.count / sum(len(piece.tokens_N) for piece in spare)
                    taken.flops_per_token = flops
                    # Of float32 the card has other numbers.
                    taken.card = card() if bench.target.device.type == "cuda" and way.precision != "32-true" else 0.0
                    taken.peak_bytes = bench.peak(way, coming)
                    continue
                for part, seconds in bench.step(way, coming).items():
                    taken.parts[part].append(seconds)
                taken.tokens.append(sum(len(piece.tokens_N) for piece in pieces[number]))
            except torch.OutOfMemoryError:
                bench.optimizer.zero_grad()
                torch.cuda.empty_cache()
                found[str(way)] = "out of memory"
    for feed in feeds:
        feed.close()
    return found


def card() -> float:
    """Operations a second of the CUDA device; 0 for one whose data sheet is not known here."""
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), 0.0)


def table(found: dict[str, dict[str, Taken | str]]) -> list[str]:
    """The lines of the table, one row for each recipe and way."""
    lines = ["| recipe | way | tokens/s | GFLOP a token | of the card, % | step, s | peak, MiB | "
             f"{', % | '.join(PARTS)}, % |", "|---|---|" + "--:|" * (5 + len(PARTS))]
    for recipe, ways in found.items():
        for way, taken in ways.items():
            if isinstance(taken, str):
                lines.append(f"| {recipe} | {way} | {taken} |" + " |" * (4 + len(PARTS)))
                continue
            figures = taken.to_dict()
            shares = " | ".join(f"{100 * figures[f'{part} share']:.{1 if part == 'data' else 0}f}" for part in PARTS)
            used = f"{100 * figures['card share']:.0f}" if taken.card else "unknown"
            lines.append(f"| {recipe} | {way} | {figures['tokens_per_second']:.0f} | "
                         f"{figures['flops_per_token'] / 1e9:.3g} | {used} | {figures['step_seconds']:.3f} | "
                         f"{figures['peak_mib']:.0f} | {shares} |")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m", help="the target")
    parser.add_argument("--recipes", nargs="+", default=["medusa", "eagle3", "fastdraft"],
                        help=f"shipped recipes, of which the drafters are trained: {', '.join(RECIPES)}")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[PRECISIONS[0]], help="of the drafter")
    parser.add_argument("--against", nargs="+", choices=["plain", "checkpointing"], default=[],
                        help="measure the textbook's steps too, or those with activation checkpointing")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each way")
    parser.add_argument("--row-length", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of a batch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(words)
    if min(options.steps, options.rows) < 1 or options.row_length < 32:
        parser.error("--steps and --rows must be at least 1 and --row-length at least 32, got "
                     f"{options.steps}, {options.rows} and {options.row_length}")
    target = shaped_target(options.shape, options.device)
    ways = [Way(False, precision) for precision in options.precisions]
    ways += [Way(kind == "plain", precision, checkpointing=kind == "checkpointing")
             for precision, kind in product(options.precisions, options.against)]
    found = {}
    for name in options.recipes:
        module = shaped_module(shaped_recipe(name, options.shape), target, options.shape)
        found[name] = measure(Bench(target, module, options.row_length, options.rows), ways, options.steps)
    print(f"{options.shape}, {target.device}, {torch.get_num_threads()} threads, torch {torch.__version__}; about "
          f"{options.rows * options.row_length} tokens a step\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
