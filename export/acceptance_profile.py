"""acceptance.json: how many drafted tokens the target accepts, for capacity planners and engines that simulate it.

Everything in it is counted on answers of the target: on those of evaluations as they were decoded, and on held-out
greedy answers along which passes of a chain are walked, which gives what decoding them with that chain counts."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..modules import RankedText, Topology
from ..modules.files.atomic_files import write_file
from ..modules.files.json_records import read_object
from .artifact_files import ACCEPTANCE, AGAIN, as_json

HELD_OUT, DECODED = "held-out answers", "decoded answers"  # Sources of measurements
VERSION = 1  # Version of the file's layout
LONGEST_CHAIN = 8  # Longest chain whose acceptance is counted on held-out answers
FIRST_LENGTH = 128  # Tokens of the first group of context lengths; each further one ends at twice as many
UNMEASURED = ("nothing was decoded with this draft yet; draftsmith evaluate measures it, and writes acceptance.json "
              "next to its report")


class Pass(NamedTuple):
    """One pass of the target over drafted tokens."""

    emitted: int  # Tokens it added, the target's own included
    context: int  # Tokens of the text before it
    kind: str = ""  # Category of the prompt; "" for none


def measurements(passes: Sequence[Pass], setting: Mapping[str, Any], draft_tokens: int) -> list[dict[str, Any]]:
    """Acceptance over the passes of one method at one temperature, by kind of prompt and by length of the context, at
    each position up to the longest draft; none without passes. Every record repeats the setting in which they were
    made."""
    groups: dict[tuple[str, str], list[Pass]] = {("all", "all"): list(passes)} if passes else {}
    for one in passes:
        low, high = 0, FIRST_LENGTH
        while one.context >= high:
            low, high = high, 2 * high
        groups.setdefault(("context_tokens", f"{low}-{high - 1}"), []).append(one)
        if one.kind:
            groups.setdefault(("kind", one.kind), []).append(one)
    found = list[dict[str, Any]]()
    for (name, value), group in groups.items():
        # A position that no pass reached has no conditional rate.
        reached = [len(group), *(sum(one.emitted > at for one in group) for at in range(1, draft_tokens + 1))]
        found.append({
            **setting, "draft_tokens": draft_tokens, "group": name, "value": value, "drafts": len(group),
            "accepted_length": sum(one.emitted for one in group) / len(group),
            "unconditional": [count / len(group) for count in reached[1:]],
            "conditional": [after / before if before else None for before, after in pairwise(reached)]})
    return found


def chain_measurements(text: RankedText) -> list[dict[str, Any]]:
    """Acceptance of chains of each length as decoding counts it, along held-out greedy answers that chose
    no checkpoint."""
    found = []
    for length in range(1, min(text.ranks_PK.shape[1], LONGEST_CHAIN) + 1):
        starts_S, emitted = text.walk(Topology.chain(length))
        passes = [Pass(*one) for one in zip(emitted, (text.roots_P[starts_S] + 1).tolist(), strict=True)]
        setting = {"method": f"chain-{length}", "chain": True, "nodes": length + 1, "temperature": 0.0,
                   "answers": len(set(text.rows_P[starts_S].tolist())), "source": HELD_OUT}
        found += measurements(passes, setting, length)
    return found


def profile(facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of acceptance.json, from `family`, `target` (its name) and `weights_sha256` of the artifact, and
    records of `measurements` and `chain_measurements`."""
    # What an engine simulates is a chain; of several sources the answers that were decoded count.
    chains = {one["draft_tokens"]: one for one in sorted(records, key=lambda one: one["source"], reverse=True)
              if one["chain"] and one["group"] == "all" and one["temperature"] == 0}
    rates = {count: [round(rate, 4) for rate in one["unconditional"]] for count, one in sorted(chains.items())}
    return {"format_version": VERSION, **facts, "measurements": list(records),
            **({} if records else {"note": UNMEASURED}),
            "vllm": [{"num_speculative_tokens": count, "rejection_sample_method": "synthetic",
                      "synthetic_acceptance_rates": each} for count, each in rates.items()],
            "llama_cpp": [["--spec-draft-n-max", str(count), "--spec-synthetic-acceptance-rates",
                           ",".join(map(str, each))] for count, each in rates.items()]}


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of `profile` from config.json of an artifact."""
    return {"family": config["family"], "target": config["target"]["name"], "weights_sha256": config["weights_sha256"]}


def save_acceptance(folder: Path, facts: Mapping[str, Any], records: Iterable[Mapping[str, Any]],
                    keep: str = HELD_OUT) -> Path:
    """Write acceptance.json of a folder with facts of `profile`; returns its path. The records replace those before,
    but for former ones of the same artifact from the source `keep`."""
    former = read_acceptance(folder)
    kept = [one for one in former.get("measurements", ()) if one["source"] == keep
            ] if former.get("weights_sha256") == facts["weights_sha256"] else []
    return write_file(folder / ACCEPTANCE, as_json(profile(facts, [*kept, *records])))


def read_acceptance(folder: Path) -> dict[str, Any]:
    """acceptance.json of a folder; empty if it has none. Raises UserError if it is damaged."""
    path = folder / ACCEPTANCE
    return read_object(path, f"delete it, or {AGAIN}") if path.is_file() else {}


def held_out_length(folder: Path, draft_tokens: int) -> float | None:
    """Tokens of a pass on held-out answers with chains of so many tokens, by acceptance.json of a folder; None where it
    does not know. Raises UserError if the file is damaged."""
    return next((float(one["accepted_length"]) for one in read_acceptance(folder).get("measurements", ())
                 if one["source"] == HELD_OUT and one["chain"] and one["group"] == "all"
                 and one["draft_tokens"] == draft_tokens), None)


def acceptance_lines(found: Mapping[str, Any]) -> list[str]:
    """Sentences for a card: acceptance by position, with the number of drafts and the setting."""
    whole = [one for one in found.get("measurements", ()) if one["group"] == "all"]
    # Of the chains that held-out answers give, the longest says all.
    longest = max((one["draft_tokens"] for one in whole if one["source"] == HELD_OUT), default=0)
    lines = [f"* {one['method']} at temperature {one['temperature']:g}: {one['accepted_length']:.2f} tokens per target "
             f"pass over {one['drafts']:,} drafts; accepted at each position "
             f"{', '.join(f'{rate:.0%}' for rate in one['unconditional'])}, after accepted ones "
             f"{', '.join('-' if rate is None else f'{rate:.0%}' for rate in one['conditional'])} ({one['source']})"
             for one in whole if one["source"] != HELD_OUT or one["draft_tokens"] == longest]
    return ["## Acceptance", "\n".join(lines) or f"* {UNMEASURED}",
            f"`{ACCEPTANCE}` has it by kind of prompt and length of the context, and as the options with which vLLM "
            "and llama.cpp simulate acceptance."]
