"""Predictions of ten small runs next to what was then measured, and in how many of them it lay in the 90 % interval.

    python tests/benchmarks/predictions.py --out DIR [--target NAME] [--config RECIPE] [--only N] [WORDS ...]

Ten families are trained for three tiny random targets in turn, or all for one target; each run predicts tokens a pass
and speed-up from held-out answers that chose nothing, and is then evaluated on its test prompts. Each has prompts of
its own: runs with the same ones miss together. WORDS go to every run, such as `-- --train.max_minutes 2`. A finished
run is read, not repeated. On a machine that is busy the intervals of speeds are wide; tokens a pass are not affected.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from draftsmith.recipes.__main__ import main as draftsmith

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.served_targets import SERVED

RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("medusa", "medusa", ("--drafter", "{num_heads: 3}")),
    ("hydra", "hydra", ("--drafter", "{num_heads: 3}")),
    ("eagle", "eagle", ("--drafter", "{}")),
    ("eagle3", "eagle3", ("--drafter", "{vocabulary_size: null}")),
    ("falcon", "falcon", ("--drafter", "{}")),
    ("block", "block", ("--drafter", "{}")),
    ("medusa of two heads", "medusa", ("--drafter", "{num_heads: 2}")),
    ("hydra++", "hydra", ("--drafter", "{num_heads: 4, num_layers: 2, prefix: true}")),
    ("fspad", "eagle", ("--drafter", "{feature_sampling: true, partial_alignment: true}")),
    ("eagle3 of two layers", "eagle3", ("--drafter", "{vocabulary_size: null, num_layers: 2}")),
)
"""Name, family and words of each run."""
TARGETS = ("tiny-random", "gated delta rule and experts", "Mamba-2 and layers without either")
"""Tiny targets, one after the other."""
TINY = ("--distill.validation_prompts", "48", "--distill.test_prompts", "24", "--tree.used_nodes", "null",
        "--evaluate.limit", "24", "--evaluate.speed_prompts", "8", "--distill.temperatures", "[0.0, 1.0]")
"""Words that give tiny runs enough answers to measure on."""


def predicted_and_measured(folder: Path) -> list[tuple[float, tuple[float, float], float]]:
    """(predicted, its interval, measured) of tokens a pass and of the speed-up over this loop without drafts."""
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    own = found["by_prompt_set"]["own"]
    return [(found["predicted_accepted_length"], tuple(found["predicted_accepted_length_interval"]),
             own["accepted_length"]),
            (found["predicted_speedup"], tuple(found["predicted_speedup_interval"]),
             own["tokens_per_second"] / own["plain_tokens_per_second"])]


def main() -> None:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--target", help="one target for all runs; three tiny ones by default")
    parser.add_argument("--config", default="tiny", help="recipe of every run")
    parser.add_argument("--only", type=int, default=len(RUNS), help="number of runs, from the first")
    parser.add_argument("words", nargs="*", help="further words of every run")
    given = parser.parse_args()
    rows, inside = [], [0, 0]
    for number, (name, family, words) in enumerate(RUNS[: given.only]):
        target, folder = given.target or TARGETS[number % len(TARGETS)], given.out / f"{number}-{family}"
        if not (folder / "evaluation.json").is_file():
            place = given.out / "targets" / target.replace(" ", "-")
            if target in SERVED and not place.is_dir():
                SERVED[target](place)
            # A static tree in any case: where the default drafts nothing there is nothing to predict.
            policy = ("--evaluate.policies", "[static-8]") if given.config == "tiny" else ()
            if draftsmith(["run", "--config", given.config, "--out", str(folder), "--family", family, *words,
                           "--target.name", str(place) if target in SERVED else target,
                           "--distill.seed", str(number),
                           *(TINY if given.config == "tiny" else ()), *policy, *given.words]):
                raise SystemExit(f"the run {name} failed")
        row = [name, target.replace(" ", "-")]
        for place_of, (predicted, (low, high), measured) in enumerate(predicted_and_measured(folder)):
            within = low <= measured <= high
            inside[place_of] += within
            row.append(f"{predicted:.2f} [{low:.2f},{high:.2f}] {measured:.2f}{'' if within else ' outside'}")
        rows.append(row)
    print("| run | target | tokens a pass: predicted [90 %] measured | speed-up: predicted [90 %] measured |")
    print("|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(f"\nIn the interval: tokens a pass {inside[0]} of {len(rows)}, speed-up {inside[1]} of {len(rows)}.")


if __name__ == "__main__":
    main()
