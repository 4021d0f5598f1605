"""Hydra heads, and Hydra++."""

from draftsmith.modules import HydraConfig
from draftsmith.trainers.drafters.hydra import HydraModule, HydraTrainConfig
from support.cases import IDS, case

CASES = {
    "hydra": case(HydraModule, HydraTrainConfig, HydraConfig(num_heads=3)),
    "hydra-copy-reduced": case(HydraModule, HydraTrainConfig, HydraConfig(
        num_heads=2, num_layers=3, tie_blocks=False, output="copy", vocabulary_size=len(IDS)), IDS),
    "hydra-one-copy": case(HydraModule, HydraTrainConfig, HydraConfig(
        num_heads=2, output="one_copy", vocabulary_size=len(IDS)), IDS),
    "hydra++": case(HydraModule, HydraTrainConfig, HydraConfig(num_heads=3, num_layers=4, prefix=True, dropout=0.1)),
}
