"""Bigram drafters."""

from draftsmith.modules.drafters.bigram import BigramConfig
from draftsmith.trainers.drafters.bigram import BigramModule, BigramTrainConfig
from support.cases import IDS, case

CASES = {
    "bigram": case(BigramModule, BigramTrainConfig, BigramConfig()),
    "bigram-own": case(BigramModule, BigramTrainConfig, BigramConfig(own_output=True)),
    "bigram-reduced": case(BigramModule, BigramTrainConfig, BigramConfig(width=16, vocabulary_size=len(IDS)), IDS),
}
