"""Hydra heads, and Hydra++."""

from draftsmith.modules import Hydra, HydraConfig
from support.cases import IDS, case

CASES = {
    "hydra": case(Hydra, HydraConfig(num_heads=3)),
    "hydra-copy-reduced": case(Hydra, HydraConfig(
        num_heads=2, num_layers=3, tie_blocks=False, output="copy", vocabulary_size=len(IDS)), IDS),
    "hydra-one-copy": case(Hydra, HydraConfig(num_heads=2, output="one_copy", vocabulary_size=len(IDS)), IDS),
    "hydra++-window": case(Hydra, HydraConfig(num_heads=2, prefix=True, window=3)),
    "hydra++": case(Hydra, HydraConfig(num_heads=3, num_layers=4, prefix=True, dropout=0.1)),
}
