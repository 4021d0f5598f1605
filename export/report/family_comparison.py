"""Comparison of drafts trained and measured on equal terms: one table as JSON, Markdown and a plot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...modules.files.atomic_files import write_file
from ...modules.files.bounded_reading import bounded_json, read_bounded_text
from .markdown import JSON_NAME
from .phrases import number, percent, times
from .plots import standings as plot

STANDINGS_JSON, STANDINGS_MARKDOWN, STANDINGS_PLOT = "families.json", "families.md", "families.svg"
TRAINING = ("result.json", "stats.json")
"""Files that training writes next to its checkpoints."""
GREEDY, SAMPLED = 0.0, 1.0
"""Temperatures of the table."""
COLUMNS_NOTE = (
    "Tokens/pass: tokens that one pass of the target adds to an answer, 1 without drafts; untrained: the same drafter "
    "before its first training step. Nodes: tokens that one pass checks, the last one of the text included. Speed-up: "
    "over the faster of this project's loop without drafts and transformers' generate. Identical: answers equal to the "
    "target's own, token by token, of those compared; at a near-tie the target itself is undecided within rounding."
)
"""Explanation of the columns."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Figures of one draft; None where something was not measured."""

    name: str
    """Name of the row."""
    parameters: int | None
    """Trained parameters; None without training."""
    training_seconds: float | None
    """Seconds of training, without validation."""
    training_steps: int | None
    """Optimizer steps in that time."""
    precision: str | None
    """Number format of the training, by Lightning's name."""
    peak_memory_bytes: int | None
    """Peak memory of the training process."""
    data_wait: float | None
    """Share of the training time that went by waiting for data."""
    untrained_accepted_length: float | None
    """Tokens per pass of the same drafter before its first step, on held-out text."""
    accepted_length: dict[str, float]
    """Tokens per target pass with the tree in use, by "prompt set, temperature"."""
    nodes: int
    """Nodes of the tree in use for greedy rows, root included."""
    nodes_sampled: int | None
    """The same at temperature 1; None where that was not measured."""
    acceptance_by_position: tuple[float, ...]
    """Share of greedy passes that accept at least 1, 2, 3 ... drafted tokens, all prompts."""
    draft_time_share: float | None
    """Share of the decoding time spent drafting, greedy."""
    tokens_per_second: float | None
    """Greedy speed, see `Measures`."""
    speedup: float | None
    """Greedy speed-up over the faster of plain loop and `generate`."""
    speedup_sampled: float | None
    """The same at temperature 1."""
    identical: int
    """Answers equal to the reference at every temperature."""
    near_ties: int
    """Answers that first differ where the target itself is undecided within rounding."""
    answers: int
    """Answers compared."""
    changes_target: bool
    """True for an artifact that adapts its target; its answers are then compared with the adapted target's."""
    drift_kl: float | None
    """KL(original || adapted) of the next token, in nats; None where the target is unchanged."""
    drift_agreement: float | None
    """Share of the original's greedy tokens that the adapted target chooses as well."""
    contended: bool
    """True when the machine was busy with something else while speeds were measured."""


def read_standing(name: str, folder: Path) -> Standing | None:
    """The figures in a run's folder, or None while it has no evaluation."""
    if not (folder / JSON_NAME).is_file():
        return None
    content = bounded_json(read_bounded_text(folder / JSON_NAME))
    training: dict[str, Any] = {}
    for file in (folder / "train" / name for name in TRAINING):
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
            lengths.setdefault(_key(record["prompt_set"], record["temperature"]), record["accepted_length"])
    lossless = [record["lossless"] for record in whole]
    drift = content["header"].get("drift", {})
    return Standing(
        name=name,
        parameters=training.get("parameters"),
        training_seconds=training.get("seconds"),
        training_steps=training.get("steps"),
        precision=training.get("precision"),
        peak_memory_bytes=training.get("peak_memory_bytes"),
        data_wait=training.get("data_wait"),
        # Acceptance heads have a training without a curve.
        untrained_accepted_length=training["curve"][0]["accepted_length"] if "curve" in training else None,
        accepted_length=lengths,
        nodes=content["nodes"],
        nodes_sampled=sampled.get("nodes"),
        acceptance_by_position=tuple(content["acceptance_by_position"]),
        draft_time_share=greedy.get("draft_time_share"),
        tokens_per_second=greedy.get("tokens_per_second"),
        speedup=greedy.get("speedup"),
        speedup_sampled=sampled.get("speedup"),
        identical=sum(one["identical"] for one in lossless),
        near_ties=sum(one["near_tie_divergences"] for one in lossless),
        answers=sum(one["prompts"] for one in lossless),
        changes_target=bool(drift),
        drift_kl=drift.get("kl"),
        drift_agreement=drift.get("agreement"),
        contended=content["contended"],
    )


