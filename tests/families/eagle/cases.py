"""EAGLE-1, also trained by HASS and with FSPAD's changes."""

import torch
from draftsmith.modules import Eagle, EagleConfig
from support.cases import IDS, Case, case


def _eagle(config: EagleConfig, ids: torch.Tensor | None = None) -> Case:
    # The cycle is not the target's own text: its distributions and states do not help. A state that only the feature
    # loss trains needs it all the same.
    weight = float(config.partial_alignment)
    return case(Eagle, config, ids, objective="hard", feature_weight=weight)


CASES = {
    "eagle": _eagle(EagleConfig()),
    "eagle-hass-reduced": _eagle(EagleConfig(steps=3, bias=False, noise=0.1, vocabulary_size=len(IDS)), IDS),
    "eagle-sampling": _eagle(EagleConfig(feature_sampling=True)),
    "eagle-partial": _eagle(EagleConfig(partial_alignment=True, steps=2)),
    "eagle-fspad-reduced": _eagle(EagleConfig(feature_sampling=True, partial_alignment=True,
                                              vocabulary_size=len(IDS)), IDS),
}
