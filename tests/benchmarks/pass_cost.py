"""Seconds of a target pass by its number of tokens: linear layers packed for oneDNN, plain and as measured at load, in
float32 and bfloat16.

    python tests/benchmarks/pass_cost.py [--target NAME] [--context TOKENS] [--repeats N] [--formats float32,bfloat16]

All forms, formats and sizes take turns in one process, so that other programs slow them alike; the fastest pass of each
counts, and ratios to the plain float32 pass of one token are printed next to milliseconds.
"""

import argparse
import time

import torch
from draftsmith.modules import DEFAULT_NAME, Target, TargetConfig, TokenTree, Topology, load_target
from draftsmith.modules.target.linears.linear_forms import Packing
from draftsmith.modules.target.linears.packed_linear import has_packed_product

SIZES = (1, 2, 4, 8, 16, 32)
FORMS = ("packed", "plain", "chosen")


class Bench:
    """A target with rows that have read their context, and its passes.

    Args:
        target: the target; its linear layers are changed.
        context: tokens that each row has read.
        batch: number of rows.
        largest: tokens of the largest pass.
    """

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
    options = parser.parse_args()
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


if __name__ == "__main__":
    main()
