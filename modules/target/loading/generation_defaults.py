"""The part of a checkpoint's generation config that decides the answers of transformers' `generate`.

Decoding promises the answer that `generate` gives with the same settings, so every setting of the config that
`generate` would apply unasked has one of three fates when the target is loaded:

1. Applied: the end tokens, and biases of tokens and of sequences, n-grams that must not come again, and forced tokens,
   as `generate` applies them to logits before it samples. Where the config declares no end token, `generate` is
   normally given the tokenizer's; so is decoding.
2. Left to the caller: repetition penalty, temperature, top-k, top-p and min-p, in this order as in `generate`. They
   are fields of `DecodeSettings` and `Request`, whose defaults are neutral. A repetition penalty changes greedy answers
   as well, so one in the config is logged as a warning.
3. Refused by name: everything else that would change the answer. Filters of sampled answers are refused where the
   config samples by default; in a greedy config `generate` does not apply them either.

Settings that change no answer (of the cache, of assisted generation, of what `generate` returns, the length limits that
a request states itself) are ignored."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from transformers.generation import logits_process as native

from ...errors import UserError

log = logging.getLogger(__name__)

NEVER = -float("inf")


@dataclass(frozen=True, kw_only=True)
class TokenBiases:
    """Tokens that are made likelier, unlikelier, impossible or certain: single ones everywhere, at the start or before
    the least length, the others by the text before them."""

    added: tuple[tuple[int, float], ...] = ()  # Tokens and what is added to their logits; -inf rules one out
    not_first: tuple[int, ...] = ()  # Tokens that begin no answer
    least_tokens: int = 0  # Tokens of an answer before which no end token comes
    sequences: tuple[tuple[tuple[int, ...], float], ...] = ()  # The same as `added` for the last of several tokens
    no_repeat_ngram_size: int = 0  # Tokens of the n-grams that occur once at most, the prompt included; 0 is none
    forced_last: tuple[int, ...] = ()  # One of these is the last token of an answer of full length

    @classmethod
    def of(cls, settings: Mapping[str, Any], eos_ids: tuple[int, ...], vocab_size: int, prompt: int = 0) -> Self:
        """The biases of a generation config's settings, of which `offered` says yes. `bad_words_ids` does not rule out
        the end tokens, and `min_length` counts the tokens of the `prompt`. UserError if `sequence_bias` or
        `bad_words_ids` names a token that the target has not."""
        bias = settings.get("sequence_bias") or {}
        pairs = [(tuple(tokens), float(value)) for tokens, value in (
            bias.items() if isinstance(bias, Mapping) else bias)]
        pairs += [(tuple(tokens), NEVER) for tokens in settings.get("bad_words_ids") or ()
                  if [*tokens] not in [[token] for token in eos_ids]]
        if unknown := [token for tokens, _ in pairs for token in tokens if not 0 <= token < vocab_size]:
            raise UserError(f"sequence_bias or bad_words_ids names the token {unknown[0]}, and the target has "
                            f"{vocab_size} tokens, from 0; remove it")
        found = {tokens[0]: value for tokens, value in pairs if len(tokens) == 1}
        # generate passes over tokens that the target has not in its other lists.
        suppressed, not_first = (tuple(token for token in settings.get(name) or () if 0 <= token < vocab_size)
                                 for name in ("suppress_tokens", "begin_suppress_tokens"))
        found |= dict.fromkeys(suppressed, NEVER)
        least = max(settings.get("min_new_tokens") or 0, (settings.get("min_length") or 0) - prompt)
        return cls(added=tuple(found.items()), not_first=not_first, least_tokens=least,
                   sequences=tuple(pair for pair in pairs if len(pair[0]) > 1),
                   no_repeat_ngram_size=settings.get("no_repeat_ngram_size") or 0,
                   forced_last=_ascending(settings.get("forced_eos_token_id")))

    @property
    def alone(self) -> "TokenBiases":
        """Those that need not know the text."""
        return TokenBiases(added=self.added, not_first=self.not_first, least_tokens=self.least_tokens)

    def processors(self, longest: int, device: Any) -> tuple[list[Any], list[Any]]:
        """transformers' own processors of what depends on the text, which has at most `longest` tokens: those before
        the repetition penalty, and those after it."""
        before = [native.SequenceBiasLogitsProcessor([[[*tokens], value] for tokens, value in self.sequences])
                  ] if self.sequences else []
        after: list[Any] = []
        if self.no_repeat_ngram_size:
            after.append(native.NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.forced_last:
            after.append(native.ForcedEOSTokenLogitsProcessor(longest, [*self.forced_last], str(device)))
        return before, after

    def of_generate(self) -> dict[str, Any]:
        """The arguments of `generate` that ask for the same."""
        pairs = [*(((token,), value) for token, value in self.added), *self.sequences]
        asked = {"sequence_bias": dict(pairs) or None, "no_repeat_ngram_size": self.no_repeat_ngram_size or None,
                 "forced_eos_token_id": [*self.forced_last] or None,
                 "begin_suppress_tokens": list(self.not_first) or None, "min_new_tokens": self.least_tokens or None}
        return {name: value for name, value in asked.items() if value is not None}


_CHANGES_ANSWERS: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1), "num_beam_groups": (None, 1), "penalty_alpha": (None, 0), "dola_layers": (None,),
    "constraints": (None,), "force_words_ids": (None,), "stop_strings": (None, []), "max_time": (None,),
    "token_healing": (None, False), "guidance_scale": (None, 1), "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0), "forced_bos_token_id": (None,),
    "exponential_decay_length_penalty": (None,), "watermarking_config": (None,), "remove_invalid_values": (None, False),
    "cache_implementation": (None, "dynamic", "offloaded", "static", "offloaded_static", "paged", "sliding_window",
                             "hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
}  # Settings that change greedy and sampled answers, with the values at which they do not
_CHANGES_SAMPLES: dict[str, tuple[object, ...]] = {  # The same for sampled answers alone
    "top_h": (None,), "typical_p": (None, 1), "epsilon_cutoff": (None, 0), "eta_cutoff": (None, 0)}
_UNSET_TOP_K = 50  # The top-k that `generate` samples with where a config names none


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """End tokens and sampling settings that `generate` takes from a checkpoint unasked."""

    eos_ids: tuple[int, ...] = ()  # Tokens that end an answer, ascending
    temperature: float = 0.0  # 0 where the config does not sample
    top_k: int = 0  # 0 keeps all tokens
    top_p: float = 1.0  # 1 keeps all tokens
    min_p: float = 0.0  # 0 keeps all tokens
    repetition_penalty: float = 1.0  # 1 changes nothing
    biases: TokenBiases = field(default_factory=TokenBiases)


def read_defaults(config: Any, tokenizer: Any, name: str, vocab_size: int) -> GenerationDefaults:
    """The defaults of transformers' `GenerationConfig`, or None, which is not read again. The tokenizer gives the end
    token where the config declares none. UserError if it asks for something that decoding does not offer."""
    declared = getattr(config, "eos_token_id", None)
    if declared is None:
        declared = getattr(tokenizer, "eos_token_id", None)
    if config is None:
        return GenerationDefaults(eos_ids=_ascending(declared))
    # A least length of the whole text leaves each prompt another one for its answer, which a target cannot know.
    whole = [f"min_length={config.min_length}"] if getattr(config, "min_length", None) else []
    if wrong := [*refused_settings(vars(config)), *whole]:
        raise UserError(
            f"the generation config of {name} asks generate for {', '.join(wrong)}, which changes its answers and is "
            "not offered here; remove it from generation_config.json, or choose another target")
    penalty = _given(config, "repetition_penalty", 1.0)
    if penalty != 1.0:
        log.warning("the generation config of %s has a repetition penalty of %s, which generate applies unasked; "
                    "decoding applies it where DecodeSettings has repetition_penalty=%s, draftsmith generate with "
                    "--repetition-penalty %s", name, penalty, penalty, penalty)
    return sampling_defaults(config, declared, vocab_size)


def refused_settings(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a generation config, with their values, that change answers and are not offered."""
    table = _CHANGES_ANSWERS | (_CHANGES_SAMPLES if settings.get("do_sample") else {})
    # Read with a default: which of these settings a config knows depends on the version of transformers.
    return [f"{name}={settings[name]}" for name in table
            if settings.get(name) not in table[name]]


