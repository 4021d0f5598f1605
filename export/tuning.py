"""tuning.json: measurements that one machine made with an artifact."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..modules import JOINED, STATIC, CopySizing, CostModel, Target, choose_size
from ..modules.atomic_files import write_file
from ..modules.json_records import read_record
from .artifact_files import TUNING, as_json


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Measurements of one machine; may be absent, and another machine makes its own."""

    device: str
    """Device the passes ran on, as text: "cpu, 2 threads"."""
    dtype: str
    """Number format of the target, such as float32."""
    tree_size: int
    """Nodes of the tree that decode one greedy row fastest here, root included; a prefix of the artifact's tree."""
    cost: CostModel
    """Seconds of target passes and of drafting, by the size of the tree, the batch and the context."""
    expected_accepted_length: tuple[float, ...] = ()
    """Estimated tokens per pass for a tree of 1, 2, 3 ... nodes, greedy; empty when it was not computed."""
    expected_sampled: tuple[float, ...] = ()
    """The same at temperature 1, used for all temperatures above 0; empty when it was not computed."""
    given: bool = False
    """Whether the recipe sets the size: every batch size then uses it, otherwise each has its own."""
    copying: CopySizing | None = None
    """Copied chains next to the tree, replayed on held-out answers; None when they were not."""
    fastest: str = STATIC
    """Policy that is predicted to decode one greedy row fastest here: static or static+lookup. None is chosen by it."""

    def __post_init__(self) -> None:
        if self.tree_size < 1:
            raise ValueError(f"tree_size must be at least 1, got {self.tree_size}")
        for name in ("expected_accepted_length", "expected_sampled"):
            # What each pass emits includes the target's own token.
            if (least := min(getattr(self, name), default=1.0)) < 1:
                raise ValueError(f"the lengths of {name} must be at least 1, got {least}")
        if self.fastest not in (STATIC, JOINED):
            raise ValueError(f"fastest must be {STATIC} or {JOINED}, got {self.fastest!r}")

    @classmethod
    def of(cls, target: Target, tree_size: int, cost: CostModel, expected: Sequence[float] = (), *,
           given: bool = False) -> "Tuning":
        """The measurements made with `target`, with the name of its device."""
        threads = f", {torch.get_num_threads()} threads" if target.device.type == "cpu" else ""
        return cls(device=f"{target.device.type}{threads}", dtype=str(target.dtype).removeprefix("torch."),
                   tree_size=tree_size, cost=cost, expected_accepted_length=tuple(expected), given=given)

    def size_for(self, batch_size: int, temperature: float = 0.0) -> int:
        """Nodes of the tree that decode `batch_size` rows fastest: 1 where drafting does not pay."""
        sampled = self.expected_sampled if temperature > 0 else ()
        lengths = sampled or self.expected_accepted_length
        if self.given or not lengths or (batch_size == 1 and not sampled):
            return self.tree_size
        return choose_size(lengths, self.cost.curve(batch_size)).size

    def with_copies(self, sizing: CopySizing) -> "Tuning":
        """The same with the trials of copied chains, and the policy that they predict to be the fastest."""
        return replace(self, copying=sizing, fastest=JOINED if sizing.pays(self.cost) else STATIC)


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
