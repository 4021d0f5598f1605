"""Processor seconds of an optimizer step of shipped recipes on the embedded target, in float32 and in bf16.

    python tests/benchmarks/step_versions.py eagle3 hydra_plus_plus medusa --steps 8
    mkdir -p /tmp/before && git archive main --prefix=draftsmith/ | tar -x -C /tmp/before
    python tests/benchmarks/step_versions.py eagle3 hydra_plus_plus --against /tmp/before
    python tests/benchmarks/step_versions.py eagle3 hydra_plus_plus --operations 8

The target's states are computed beforehand, as in a run that stores them. Rows hold conversations of random tokens, all
in the draft vocabulary; the first fourth of each is a prompt, from which nothing is learned. Both precisions take
turns, and with --against also both versions, each in a process of its own, so that contention affects all alike. On a
CPU the time is that of the process on all its threads: seconds of the clock would count other work on the machine.

With --operations a bf16 step is profiled instead: the share of torch's operations in its time, and that of the
optimizer. The matrix products bound what any change can gain that computes the same.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from draftsmith.modules import Features, load_target
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.trainers import DraftModule
from draftsmith.trainers.losses.metrics import weighted_mean_loss
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

WAYS = ("32-true", "bf16-mixed")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Matrix products by torch's names."""
OPTIMIZER = "Optimizer.step#"
"""How torch's profiler names the step of an optimizer."""


