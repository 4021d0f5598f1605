"""P-EAGLE drafters."""

from draftsmith.modules import PEagle, PEagleConfig
from support.cases import IDS, case

CASES = {
    "p-eagle": case(PEagle, PEagleConfig(steps=3, num_layers=2), objective="hard"),
    "p-eagle-reduced": case(PEagle, PEagleConfig(steps=4, num_layers=1, vocabulary_size=len(IDS), fc_norm=True,
                                                 mask_token_id=4, window=7), IDS, objective="hard"),
}
