"""Plot of the accepted lengths in the families' table of README.md in this folder, as an SVG file.

    python tests/benchmarks/families_picture.py --out tests/benchmarks/figures/families.svg
"""

import argparse
from pathlib import Path

from draftsmith.export.report.plots import standings

TABLE = Path(__file__).with_name("README.md")
NAME, BEST, USED, SPEED = ("row", "best tree, hand-written", "used tree, hand-written, T=0 / T=1",
                           "speed-up, T=0 / T=1")


def lengths(text: str) -> dict[str, tuple[float, float | None]]:
    """(accepted length with the best tree, speed-up with the tree in use) of each row: greedy, hand-written prompts.

    A row without a best tree, such as prompt lookup, has the accepted length of the tree in use."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    heads = [place for place, row in enumerate(rows) if row[0] == NAME and BEST in row]
    if not heads:
        raise ValueError(f"{TABLE} holds no table with the columns {NAME!r} and {BEST!r}")
    head = rows[heads[0]]
    found: dict[str, tuple[float, float | None]] = {}
    for row in rows[heads[0] + 2 :]:
        if len(row) != len(head):
            break
        cells = dict(zip(head, row, strict=True))
        greedy = {key: float(cells[key].split("/")[0]) for key in (USED, SPEED)}
        found[cells[NAME]] = (greedy[USED] if cells[BEST] == "-" else float(cells[BEST]), greedy[SPEED])
    return found


def main() -> None:
    """Write the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    out: Path = parser.parse_args().out
    out.write_text(standings(lengths(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{out} shows the table of {TABLE}")


if __name__ == "__main__":
    main()
