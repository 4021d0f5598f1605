"""Small artifacts, and changes to their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from draftsmith.export import Tuning
from draftsmith.modules import CostCurve, CostTable, Counted, Target, Topology, Trial
from draftsmith.modules.families.medusa.drafter import Medusa, MedusaConfig

TREE = Topology.from_paths([(0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0), (1, 0)])


def heads(target: Target, *, seed: int = 0, **settings: object) -> Medusa:
    """Medusa heads whose weights are not their initial ones."""
    size = settings.get("vocabulary_size")
    ids = None if size is None else torch.arange(3, 3 + int(str(size)))
    drafter = Medusa.create(MedusaConfig(**{"num_heads": 3, **settings}), target, ids)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return drafter


def edit(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def trial(policy: str, length: float, nodes: float | None = None, reported: float | None = None) -> Trial:
    """A way that was tried: the tokens of a pass, and the mean nodes of one, those of its name where none are given."""
    counted = Counted(accepted_length=length, nodes=nodes or float(policy.partition("-")[2].partition("+")[0]))
    return Trial(policy=policy, chosen=counted,
                 reported=None if reported is None else replace(counted, accepted_length=reported))


def costs(*, node: float = 0.01, draft: float = 0.01, many: float = 0.8) -> CostTable:
    """A pass of one row takes 0.1 s and `node` more for each further token, one of several rows `many` more."""
    sizes = (1, 2, 4, 8)
    few, more = (CostCurve(batch=batch, sizes=sizes, pass_seconds=tuple(0.1 + each * (size - 1) for size in sizes),
                           draft_seconds=(0.0, draft, draft, draft)) for batch, each in ((1, node), (16, many)))
    return CostTable(curves=(few, more), copy_seconds=0.001)


def tuning(*trials: Trial, **changes: Any) -> Tuning:
    """Tuning with which a tree of four nodes is the fastest alone, or with what was tried."""
    found = trials or (trial("static-2", 1.2), trial("static-4", 1.6))
    return Tuning(**{"device": "cpu, 2 threads", "dtype": "float32", "cost": costs(), "greedy": found, **changes})


def copies() -> tuple[Trial, ...]:
    """A tree of four nodes alone, and next to copies, which are faster."""
    return (trial("static-2", 1.2), trial("static-4", 1.6), trial("static-2+lookup-7", 1.9, 4.0),
            trial("static-4+lookup-7", 2.9, 5.0))
