"""The first places of `draftsmith choose` next to those of a measured table of `draftsmith families`.

    python tests/benchmarks/choose_ranking.py --choice DIR/choose.json --families DIR/families.json [--places 2]

Rows that both have are ranked, by the predicted speed-up over plain decoding at batch 1, temperature 0, and by the
measured one over the faster of plain decoding and `generate`. Exits with 1 unless the first places hold
the same rows in order.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    """Print both rankings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choice", type=Path, required=True, help="choose.json")
    parser.add_argument("--families", type=Path, required=True, help="families.json")
    parser.add_argument("--places", type=int, default=2, help="places that must agree")
    given = parser.parse_args()
    # An artifact of a row is named by its folder: runs/families/ROW/artifact.
    predicted = {Path(one["name"].removesuffix("/artifact")).name: found["speedup"]
                 for one in json.loads(given.choice.read_text())["candidates"]
                 if (found := one["predictions"].get("batch 1, temperature 0")) is not None}
    measured = {row["name"]: row["speedup"] for row in json.loads(given.families.read_text())["rows"]
                if row["speedup"] is not None}
    both = [name for name in predicted if name in measured]
    ranked, true = (sorted(both, key=lambda name: -figures[name]) for figures in (predicted, measured))
    print("| place | chosen | predicted | measured | row | measured |")
    print("|---|---|---|---|---|---|")
    for place, (one, other) in enumerate(zip(ranked, true, strict=True), 1):
        print(f"| {place} | {one} | {predicted[one]:.2f} | {measured[one]:.2f} | {other} | {measured[other]:.2f} |")
    agree = len(both) >= given.places and ranked[: given.places] == true[: given.places]
    print(f"\nThe first {given.places} places {'agree' if agree else 'differ'}, of {len(both)} rows.")
    raise SystemExit(not agree)


if __name__ == "__main__":
    main()
