"""Seconds of an optimizer step of shipped recipes on the embedded target, in float32 and in bf16.

    python tests/benchmarks/train_step.py eagle3 hydra_plus_plus medusa --steps 8

The target's states are computed beforehand, as in a run that stores them. Rows hold random tokens, and each step learns
all of them: its cost does not depend on them. Both precisions take turns, so that contention affects both.
"""

import argparse
import statistics
import time

import torch
from draftsmith.modules import Features, load_target
from draftsmith.recipes.pipeline import COMMANDS
from draftsmith.trainers.metrics import weighted_mean_loss

WAYS = ("32-true", "bf16-mixed")


def seconds(recipe_name: str, steps: int) -> tuple[int, dict[str, list[float]]]:
    """(tokens of a step, seconds of each step by precision), without the first step."""
    recipe = COMMANDS["run"].parse(["--config", recipe_name, "--out", "runs/train_step"]).values
    target = load_target(recipe.target)
    module = recipe.module(target, torch.ones(target.vocab_size))
    module.configure_model()
    module.train()
    length, rows = recipe.batch.row_length, recipe.batch.rows_per_batch
    text = [(torch.randint(target.vocab_size, (length,)).tolist(), [True] * length) for _ in range(rows)]
    batch = module.encoded(Features.from_rows(text)) if module.needs_states else Features.from_rows(text)
    optimizer = module.configure_optimizers()["optimizer"]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(steps + 1):
        for way in WAYS:
            started = time.perf_counter()
            with torch.autocast(target.device.type, torch.bfloat16, enabled=way == "bf16-mixed"):
                learned = module.loss(batch)
            learned.total.backward()
            count = float(weighted_mean_loss(learned.sums_KC, learned.weights)[1])
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(count)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found[way].append(time.perf_counter() - started)
    return length * rows, {way: taken[1:] for way, taken in found.items()}


def main() -> None:
    """Print a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="+", help="shipped recipes by name")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each precision")
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads\n\n| recipe | tokens | 32-true, s | bf16-mixed, s | ratio |\n"
          "|---|--:|--:|--:|--:|")
    for name in options.recipes:
        tokens, taken = seconds(name, options.steps)
        full, mixed = (statistics.median(taken[way]) for way in WAYS)
        print(f"| {name} | {tokens} | {full:.3f} | {mixed:.3f} | {full / mixed:.2f} |", flush=True)


if __name__ == "__main__":
    main()
