"""One case of every policy, and what they need to grow a tree."""

import torch
from draftsmith.modules import (
    DySpecTree,
    Eagle2Tree,
    Medusa,
    MedusaConfig,
    PathProbability,
    Policy,
    SampledChain,
    StaticTree,
    StoppedChain,
    Target,
    Topology,
)
from support.tree_shapes import branching


def medusa(target: Target) -> Medusa:
    heads = Medusa.create(MedusaConfig(num_heads=3), target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    return heads


EVERY: list[Policy] = [StaticTree(Topology((-1, 0, 0, 1, 3), (0, 0, 1, 0, 1))), Eagle2Tree(9, 6, 4),
                       DySpecTree(9, 6, 4), branching(2, 2, 1), StoppedChain(5, PathProbability(0.02), check_every=0),
                       SampledChain(5, PathProbability(0.02), check_every=0)]