def conversations(rows: int, length: int, each: int, entries: int) -> Features:
    """Packed rows of conversations of `each` tokens, the last one of a row cut off."""
    order_L = torch.arange(length)
    return Features(
        tokens_BL=torch.randint(entries, (rows, length)),
        supervised_BL=(order_L % each >= each // 4).expand(rows, length),
        segments_BL=(order_L // each).expand(rows, length),
        positions_BL=(order_L % each).expand(rows, length),
    )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The parts of a step, as shares of its time."""

    operations: dict[str, float]
    """Share of each of torch's operations, largest first."""
    optimizer: float
    """Share of the optimizer, its matrix products included."""

    @property
    def products(self) -> float:
        """Share of the matrix products."""
        return sum(self.operations.get(one, 0.0) for one in PRODUCTS)


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a recipe on one batch."""

    module: DraftModule
    batch: Features

    @classmethod
    def of(cls, name: str, each: int) -> "Steps":
        """Those of a shipped recipe, with conversations of `each` tokens."""
        recipe = COMMANDS["run"].parse(["--config", name, "--out", "runs/step_versions"]).values
        target = load_target(recipe.target)
        torch.manual_seed(0)
        # Equal counts choose the lowest ids.
        module = recipe.module(target, torch.ones(target.vocab_size))
        module.configure_model()
        module.train()
        batch = conversations(recipe.batch.rows_per_batch, recipe.batch.row_length, each,
                              module.config.drafter.vocabulary_size or target.vocab_size).to(target.device)
        return cls(module, module.encoded(batch) if module.needs_states else batch)

    def taken(self) -> Iterator[dict[str, float]]:
        """Seconds of one step after another, by precision."""
        optimizer, device = self.module.configure_optimizers()["optimizer"], self.module.target.device.type
        while True:
            found = {}
            for way in WAYS:
                started = clock(device)
                self._take(optimizer, device, way)
                found[way] = clock(device) - started
            yield found

    def shares(self) -> Shares:
        """The parts of a bf16 step, as shares of its time."""
        optimizer, device = self.module.configure_optimizers()["optimizer"], self.module.target.device.type
        for _ in range(2):
            self._take(optimizer, device, "bf16-mixed")
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
        with profile(activities=kinds) as profiled:
            self._take(optimizer, device, "bf16-mixed")
        events, where = profiled.key_averages(), "device" if device == "cuda" else "cpu"
        own = {one.key: float(getattr(one, f"self_{where}_time_total")) for one in events}
        # An optimizer of several parts is marked as a whole and part by part.
        marked = [float(getattr(one, f"{where}_time_total")) for one in events if one.key.startswith(OPTIMIZER)]
        total = sum(own.values())
        return Shares(operations={name: own[name] / total for name in sorted(own, key=own.__getitem__, reverse=True)},
                      optimizer=max(marked) / total)

    def _take(self, optimizer: Optimizer, device: str, way: str) -> None:
        """One optimizer step in the precision `way`."""
        with torch.autocast(device, torch.bfloat16, enabled=way == "bf16-mixed"):
            learned = self.module.loss(self.batch)
        learned.total.backward()
        count = float(weighted_mean_loss(learned.sums_KC, learned.weights)[1])
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def clock(device: str) -> float:
    """Processor seconds of this process; seconds once the device has finished where that is no CPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def serve(name: str, each: int) -> None:
    """Print the seconds of one step for each line that is read."""
    steps = Steps.of(name, each).taken()
    for _ in sys.stdin:
        print(json.dumps(next(steps)), flush=True)


def print_operations(recipes: Sequence[str], each: int, count: int) -> None:
    """Print the shares of a step: matrix products, optimizer and the `count` largest operations of each recipe."""
    print("| recipe | matrix products, % | optimizer, % | largest operations, % |\n|---|--:|--:|---|")
    for name in recipes:
        found = Steps.of(name, each).shares()
        largest = ", ".join(f"`{one.removeprefix('aten::')}` {found.operations[one]:.0%}"
                            for one in list(found.operations)[:count])
        print(f"| {name} | {found.products:.0%} | {found.optimizer:.0%} | {largest} |", flush=True)


def started(name: str, each: int, folder: str | None) -> Callable[[], dict[str, float]]:
    """A function that takes a step in a process of its own.

    Args:
        folder: that of another version of the package, with the name of the package; None for the installed one.
    """
    words = [sys.executable, __file__, name, "--conversation", str(each), "--serve"]
    paths = {} if folder is None else {"PYTHONPATH": folder}
    worker = subprocess.Popen(words, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)

    def step() -> dict[str, float]:
        if worker.stdin is None or worker.stdout is None:
            raise RuntimeError("the worker has no pipes")
        print("step", file=worker.stdin, flush=True)
        if not (line := worker.stdout.readline()):
            raise SystemExit(f"error: the step of {name} failed; run {shlex.join(words)} and give it a line to see why")
        found: dict[str, float] = json.loads(line)
        return found

    return step


def main() -> None:
    """Print a row for each recipe, and for each precision where two versions are compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="+", help="shipped recipes by name")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each precision")
    parser.add_argument("--conversation", type=int, default=170, help="tokens of a conversation")
    parser.add_argument("--against", metavar="FOLDER", help="folder of another version, as FOLDER/draftsmith")
    parser.add_argument("--serve", action="store_true", help="take a step for each line of the input; no table")
    parser.add_argument("--operations", type=int, metavar="N",
                        help="print the shares of the N largest operations of a bf16 step instead")
    options = parser.parse_args()
    if options.operations is not None:
        print_operations(options.recipes, options.conversation, options.operations)
        return
    if options.serve:
        serve(options.recipes[0], options.conversation)
        return
    versions = (None,) if options.against is None else (None, options.against)
    print(f"{torch.get_num_threads()} threads\n")
    print("| recipe | 32-true, s | bf16-mixed, s | ratio |\n|---|--:|--:|--:|" if options.against is None else
          "| recipe | precision | before, s | now, s | ratio |\n|---|---|--:|--:|--:|")
    for name in options.recipes:
        workers = [started(name, options.conversation, folder) for folder in versions]
        # The first two steps allocate, and choose the kernels.
        rounds = [[step() for step in workers] for _ in range(options.steps + 2)][2:]
        medians = [{way: statistics.median(one[place][way] for one in rounds) for way in WAYS}
                   for place in range(len(versions))]
        if options.against is None:
            full, mixed = (medians[0][way] for way in WAYS)
            print(f"| {name} | {full:.3f} | {mixed:.3f} | {full / mixed:.2f} |", flush=True)
            continue
        for way in WAYS:
            now, before = (median[way] for median in medians)
            print(f"| {name} | {way} | {before:.3f} | {now:.3f} | {before / now:.2f} |", flush=True)


if __name__ == "__main__":
    main()
