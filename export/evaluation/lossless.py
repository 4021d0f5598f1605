"""The comparison of drafted answers with those of transformers' own `generate`.

Shapes: B rows, L tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from ...modules import DecodeSettings, Request, Target
from ...modules.decoding.requests import uniform_stream
from ...modules.verification.sampling import probabilities, widened
from .results import Comparison

NEAR_TIE_GAP = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Largest gap between two logits at which passes of different shapes may disagree."""
HALF_PRECISION_STEPS = 2
"""In half precision the same, in rounding steps of the best logit."""
NEAR_EDGE = {torch.float64: 1e-12, torch.float32: NEAR_TIE_GAP[torch.float32] / 4}
"""Largest distance of a uniform number outside a token's share of the distribution at which rounding explains it, at
temperature 1 and above. Logits that move against each other by the gap of a near-tie move a sum F of probabilities by
at most F (1 - F) / T times as much."""
PLAIN_SETTINGS = DecodeSettings()
"""No filter and no penalty."""
NEAR_EDGE_HALF = 0.05
"""The same in half precision."""


@contextmanager
def native_model(target: Target) -> Iterator[Any]:
    """The untouched model with a plain generation config: no repetition penalty or other setting of its checkpoint.

    Its end tokens are the target's, which were read when it was loaded; `generate` is given them.
    """
    with target.native() as model:
        own = model.generation_config
        # `generate` fills whatever it is not given from this one, so passing another config would not be enough.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        try:
            yield model
        finally:
            model.generation_config = own


@torch.no_grad()
def generate(model: Any, target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
             temperature: float = 0.0, settings: DecodeSettings = PLAIN_SETTINGS) -> list[list[int]]:
    """Answers of transformers' `generate`, end token included; several prompts are padded on the left.

    With a repetition penalty they are answered one by one: `generate` would penalise the padding's token.

    Args:
        model: what `native_model` gives.
        max_new_tokens: longest answer, in tokens.
        settings: filters and penalty.
    """
    penalised = settings.repetition_penalty != 1.0
    if penalised and len(prompts) > 1:
        return [generate(model, target, [prompt], max_new_tokens=max_new_tokens, temperature=temperature,
                         settings=settings)[0] for prompt in prompts]
    # Padded on the left, so that the new tokens of all rows stand next to their prompts.
    width = max(len(prompt) for prompt in prompts)
    pad = target.eos_ids[0] if target.eos_ids else 0
    tokens_BL = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=target.device)
    mask_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
                           device=target.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": settings.top_k, "top_p": settings.top_p}
        sampling |= {"min_p": settings.min_p} if settings.min_p else {}
    if penalised:
        sampling["repetition_penalty"] = settings.repetition_penalty
    output = model.generate(input_ids=tokens_BL, attention_mask=mask_BL, max_new_tokens=max_new_tokens,
                            eos_token_id=list(target.eos_ids) or None, pad_token_id=pad, use_cache=True, **sampling)
    answers: list[list[int]] = output[:, width:].tolist()
    for place, answer in enumerate(answers):
        # After its own end token a row is padded until the longest one ends.
        end = next((index for index, token in enumerate(answer) if token in target.eos_ids), len(answer))
        answers[place] = answer[: end + 1]
    return answers


def first_divergence(answer: Sequence[int], reference: Sequence[int]) -> int | None:
    """First index at which two answers differ; the shorter length if one continues the other; None if equal."""
    for place, (token, expected) in enumerate(zip(answer, reference, strict=False)):
        if token != expected:
            return place
    return None if len(answer) == len(reference) else min(len(answer), len(reference))


Judge = Callable[[Sequence[int], tuple[int, int]], tuple[float | None, bool]]
"""From the tokens before a first difference and the two chosen there: (logit gap, whether rounding explains it)."""


def compare(prompt: Sequence[int], answer: Sequence[int], reference: Sequence[int], judge: Judge, *,
            again: Callable[[], Sequence[int]] | None = None) -> Comparison:
    """Hold a drafted answer against its reference.

    Args:
        judge: looks at a first difference.
        again: makes the reference once more, alone and unpadded, when it came from a padded batch: padding is itself a
            change of shape that may flip a near-tie, and must not be blamed on the drafts.
    """
    if first_divergence(answer, reference) is None:
        return Comparison(divergence=None)
    reference = reference if again is None else again()
    place = first_divergence(answer, reference)
    if place is None:
        return Comparison(divergence=None)
    if place == min(len(answer), len(reference)):
        # One stopped and the other went on: a fault of the stopping rule, whatever the logits say.
        return Comparison(divergence=place)
    gap, near_tie = judge([*prompt, *answer[:place]], (answer[place], reference[place]))
    return Comparison(divergence=place, gap=gap, near_tie=near_tie)


def greedy_judge(target: Target, settings: DecodeSettings = PLAIN_SETTINGS) -> Judge:
    """A difference between greedy answers is a near-tie when both tokens have nearly the target's best logit.

    The gap is the best logit minus the lower of the two tokens'. If they are the target's two best, as in every tie of
    two, that is the top-2 gap; a token that is neither makes it larger.
    """

    def judge(tokens: Sequence[int], choices: tuple[int, int]) -> tuple[float, bool]:
        logits_V = native_logits(target, tokens, settings)
        best = float(logits_V.max())
        gap = best - min(float(logits_V[choice]) for choice in choices)
        half_bound = HALF_PRECISION_STEPS * torch.finfo(target.dtype).eps * abs(best)
        return gap, gap < NEAR_TIE_GAP.get(target.dtype, half_bound)

    return judge


def sampled_judge(target: Target, settings: DecodeSettings, request: Request) -> Judge:
    """A difference between two draws with one uniform number is a near-tie when it lies at the edge of both tokens.

    There is no logit gap then: a draw has no best token.
    """

    def judge(tokens: Sequence[int], choices: tuple[int, int]) -> tuple[None, bool]:
        # The loop takes one number of the stream a token, so the place in the answer is that in the stream.
        place = len(tokens) - len(request.tokens)
        uniform = float(uniform_stream(settings.seed, request.index, place + 1)[place])
        temperature = torch.tensor([request.temperature], device=target.device)
        logits_V = native_logits(target, tokens, settings)
        probs_V = probabilities(logits_V, temperature, settings.top_k, settings.top_p, settings.min_p).double()
        upper_V = probs_V.cumsum(-1)
        distances = [max(float(upper_V[c] - probs_V[c]) - uniform, uniform - float(upper_V[c]), 0.0) for c in choices]
        return None, max(distances) < NEAR_EDGE.get(target.dtype, NEAR_EDGE_HALF) / min(1.0, request.temperature)

    return judge


@torch.no_grad()
def native_logits(target: Target, tokens: Sequence[int], settings: DecodeSettings = PLAIN_SETTINGS) -> Tensor:
    """Next-token logits [V] after `tokens`, penalised, from one fresh pass of the untouched model."""
    ids_1L = torch.tensor([list(tokens)], device=target.device)
    with target.native() as model:
        logits_1V = cast(Tensor, model(input_ids=ids_1L, use_cache=False).logits[:, -1])
    if settings.repetition_penalty != 1.0:
        logits_1V = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)(ids_1L, widened(logits_1V))
    return logits_1V[0]
