"""Measurements of a distillation on this machine, kept next to its data: nothing in the data depends on them."""

import json
from collections.abc import Mapping
from pathlib import Path

from ...modules.files.json_records import read_json, record_of
from ..store.token_store import write_bytes

STATS = "stats.json"


def added(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Sums of amounts by name, those of `more`."""
    return {name: value + before.get(name, 0.0) for name, value in more.items()}


def write_stats(folder: Path, sums: Mapping[str, float], seconds: float) -> None:
    """Write amounts with the shares of busy slots that follow from them, and the time spent on the folder."""
    totals = {name.removesuffix("_total_slots"): value for name, value in sums.items() if name.endswith("_total_slots")}
    shares = {f"{part}_busy_share": sums[f"{part}_busy_slots"] / total if total else 1.0
              for part, total in totals.items()}
    content = {**sums, **shares, "seconds": seconds}
    write_bytes(folder / STATS, json.dumps(content, indent=2, sort_keys=True).encode())


def read_stats(folder: Path) -> dict[str, float]:
    """The numbers that `write_stats` has written; none where there is no file. Raises UserError if it is damaged."""
    file = folder / STATS
    if not file.exists():
        return {}
    return record_of(dict[str, float], read_json(file, remedy := "delete it, only times are lost"), str(file), remedy)
