"""Files of an artifact with what was measured of it: tuning.json, by one machine, and acceptance.json, how many drafted
tokens the target accepts, for capacity planners and engines that simulate it.

Acceptance is counted on answers of the target: on those of evaluations as they were decoded, and on held-out greedy
answers along which passes of a chain are walked, which gives what decoding them with that chain counts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..modules import JOINED, NONE, SIZING_TEMPERATURE, STATIC, CostTable, RankedText, Target, Topology, Trial
from ..modules.files.atomic_files import write_file
from ..modules.files.json_records import read_object, read_record
from ..modules.policies.registry import MOST
from ..modules.target.linear_forms import Packing
from .stored_drafter import ACCEPTANCE, AGAIN, TUNING, as_json

HELD_OUT, DECODED = "held-out answers", "decoded answers"  # Sources of measurements
VERSION = 1  # Version of the layout of acceptance.json
LONGEST_CHAIN = 8  # Longest chain whose acceptance is counted on held-out answers
FIRST_LENGTH = 128  # Tokens of the first group of context lengths; each further one ends at twice as many
UNMEASURED = ("nothing was decoded with this draft yet; draftsmith evaluate measures it, and writes acceptance.json "
              "next to its report")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Figures that are predicted of decoding on this machine, by held-out answers and measured seconds."""

    speedup: float  # Speed-up over this loop without drafts
    accepted_length: float  # Tokens per pass after that over the prompt, the bonus included
    interval: tuple[float, float] | None = None
    """90 % interval of the tokens per pass by the answers; None where there are too few that did not choose."""

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """90 % interval of the speed-up by the answers."""
        if self.interval is None:
            return None
        low, high = (self.speedup * end / self.accepted_length for end in self.interval)
        return low, high


def figures(found: Prediction | None, prefix: str = "") -> dict[str, Any]:
    """A prediction with its intervals, as JSON files name its parts; None where nothing is predicted."""
    parts = {"speedup": "speedup", "speedup_interval": "speedup_interval", "accepted_length": "accepted_length",
             "accepted_length_interval": "interval"}
    return {prefix + name: found and getattr(found, part) for name, part in parts.items()}


