"""The first places of `draftsmith choose` next to those of a measured table of `draftsmith families`.

    python tests/benchmarks/choose_ranking.py --choice DIR/choose.json --families DIR/families.json [--places 2]
        [--tie 0.05]

Rows that both have are ranked, by the predicted speed-up over plain decoding at batch 1, temperature 0, and by the
measured one over the faster of plain decoding and `generate`. Exits with 1 unless the first places hold the same rows
in order, where rows whose measured speed-ups differ by no more than the tie count as the same.
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
    parser.add_argument("--tie", type=float, default=0.05, help="relative difference that a measurement does not tell")
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
    agree = len(both) >= given.places and all(abs(measured[one] / measured[other] - 1) <= given.tie for one, other in
                                              zip(ranked[: given.places], true[: given.places], strict=True))
    print(f"\nThe first {given.places} places {'agree' if agree else 'differ'} within {given.tie:.0%}, of {len(both)} "
          "rows.")
    raise SystemExit(not agree)


if __name__ == "__main__":
    main()
