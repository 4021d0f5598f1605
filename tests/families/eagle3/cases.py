"""EAGLE-3, EAGLE-3.1 and EAGLE-4, also with more layers or another width."""

import torch
from draftsmith.modules import Eagle3, Eagle3Config
from support.cases import IDS, Case, case


def _eagle3(config: Eagle3Config, ids: torch.Tensor | None = None) -> Case:
    return case(Eagle3, config, ids, objective="hard")


CASES = {
    "eagle3": _eagle3(Eagle3Config(steps=3)),
    "eagle3-shared": _eagle3(Eagle3Config(steps=2, taps=(1,), output="shared", norm_output=True)),
    "eagle3.1": _eagle3(Eagle3Config(steps=3, fc_norm=True, norm_output=True)),
    "eagle3-norms": _eagle3(Eagle3Config(steps=3, norm_before_fc=True, norm_before_residual=True, norm_output=True)),
    "eagle3-layers": _eagle3(Eagle3Config(steps=3, num_layers=2, vocabulary_size=len(IDS)), IDS),
    "eagle3-narrow": _eagle3(Eagle3Config(steps=3, fc_norm=True, hidden_size=24)),
    "eagle3-window": _eagle3(Eagle3Config(steps=3, num_layers=2, window=6, qk_norm=True)),
    # A head is trained for a finished draft: no test of all families reads the artifact that it names.
    "eagle4": case(Eagle3, Eagle3Config(steps=3, fc_norm=True, norm_output=True, head_rank=12, candidates=40),
                   start="a finished draft"),
    "eagle3-reduced": _eagle3(Eagle3Config(steps=4, vocabulary_size=len(IDS)), IDS),
}
