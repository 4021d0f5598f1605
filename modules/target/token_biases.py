"""Biases of single tokens in transformers' `generate`: what it adds to their logits before it penalises and samples.

Shapes: B rows, M nodes, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import UserError
from ..number_formats import widened

NEVER = -float("inf")


@dataclass(frozen=True, kw_only=True)
class TokenBiases:
    """Tokens that are made likelier, unlikelier or impossible, everywhere or at the start of an answer."""

    added: tuple[tuple[int, float], ...] = ()  # Tokens and what is added to their logits; -inf rules one out
    not_first: tuple[int, ...] = ()  # Tokens that begin no answer
    least_tokens: int = 0  # Tokens of an answer before which no end token comes

    @classmethod
    def of(cls, settings: Mapping[str, Any], eos_ids: tuple[int, ...], vocab_size: int, prompt: int = 0) -> Self:
        """The biases of a generation config's settings, of which `offered` says yes. `bad_words_ids` does not rule out
        the end tokens, and `min_length` counts the tokens of the `prompt`. UserError if `sequence_bias` or
        `bad_words_ids` names a token that the target has not."""
        found: dict[int, float] = {}
        bias = settings.get("sequence_bias") or {}
        for tokens, value in bias.items() if isinstance(bias, Mapping) else bias:
            found[tokens[0]] = float(value)
        banned = [token for token, in settings.get("bad_words_ids") or () if token not in eos_ids]
        found |= dict.fromkeys(banned, NEVER)
        if unknown := [token for token in found if not 0 <= token < vocab_size]:
            raise UserError(f"sequence_bias or bad_words_ids names the token {unknown[0]}, and the target has "
                            f"{vocab_size} tokens, from 0; remove it")
        # generate passes over tokens that the target has not in its other lists.
        suppressed, not_first = (tuple(token for token in settings.get(name) or () if 0 <= token < vocab_size)
                                 for name in ("suppress_tokens", "begin_suppress_tokens"))
        found |= dict.fromkeys(suppressed, NEVER)
        least = max(settings.get("min_new_tokens") or 0, (settings.get("min_length") or 0) - prompt)
        return cls(added=tuple(found.items()), not_first=not_first, least_tokens=least)

    @staticmethod
    def offered(name: str, value: Any) -> bool:
        """True for a setting that these biases hold: of words, those of one token; more depend on the text before."""
        if name in ("sequence_bias", "bad_words_ids"):
            return all(len(one if name == "bad_words_ids" or isinstance(value, Mapping) else one[0]) == 1
                       for one in value)
        return name in ("suppress_tokens", "begin_suppress_tokens", "min_new_tokens", "min_length")

    def of_generate(self) -> dict[str, Any]:
        """The arguments of `generate` that ask for the same."""
        asked = {"sequence_bias": {(token,): value for token, value in self.added} or None,
                 "begin_suppress_tokens": list(self.not_first) or None, "min_new_tokens": self.least_tokens or None}
        return {name: value for name, value in asked.items() if value is not None}


class AppliedBiases:
    """The biases of all rows as tensors, which a replayed pass reads where they are."""

    def __init__(self, biases: TokenBiases, eos_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> None:
        self.least = biases.least_tokens
        self.added_V = torch.zeros(vocab_size)
        self.not_first_V, self.ends_V = (torch.zeros(vocab_size, dtype=torch.bool) for _ in range(2))
        for token, value in biases.added:
            self.added_V[token] = value
        self.not_first_V[list(biases.not_first)] = True
        self.ends_V[[token for token in eos_ids if token < vocab_size]] = True
        self.added_V, self.not_first_V, self.ends_V = (
            one_V.to(device) for one_V in (self.added_V, self.not_first_V, self.ends_V))

    def add(self, logits_BMV: Tensor, places_BM: Tensor) -> Tensor:
        """The logits [B, M, V] in float32 or wider with the biases added; `places_BM` are the places of the next tokens
        in their answers, from 0."""
        ruled_out_BMV = ((places_BM < 1)[..., None] & self.not_first_V) | (
            (places_BM < self.least)[..., None] & self.ends_V)
        return (widened(logits_BMV) + self.added_V).masked_fill(ruled_out_BMV, NEVER)
