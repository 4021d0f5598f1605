"""Seconds of a target pass by its number of tokens: linear layers packed for oneDNN, plain and as measured at load, in
float32 and bfloat16.

    python tests/benchmarks/pass_cost.py [--target NAME] [--context TOKENS] [--repeats N] [--formats float32,bfloat16]

All forms, formats and sizes take turns in one process, so that other programs slow them alike; the fastest pass of each
counts, and ratios to the plain float32 pass of one token are printed next to milliseconds.

    python tests/benchmarks/pass_cost.py --waiting [--target NAME] [--context TOKENS] [--repeats N]

compares ways in which threads of OpenMP wait, with and without a busy program for each thread: medians of passes in
float32, each way in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from draftsmith.modules import DEFAULT_NAME, Target, TargetConfig, TokenTree, Topology, load_target
from draftsmith.modules.target.linear_forms import Packing, has_packed_product
from draftsmith.recipes.__main__ import SPINS

SIZES = (1, 2, 4, 8, 16, 32)
FORMS = ("packed", "plain", "chosen")
WAITED = (1, 8)  # Tokens of the passes by which ways to wait are compared


class Bench:
    """A target with rows that have read their context, and its passes."""

    def __init__(self, target: Target, context: int, batch: int = 1, largest: int = max(SIZES)) -> None:
        self.target, self.batch = target, batch
        self.packing = {"packed": Packing(packed_from=1), "plain": Packing(packed_from=0),
                        "chosen": target.linears.packing}
        self.rows = target.start(batch, context + largest)
        places_BK = torch.arange(context, device=target.device).expand(batch, -1)
        counts_B = torch.full((batch,), context, device=target.device)
        self.rows.run(TokenTree.prompts(places_BK % target.vocab_size, counts_B), select_BM=counts_B[:, None] - 1)
        self.rows.commit(places_BK, counts_B, [context] * batch, moved=False)

    @torch.no_grad()
    def seconds(self, size: int) -> float:
        """Seconds of the second of two passes of chains of `size` tokens; none is committed."""
        tree = Topology.chain(size - 1).plant(torch.full((self.batch, size), 7, device=self.target.device))
        self.rows.run(tree).logits_BMV.argmax(-1).tolist()
        started = time.perf_counter()
        self.rows.run(tree).logits_BMV.argmax(-1).tolist()
        return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--context", type=int, default=128, help="tokens before the pass")
    parser.add_argument("--repeats", type=int, default=7, help="passes of each size")
    parser.add_argument("--formats", default="float32,bfloat16", help="number formats")
    parser.add_argument("--waiting", action="store_true", help="compare ways in which threads wait")
    parser.add_argument("--medians", action="store_true", help="print the medians that --waiting compares, as JSON")
    options = parser.parse_args()
    if options.waiting or options.medians:
        (compare_waiting if options.waiting else show_medians)(options)
        return
    benches = {name: Bench(load_target(TargetConfig(name=options.target, device="cpu", dtype=name)), options.context)
               for name in options.formats.split(",")}
    best: dict[tuple[str, str, int], float] = {}
    for _ in range(options.repeats):
        for name, bench in benches.items():
            for form in FORMS:
                bench.target.linears.use(bench.packing[form])
                for size in SIZES:
                    found = bench.seconds(size)
                    best[name, form, size] = min(found, best.get((name, form, size), found))
    print(f"{options.target}, context {options.context}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, bench in benches.items():
        note = "" if has_packed_product(getattr(torch, name)) else " (no packed product here)"
        print(f"{name}: chosen at load: {bench.packing['chosen'].in_words}{note}")
    show(best, list(benches))


def show(best: dict[tuple[str, str, int], float], formats: list[str]) -> None:
    """Print milliseconds, and ratios to a plain pass of one token in the first format."""
    base = best[formats[0], "plain", 1]
    print(f"| format | form | {' | '.join(map(str, SIZES))} |\n|---|---|{'---|' * len(SIZES)}")
    for name in formats:
        for form in FORMS:
            cells = [f"{best[name, form, size] * 1e3:.1f} ({best[name, form, size] / base:.2f})" for size in SIZES]
            print(f"| {name} | {form} | {' | '.join(cells)} |")


def show_medians(options: argparse.Namespace) -> None:
    """Print the median seconds of packed passes in float32 for each of WAITED."""
    target = load_target(TargetConfig(name=options.target, device="cpu", dtype="float32", pack=1))
    bench = Bench(target, options.context)
    found = [median(bench.seconds(size) for _ in range(options.repeats)) for size in WAITED]
    print(json.dumps(found))


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """A block during which so many programs each take what they get of a core."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def compare_waiting(options: argparse.Namespace) -> None:
    """Print milliseconds of each way, with and without busy programs."""
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    threads = torch.get_num_threads()
    print(f"{threads} threads, torch {torch.__version__}\n")
    print(f"| busy programs | threads | {' | '.join(f'{size} tokens, ms' for size in WAITED)} |\n|---|---|---|---|")
    for busy in (0, threads):
        for name, variables in {
            "spin, OpenMP's default": {}, "spin for a while, as commands set it": {"GOMP_SPINCOUNT": SPINS},
            "sleep at once": {"OMP_WAIT_POLICY": "PASSIVE"}, "one alone": {"OMP_NUM_THREADS": "1"},
        }.items():
            with busy_programs(busy):
                done = subprocess.run([sys.executable, __file__, "--medians", "--target", options.target, "--context",
                                       str(options.context), "--repeats", str(options.repeats)],
                                      env={**plain, **variables}, stdout=subprocess.PIPE, text=True, check=True)
            cells = " | ".join(f"{seconds * 1e3:.0f}" for seconds in json.loads(done.stdout))
            print(f"| {busy} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
