"""tuning.json: measurements that one machine made with an artifact."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..modules import JOINED, NONE, SIZING_TEMPERATURE, STATIC, CostTable, Target, Trial
from ..modules.files.atomic_files import write_file
from ..modules.files.json_records import read_record
from ..modules.policies.registry import MOST
from ..modules.target.linear_forms import Packing
from .artifact_files import TUNING, as_json


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
    """Nodes of the draft's tree that the recipe sets for every batch size and temperature; None where each has its own.
    """
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
        """Ways that were tried for rows at a temperature, of one kind or all; none above SIZING_TEMPERATURE, where less
        is accepted."""
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
    """tuning.json of an artifact; None if nothing was measured yet.

    Raises:
        UserError: if the file is damaged.
    """
    path = folder / TUNING
    if not path.is_file():
        return None
    return read_record(Tuning, path, "delete it, it will be measured again")
