"""Falcon with blocks of several sizes."""

import torch
from draftsmith.modules import Falcon, FalconConfig
from support.cases import IDS, Case, case


def _falcon(config: FalconConfig, ids: torch.Tensor | None = None) -> Case:
    # The cycle is not the target's own text: its distributions and states do not help.
    return case(Falcon, config, ids, objective="hard", feature_weight=0.0)


CASES = {
    "falcon": _falcon(FalconConfig()),
    "falcon-blocks-reduced": _falcon(FalconConfig(block_size=3, blocks=2, noise=0.1, vocabulary_size=len(IDS)), IDS),
    "falcon-window": _falcon(FalconConfig(blocks=2, window=6)),
    "falcon-official": _falcon(FalconConfig(block_size=4, rope_base=10_000.0)),
}