def sampling_defaults(config: Any, declared: Any, vocab_size: int, prompt: int = 0) -> GenerationDefaults:
    """End tokens and sampling settings that `generate` takes from a config, of which nothing is refused. `declared` are
    its end tokens, or those in their place: a list, one or None; `min_length` counts the tokens of the `prompt`."""
    eos_ids, penalty = _ascending(declared), _given(config, "repetition_penalty", 1.0)
    biases = TokenBiases.of(vars(config), eos_ids, vocab_size, prompt)
    if not config.do_sample:
        return GenerationDefaults(eos_ids=eos_ids, repetition_penalty=penalty, biases=biases)
    return GenerationDefaults(eos_ids=eos_ids, temperature=_given(config, "temperature", 1.0),
                              top_k=int(_given(config, "top_k", _UNSET_TOP_K)), top_p=_given(config, "top_p", 1.0),
                              min_p=_given(config, "min_p", 0.0), repetition_penalty=penalty, biases=biases)


def _ascending(declared: Any) -> tuple[int, ...]:
    found = declared if isinstance(declared, list | tuple) else [declared]
    return tuple(sorted({int(token) for token in found if token is not None}))


def _given(config: Any, setting: str, default: float) -> float:
    value = getattr(config, setting, None)
    return default if value is None else float(value)
