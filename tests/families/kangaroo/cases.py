"""Kangaroo with the whole and with a reduced vocabulary."""

from dataclasses import replace

import torch
from draftsmith.modules import Kangaroo, KangarooConfig
from support.cases import IDS, Case, case


def _kangaroo(config: KangarooConfig, ids: torch.Tensor | None = None) -> Case:
    # The cycle is not the target's own text: its distributions do not help. The adapter has no MLP and learns slowly.
    return replace(case(Kangaroo, config, ids, objective="hard"), steps=280)


CASES = {
    "kangaroo": _kangaroo(KangarooConfig()),
    "kangaroo-reduced": _kangaroo(KangarooConfig(vocabulary_size=len(IDS), rope_base=None), IDS),
}
