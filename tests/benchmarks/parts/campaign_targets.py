"""Tiny random targets of the lossless campaign, one whose answers can be enumerated, and the outcome of a cell."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from draftsmith.modules import DecodeResult, Target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from support.targets import random_model, random_trait, recurrent_model


@dataclass
class Outcome:
    """Counts of one cell."""

    tokens: int = 0  # Tokens compared, or sampled
    divergences: int = 0  # Answers that differ and must not, or sampled answers that the target cannot give
    drafted: int = 0  # Tokens of passes after the prompts'
    passes: int = 0  # Such passes of single rows
    p: float | None = None  # Probability of a G as large by chance; None where nothing is left to chance
    seconds: float = 0.0  # Wall-clock time
    note: str = ""  # Description of the fault; empty where there is none

    @property
    def wrong(self) -> bool:
        """True if an answer differs."""
        return self.divergences > 0

    def count(self, result: DecodeResult) -> None:
        """Add the tokens and passes of a run."""
        self.tokens += sum(len(generation.tokens) for generation in result.generations)
        self.drafted += sum(sum(generation.emitted) for generation in result.generations)
        self.passes += sum(generation.passes for generation in result.generations)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Phi": {},
    "Phi3": {"sliding_window": None},
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPT2": {},
    "Olmo2": {},
    "StableLm": {},
    "Granite": {},
    "Cohere": {},
    "Starcoder2": {"sliding_window": None},
}
"""Names in transformers, and what differs from a Llama's configuration."""
RECURRENT_TARGETS = ("Qwen3_5Text", "NemotronH", "Lfm2", "KimiLinear")
"""Those with recurrent layers, in float32: their own code takes no other number format that is as wide."""
TRAIT_TARGETS = ("gpt-oss", "deepseek-v3", "gemma4", "llama4")
"""Those with sinks, latent attention, layers of unlike shape, and chunks."""
VOCABULARY = 8  # Tokens of the target whose answers are enumerated


def build(name: str, **changes: Any) -> Target:
    """A random target of an architecture."""
    with torch.random.fork_rng(devices=[]):
        if name in RECURRENT_TARGETS:
            model = recurrent_model(name, max_position_embeddings=256)
        elif name in TRAIT_TARGETS:
            model = random_trait(name, torch.float64, max_position_embeddings=256)
        else:
            model = random_model(name, max_position_embeddings=256, **ARCHITECTURES[name] | changes).double()
    return Target(model, tiny_tokenizer(), name=name)


@cache
def target_of(name: str) -> Target:
    """The same, kept."""
    return build(name)


@lru_cache(maxsize=8)
def enumerable_target(temperature: float) -> Target:
    """A Llama of eight tokens whose distribution at a temperature is the same whatever the temperature.

    A low temperature would leave nothing to chance, and a test of chance blind.
    """
    target = build("Llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        target.head.weight.mul_(0.5 * temperature)
    return target