PLAIN = Prediction(speedup=1.0, accepted_length=1.0)  # Decoding without drafts


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Measurements of one machine; may be absent, and another machine makes its own."""

    device: str  # Device the passes ran on, as text: "cpu, 2 threads"
    dtype: str  # Number format of the target, such as float32
    cost: CostTable  # Seconds of target passes and of drafting
    greedy: tuple[Trial, ...] = ()
    """Ways of drafting that were tried on greedy answers; empty where there were none, and the whole tree is used."""
    sampled: tuple[Trial, ...] = ()
    """The same of answers drawn at SIZING_TEMPERATURE; empty where there were none: such rows are decoded plainly."""
    used_nodes: int | None = None
    """Nodes of the draft's tree that the recipe sets for all batch sizes and temperatures; None: each has its own."""
    linear_layers: Packing | None = None
    """Forms of the target's linear layers with which the seconds were measured, and why; None if not recorded."""

    def __post_init__(self) -> None:
        if self.used_nodes is not None and not 1 <= self.used_nodes <= MOST:
            raise ValueError(f"used_nodes must lie between 1 and {MOST}, got {self.used_nodes}")

    @classmethod
    def of(cls, target: Target, cost: CostTable, greedy: tuple[Trial, ...] = (), sampled: tuple[Trial, ...] = (), *,
           used_nodes: int | None = None) -> "Tuning":
        """The measurements made with `target`, with the name of its device."""
        # The time of a pass depends on the threads as much as on the device.
        count = torch.get_num_threads()
        threads = f", {count} thread{'s' * (count > 1)}" if target.device.type == "cpu" else ""
        return cls(device=f"{target.device.type}{threads}", dtype=str(target.dtype).removeprefix("torch."), cost=cost,
                   greedy=greedy, sampled=sampled, used_nodes=used_nodes, linear_layers=target.linears.packing)

    def made_with(self, target: Target) -> bool:
        """True if the seconds are those of this target's device and number format."""
        here = Tuning.of(target, self.cost)
        return (here.device, here.dtype) == (self.device, self.dtype)

    def trials(self, temperature: float, kind: str | None = None) -> list[Trial]:
        """Ways tried for rows at a temperature, of one kind or all; none above SIZING_TEMPERATURE: less is accepted."""
        every = self.greedy if temperature == 0 else self.sampled if temperature <= SIZING_TEMPERATURE else ()
        return [one for one in every if kind in (None, one.kind)]

    def best(self, kind: str, batch_size: int = 1, temperature: float = 0.0) -> Trial | None:
        """The way of a kind that decodes such rows fastest; None where none is known to be faster than no draft."""
        asked = self.used_nodes is not None
        tried = [one for one in self.trials(temperature, kind) or (self.trials(0.0, kind) if asked else [])
                 if asked or one.judged(self.cost, batch_size)]
        found = max(tried, key=lambda one: one.speedup(self.cost, batch_size), default=None)
        return found if found is not None and (asked or found.pays(self.cost, batch_size)) else None

    def fastest(self, batch_size: int = 1, temperature: float = 0.0) -> str:
        """The policy that decodes such rows fastest: static, static+lookup, or none."""
        found = [one for kind in (STATIC, JOINED) if (one := self.best(kind, batch_size, temperature)) is not None]
        if not found:
            return STATIC if self.size_for(batch_size, temperature) > 1 else NONE
        return max(found, key=lambda one: one.speedup(self.cost, batch_size)).kind

    def size_for(self, batch_size: int = 1, temperature: float = 0.0) -> int:
        """Nodes of the tree alone that decodes such rows fastest, root included; 1 where none is known to."""
        if self.used_nodes is not None:
            return self.used_nodes
        # Where nothing was tried, the whole tree.
        found = self.best(STATIC, batch_size, temperature)
        return found.nodes if found is not None else 1 if temperature or self.greedy else MOST

    def prediction(self, policy: str, batch_size: int = 1, temperature: float = 0.0) -> Prediction | None:
        """The figures of static, static+lookup, or such with numbers that were tried; None where none are known."""
        known = self.trials(temperature)
        found = (self.best(policy, batch_size, temperature) if policy in (STATIC, JOINED) else
                 next((one for one in known if one.policy == policy), None))
        if found is None:
            return PLAIN if policy in (STATIC, JOINED) and self.trials(temperature, policy) else None
        # Answers that chose it promise too much, and have no interval.
        shown = found.reported or found.chosen
        return Prediction(speedup=found.speedup(self.cost, batch_size, shown), accepted_length=shown.accepted_length,
                          interval=None if found.reported is None else shown.interval)


def save_tuning(folder: Path, tuning: Tuning) -> Path:
    """Write or replace tuning.json of an artifact; returns its path."""
    return write_file(folder / TUNING, as_json(asdict(tuning)))


def read_tuning(folder: Path) -> Tuning | None:
    """tuning.json of an artifact; None if nothing was measured yet. Raises UserError if it is damaged."""
    path = folder / TUNING
    return read_record(Tuning, path, "delete it, it will be measured again") if path.is_file() else None


# Acceptance -----------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One pass of the target over drafted tokens."""

    emitted: int  # Tokens it added, the target's own included
    context: int  # Tokens of the text before it
    kind: str = ""  # Category of the prompt; "" for none


def measurements(passes: Sequence[Pass], setting: Mapping[str, Any], draft_tokens: int) -> list[dict[str, Any]]:
    """Acceptance over the passes of one method at one temperature, by kind of prompt and by length of the context, at
    each position up to the longest draft; none without passes. Every record repeats their setting."""
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
    """Acceptance of chains of each length as decoding counts it, along held-out answers that chose no checkpoint."""
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
