"""Small artifacts, and changes to their files."""

import json
from pathlib import Path

import torch
from draftsmith.export import Tuning
from draftsmith.modules import CopySizing, CopyTrial, CostModel, Target, Topology
from draftsmith.modules.drafters.medusa import Medusa, MedusaConfig

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


def tuning(size: int = 4) -> Tuning:
    """Tuning for a tree of `size` nodes."""
    cost = CostModel(knots=(1, 8), pass_weights=(0.1, 0.01, 0.05, 0.0, 0.0), largest=8, context=32, pass_error=0.01,
                     draft_weights=(0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), draft_error=0.02)
    return Tuning(device="cpu, 2 threads", dtype="float32", tree_size=size, cost=cost,
                  expected_accepted_length=(1.0, 1.2, 1.3))


def copies(size: int = 4) -> CopySizing:
    """Trials next to a tree of `size` nodes: seven copied tokens in five more nodes are the fastest."""
    def trial(copied: int, extra: int, length: float, nodes: float) -> CopyTrial:
        return CopyTrial(copied=copied, extra=extra, accepted_length=length, nodes=nodes)

    return CopySizing(tree_size=size, alone=trial(0, 0, 1.3, size), copy_seconds=0.001,
                      trials=(trial(4, 1, 1.4, size), trial(7, 5, 2.9, size + 1.0)))