def write_standings(out: Path, rows: Mapping[str, Path]) -> Path:
    """Write families.json, families.md and families.svg from the measured rows; returns the path of the Markdown.

    Args:
        out: folder for the three files.
        rows: folder of each row by its name, in the order of the table.
    """
    found = [standing for name, folder in rows.items() if (standing := read_standing(name, folder)) is not None]
    # All rows were measured with the same settings on one machine, so the header of the first stands for all.
    header = bounded_json(read_bounded_text(rows[found[0].name] / JSON_NAME))["header"] if found else {}
    content = {"header": header, "rows": [asdict(standing) for standing in found]}
    write_file(out / STANDINGS_JSON, json.dumps(content, indent=2) + "\n")
    bars: dict[str, tuple[float, float | None]] = {}
    for one in found:
        lengths = {key: value for key, value in one.accepted_length.items() if key.endswith(" 0")}
        # Hand-written prompts are the least like what the drafts trained on.
        bars[one.name] = lengths.get("handwritten, 0", max(lengths.values(), default=1.0)), one.speedup
    write_file(out / STANDINGS_PLOT, plot(bars))
    return write_file(out / STANDINGS_MARKDOWN, markdown(found))


def markdown(standings: Sequence[Standing]) -> str:
    """The table in Markdown, with an explanation of its columns."""
    sets = list(dict.fromkeys(key.rpartition(", ")[0] for one in standings for key in one.accepted_length))
    columns: list[tuple[str, Callable[[Standing], str]]] = [
        ("", lambda one: f"{one.name} (changes the target)" if one.changes_target else one.name),
        ("trained parameters", lambda one: "-" if one.parameters is None else f"{one.parameters / 1e6:.1f} M"),
        ("training, s", lambda one: number(one.training_seconds, 0)),
        ("steps", lambda one: number(one.training_steps, 0)),
        ("number format", lambda one: one.precision or "-"),
        ("peak memory, GiB", lambda one: "–" if one.peak_memory_bytes is None else
         f"{one.peak_memory_bytes / 2**30:.1f}"),
        ("waiting for data", lambda one: percent(one.data_wait)),
        ("tokens/pass untrained", lambda one: number(one.untrained_accepted_length, 2)),
        # Defaults of the lambdas keep each column's own name and temperature: the loop's variables go on.
        *((f"tokens/pass {name}, {kind}",
           lambda one, name=name, degree=degree: number(one.accepted_length.get(_key(name, degree)), 2))
          for name in sets for kind, degree in (("greedy", GREEDY), ("sampled", SAMPLED))),
        # The root alone is a pass of plain decoding.
        ("nodes, greedy", lambda one: "none" if one.nodes == 1 else number(one.nodes, 0)),
        ("nodes, sampled", lambda one: "none" if one.nodes_sampled == 1 else number(one.nodes_sampled, 0)),
        ("passes accepting 1, 2, 3, 4 guesses",
         lambda one: " ".join(percent(share) for share in one.acceptance_by_position[:4])),
        ("time drafting", lambda one: percent(one.draft_time_share)),
        ("tokens/s", lambda one: number(one.tokens_per_second, 1)),
        ("speed-up, greedy", lambda one: times(one.speedup)),
        ("speed-up, sampled", lambda one: times(one.speedup_sampled)),
        ("identical", lambda one: f"{one.identical}/{one.answers}" + (f" + {one.near_ties} near-ties" if one.near_ties
                                                                      else "")),
    ]
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(cell(one) for _, cell in columns) + " |" for one in standings]
    lines += ["", COLUMNS_NOTE]
    for one in (standing for standing in standings if standing.changes_target):
        lines += ["", f"{one.name} changes the target: its answers are compared with the adapted target's, which "
                      f"chooses {percent(one.drift_agreement)} of the original's greedy tokens (KL divergence "
                      f"{number(one.drift_kl, 4)} nats a token)."]
    if any(one.contended for one in standings):
        busy = ", ".join(one.name for one in standings if one.contended)
        lines += ["", f"The machine was busy with something else while the speeds of {busy} were measured: they are "
                      "not reliable."]
    return "\n".join(lines) + "\n"


def _key(prompt_set: str, temperature: float) -> str:
    # A readable key, since families.json has it too.
    return f"{prompt_set}, {temperature:g}"
