"""Bigram drafters."""

from draftsmith.modules.families.bigram.drafter import Bigram, BigramConfig
from support.cases import IDS, case

CASES = {
    "bigram": case(Bigram, BigramConfig()),
    "bigram-own": case(Bigram, BigramConfig(own_output=True)),
    "bigram-reduced": case(Bigram, BigramConfig(width=16, vocabulary_size=len(IDS)), IDS),
}
