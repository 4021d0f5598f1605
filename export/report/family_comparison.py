"""Comparison of drafts trained and measured on equal terms: one table as JSON, Markdown and a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import bounded_json, read_bounded_text
from ..page import Table, Text, as_markdown
from .evaluation_page import JSON_NAME
from .phrases import number, percent, times
from .plots import standings as plot

STANDINGS_JSON, STANDINGS_MARKDOWN, STANDINGS_PLOT = "families.json", "families.md", "families.svg"
GREEDY, SAMPLED = 0.0, 1.0  # Temperatures of the table
COLUMNS_NOTE = (
    "Tokens/pass: tokens that one pass of the target adds to an answer, 1 without drafts; untrained: the same drafter "
    "before its first training step. Nodes: tokens that one pass checks, the last one of the text included. Speed-up: "
    "over the faster of this project's loop without drafts and transformers' generate. Identical: answers equal to the "
    "target's own, token by token, of those compared; at a near-tie the target itself is undecided within rounding.")
"""Explanation of the columns."""


def read_standing(name: str, folder: Path) -> dict[str, Any] | None:
    """One draft's figures by its run's folder, as families.json has them; None where something was not measured."""
    if not (folder / JSON_NAME).is_file():
        return None
    content = bounded_json(read_bounded_text(folder / JSON_NAME))
    training: dict[str, Any] = {}
    for file in (folder / "train" / name for name in ("result.json", "stats.json")):
        # A baseline without training has neither file.
        training |= bounded_json(read_bounded_text(file)) if file.is_file() else {}
    # An artifact evaluated with several policies is represented by the first of them.
    measurements = [record for record in content["measurements"] if record["method"] == content["method"]]
    whole = [record for record in measurements
             if all(record[group] is None for group in ("prompt_set", "category", "turn", "mode"))]
    # The first record of a temperature is that of the first batch size, which all rows of the table share.
    greedy, sampled = ([*(record for record in whole if record["temperature"] == degree), dict[str, Any]()][0]
                       for degree in (GREEDY, SAMPLED))
    lengths: dict[str, float] = {}
    for record in measurements:
        if record["prompt_set"] is not None:
            # A readable key, since families.json has it too.
            lengths.setdefault(f"{record['prompt_set']}, {record['temperature']:g}", record["accepted_length"])
    lossless = [record["lossless"] for record in whole]
    drift = content["header"].get("drift", {})
    return {
        "name": name, "training_seconds": training.get("seconds"), "training_steps": training.get("steps"),
        **{key: training.get(key) for key in ("parameters", "precision", "peak_memory_bytes", "data_wait")},
        # Acceptance heads have a training without a curve.
        "untrained_accepted_length": training["curve"][0]["accepted_length"] if "curve" in training else None,
        # With the tree in use, by "prompt set, temperature".
        "accepted_length": lengths,
        **{key: content[key] for key in ("nodes", "acceptance_by_position", "contended")},
        **{key: greedy.get(key) for key in ("draft_time_share", "tokens_per_second", "speedup")},
        "nodes_sampled": sampled.get("nodes"), "speedup_sampled": sampled.get("speedup"),
        # At every temperature.
        "identical": sum(one["identical"] for one in lossless), "answers": sum(one["prompts"] for one in lossless),
        "near_ties": sum(one["near_tie_divergences"] for one in lossless),
        # Answers of an artifact that adapts its target are compared with the adapted target's.
        "changes_target": bool(drift), "drift_kl": drift.get("kl"), "drift_agreement": drift.get("agreement")}


def write_standings(out: Path, rows: Mapping[str, Path]) -> Path:
    """Write families.json, families.md and families.svg from the folders of the measured rows, by their names, in the
    order of the table; returns the path of the Markdown."""
    found = [standing for name, folder in rows.items() if (standing := read_standing(name, folder)) is not None]
    # All rows were measured with the same settings on one machine, so the header of the first stands for all.
    header = bounded_json(read_bounded_text(rows[found[0]["name"]] / JSON_NAME))["header"] if found else {}
    write_file(out / STANDINGS_JSON, json.dumps({"header": header, "rows": found}, indent=2) + "\n")
    bars: dict[str, tuple[float, float | None]] = {}
    for one in found:
        lengths = {key: value for key, value in one["accepted_length"].items() if key.endswith(" 0")}
        # Hand-written prompts are the least like what the drafts trained on.
        bars[one["name"]] = lengths.get("handwritten, 0", max(lengths.values(), default=1.0)), one["speedup"]
    write_file(out / STANDINGS_PLOT, plot(bars))
    return write_file(out / STANDINGS_MARKDOWN, markdown(found))


def markdown(standings: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown, with an explanation of its columns."""
    sets = list(dict.fromkeys(key.rpartition(", ")[0] for one in standings for key in one["accepted_length"]))
    notes = [COLUMNS_NOTE]
    notes += [f"{one['name']} changes the target: its answers are compared with the adapted target's, which chooses "
              f"{percent(one['drift_agreement'])} of the original's greedy tokens (KL divergence "
              f"{number(one['drift_kl'], 4)} nats a token)." for one in standings if one["changes_target"]]
    if busy := ", ".join(one["name"] for one in standings if one["contended"]):
        notes.append(f"The machine was busy with something else while the speeds of {busy} were measured: they are not "
                     "reliable.")
    return as_markdown([*Table.of([cells(one, sets) for one in standings]), *map(Text, notes)])


def cells(one: dict[str, Any], sets: Sequence[str]) -> dict[str, str]:
    """The cells of a draft by the headings of their columns, for these prompt sets."""
    # The root alone is a pass of plain decoding.
    greedy, sampled = ("none" if nodes == 1 else number(nodes, 0) for nodes in (one["nodes"], one["nodes_sampled"]))
    parameters, peak = one["parameters"], one["peak_memory_bytes"]
    return {
        "": f"{one['name']} (changes the target)" if one["changes_target"] else one["name"],
        "trained parameters": "-" if parameters is None else f"{parameters / 1e6:.1f} M",
        "training, s": number(one["training_seconds"], 0), "steps": number(one["training_steps"], 0),
        "number format": one["precision"] or "-",
        "peak memory, GiB": "–" if peak is None else f"{peak / 2**30:.1f}",
        "waiting for data": percent(one["data_wait"]),
        "tokens/pass untrained": number(one["untrained_accepted_length"], 2),
        **{f"tokens/pass {name}, {kind}": number(one["accepted_length"].get(f"{name}, {degree:g}"), 2)
           for name in sets for kind, degree in (("greedy", GREEDY), ("sampled", SAMPLED))},
        "nodes, greedy": greedy, "nodes, sampled": sampled,
        "passes accepting 1, 2, 3, 4 guesses": " ".join(percent(share) for share in one["acceptance_by_position"][:4]),
        "time drafting": percent(one["draft_time_share"]), "tokens/s": number(one["tokens_per_second"], 1),
        "speed-up, greedy": times(one["speedup"]), "speed-up, sampled": times(one["speedup_sampled"]),
        "identical": f"{one['identical']}/{one['answers']}" + (f" + {one['near_ties']} near-ties" if one["near_ties"]
                                                               else "")}
