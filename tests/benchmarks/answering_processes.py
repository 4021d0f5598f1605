"""Answer tokens per second of distillation by several processes of one thread, and by one process with all threads.

    python tests/benchmarks/answering_processes.py [--recipe NAME] [--processes N ...] [--tokens N] [--repeats N]

Each repeat distils data by the command, first by one process without a queue, then from the queue by each number of
processes. The seconds are those from the first prompt to the last answer, the prompts that the target writes included;
starting the processes and loading the target are left out, but those that help are loaded while the first one answers.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from draftsmith.data import Manifest
from draftsmith.data.answers.data_folder import read_stats


def tokens_per_second(recipe: str, workers: int | None, tokens: int, shard_prompts: int) -> float:
    """Answer tokens per second of a new folder of data, made by the command.

    Args:
        recipe: shipped recipe by name, or a YAML file.
        workers: processes that answer from a queue; None for one without.
        tokens: budget.
        shard_prompts: prompts of a shard.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = {"config": recipe, "out": folder, "distill.workers": workers or "null", "distill.budget_tokens": tokens,
                 "distill.budget_minutes": "null", "distill.shard_prompts": shard_prompts,
                 "distill.validation_prompts": 0, "distill.test_prompts": 1}
        words = [f"--{key}={value}" for key, value in given.items()]
        subprocess.run([sys.executable, "-m", "draftsmith.recipes", "distill", *words], check=True,
                       stdout=subprocess.DEVNULL)
        data = Path(folder) / "data"
        return Manifest.load(data).total("train", "supervised") / read_stats(data)["seconds"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="quickstart", help="shipped recipe by name, or a YAML file")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes with a queue")
    parser.add_argument("--tokens", type=int, default=40_000, help="answer tokens of each folder of data")
    parser.add_argument("--shard-prompts", type=int, default=160, help="prompts of a shard")
    parser.add_argument("--repeats", type=int, default=2, help="folders made in each way, in turns")
    options = parser.parse_args(arguments)
    ways = [None, *options.processes]
    found = [[tokens_per_second(options.recipe, way, options.tokens, options.shard_prompts) for way in ways]
             for _ in range(options.repeats)]
    print("| processes | threads of each | tokens/s | ratio |\n|---|--:|--:|--:|")
    for place, way in enumerate(ways):
        rate = statistics.median(turn[place] for turn in found)
        ratio = statistics.median(turn[place] / turn[0] for turn in found)
        name, threads = ("one, without a queue", torch.get_num_threads()) if way is None else (str(way), 1)
        print(f"| {name} | {threads} | {rate:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
