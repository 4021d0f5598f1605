"""Draft language models: token by token, over few tokens, with mask tokens, with the target's states."""

from draftsmith.modules import DraftLM, DraftLMConfig
from support.cases import IDS, case

CASES = {
    "draft-lm": case(DraftLM, DraftLMConfig(num_layers=2, hidden_size=24)),
    "draft-lm-reduced": case(DraftLM, DraftLMConfig(
        layers=(0, 1), vocabulary_size=len(IDS), freeze_embedding=True), IDS),
    "draft-lm-window": case(DraftLM, DraftLMConfig(num_layers=2, hidden_size=24, window=4)),
    "draft-lm-depths": case(DraftLM, DraftLMConfig(num_layers=2, hidden_size=32, depths=3)),
    "draft-lm-taps": case(DraftLM, DraftLMConfig(num_layers=2, hidden_size=32, depths=3, taps=(0,))),
}
