"""Seconds of a target pass by its number of tokens, linear layers packed for oneDNN and plain.

    python tests/benchmarks/pass_cost.py [--target NAME] [--context TOKENS] [--repeats N]

Both forms take turns in one process, so that contention affects them alike; medians are printed.
"""

import argparse
import time
from contextlib import nullcontext
from statistics import median

import torch
from draftsmith.modules import DEFAULT_NAME, Target, TargetConfig, TokenTree, Topology, load_target

SIZES = (1, 2, 4, 8, 16, 32, 64)


@torch.no_grad()
def pass_seconds(target: Target, context: int, size: int, *, packed: bool) -> float:
    """Seconds of one pass of a chain of `size` tokens after `context` committed ones."""
    rows = target.start(1, context + size)
    prompt = TokenTree.prompts(torch.arange(context)[None] % target.vocab_size, torch.tensor([context]))
    rows.run(prompt, select_BM=torch.zeros(1, 1, dtype=torch.long))
    rows.commit(torch.arange(context)[None], torch.tensor([context]), [context], moved=False)
    tree = Topology.chain(size - 1).plant(torch.full((1, size), 7))
    with nullcontext() if packed or target.packed is None else target.packed.removed():
        rows.run(tree)
        started = time.perf_counter()
        rows.run(tree).logits_BMV.argmax(-1).tolist()
        return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--context", type=int, default=128, help="tokens before the pass")
    parser.add_argument("--repeats", type=int, default=7, help="passes of each size")
    options = parser.parse_args()
    target = load_target(TargetConfig(name=options.target, device="cpu", dtype="float32"))
    times: dict[tuple[int, bool], list[float]] = {(size, packed): [] for size in SIZES for packed in (True, False)}
    for _ in range(options.repeats):
        for size, packed in times:
            times[size, packed].append(pass_seconds(target, options.context, size, packed=packed))
    print(f"{options.target}, context {options.context}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| tokens | packed ms | plain ms | plain / packed | packed / packed 1 |")
    print("|---|---|---|---|---|")
    base = median(times[1, True])
    for size in SIZES:
        packed, plain = median(times[size, True]), median(times[size, False])
        print(f"| {size} | {packed * 1e3:.1f} | {plain * 1e3:.1f} | {plain / packed:.2f} | {packed / base:.2f} |")


if __name__ == "__main__":
    main()
