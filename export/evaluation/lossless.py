"""The comparison of drafted answers with what the untouched model says by transformers' own code.

A greedy answer is held against that of `generate`, a sampled one against the draws that transformers' own processors
give with the same uniform numbers. Where they differ, every token of the answer is judged by the untouched model's
logits of its own text: rounding may choose between two tokens only as far as it moves the model's logits, which is
measured on that text.

Shapes: B rows, L tokens of the longest prompt, T tokens of an answer, K likely tokens, V vocabulary."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as native

from ...modules import DecodeSettings, Request, Target
from ...modules.verification.sampling import uniform_stream, widened
from .results import Comparison

SAFETY = 1.5
"""Allowed change of the difference of two logits, in measured ones: the pass that decodes and the one that judges may
err in opposite directions."""
LEAST_STEPS = 1.0  # Least measured change, in rounding steps of the distance between the best logit and the mean one
LIKELY = 8  # Likeliest tokens of a place among which the change is measured; rounding chooses no other
GREATEST_MOVE = 600.0  # Largest move of a logit divided by the temperature
PLACES = 64  # Tokens of an answer whose whole distributions are formed at once
PLAIN_SETTINGS = DecodeSettings()  # No filter and no penalty
IMPOSSIBLE = 2.0  # Position of a token to which the target gives no probability
_POSITIONS = 0xD157  # Separates these uniform numbers from all that decoding uses


@contextmanager
def native_model(target: Target) -> Iterator[Any]:
    """The untouched model with a plain generation config: no repetition penalty or other setting of its checkpoint.

    Its end tokens are the target's, which were read when it was loaded; `generate` is given them."""
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

    With a repetition penalty they are answered one by one: `generate` would penalise the padding's token."""
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
                            eos_token_id=list(target.eos_ids) or None, pad_token_id=pad, use_cache=True, **sampling,
                            **target.biases.of_generate())
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


def law(logits_TV: Tensor, temperature: float, settings: DecodeSettings) -> Tensor:
    """The distributions [T, V] that `generate` draws from at a temperature above 0, by transformers' own processors in
    its order, of penalised logits in float32 or wider."""
    processors = LogitsProcessorList([native.TemperatureLogitsWarper(temperature)])
    if settings.top_k:
        processors.append(native.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        processors.append(native.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(native.MinPLogitsWarper(settings.min_p))
    # None of them looks at the text before.
    return processors(cast(Any, None), cast(Any, logits_TV)).softmax(-1)


class NativeReading:
    """An answer of at least one token as the untouched model reads it: its logits at each, and how far rounding moves
    them."""

    def __init__(self, target: Target, prompt: Sequence[int], answer: Sequence[int],
                 settings: DecodeSettings = PLAIN_SETTINGS, longest: int | None = None) -> None:
        self._target, self._prompt, self._answer = target, list(prompt), list(answer)
        self._longest = len(prompt) + (longest or len(answer) + 1)
        self._penalty = settings.repetition_penalty
        tokens_1N = torch.tensor([[*prompt, *answer]], device=target.device)
        with torch.no_grad(), target.native() as model:
            self._raw_TV = widened(model(input_ids=tokens_1N, use_cache=False).logits[0, len(self._prompt) - 1 : -1])
        self.logits_TV = self._raw_TV
        """Logits of the next token at each place of the answer, biased and penalised, float32 or wider."""
        if processors := self._processors(len(self._prompt)):
            # What they do to a token depends on all before it, so each place has its own.
            start = len(self._prompt)
            self.logits_TV = torch.cat([
                cast(Any, processors)(tokens_1N[:, : start + place], self._raw_TV[place : place + 1].clone())
                for place in range(len(self._answer))])

    def _processors(self, prompt: int) -> LogitsProcessorList:
        """The processors of `generate` that come before those of sampling, in its order."""
        found, biases, device = LogitsProcessorList(), self._target.biases, str(self._target.device)
        if biases.added:
            found.append(native.SequenceBiasLogitsProcessor([[[token], value] for token, value in biases.added]))
        before, after = biases.processors(self._longest, device)
        found.extend(before)
        if self._penalty != 1.0:
            found.append(native.RepetitionPenaltyLogitsProcessor(self._penalty))
        found.extend(after)
        if biases.least_tokens and self._target.eos_ids:
            found.append(native.MinNewTokensLengthLogitsProcessor(prompt, biases.least_tokens,
                                                                  list(self._target.eos_ids), device))
        if biases.not_first:
            found.append(native.SuppressTokensAtBeginLogitsProcessor(list(biases.not_first), prompt, device))
        return found

    @cached_property
    def slack(self) -> float:
        """Largest change of the difference of two likely logits that rounding explains, in nats.

        The same text is read once more in the steps of `generate`, with a cache and one token a pass. The changes of
        the differences between the likeliest logits, not of the logits: what is added to all of them chooses nothing.
        """
        likely_TK = self._raw_TV.topk(min(LIKELY, self._raw_TV.shape[-1]), dim=-1).indices
        prompt_1P, kept = torch.tensor([self._prompt], device=self._target.device), list[Tensor]()
        with torch.no_grad(), native_model(self._target) as model:
            # What `generate` itself returns is rounded to float32.
            hook = model.register_forward_hook(
                lambda _model, _arguments, output: kept.append(output.logits[0, -1, likely_TK[len(kept)]]))
            try:
                model.generate(input_ids=prompt_1P, attention_mask=torch.ones_like(prompt_1P), do_sample=False,
                               max_new_tokens=len(self._answer), pad_token_id=0, use_cache=True,
                               logits_processor=LogitsProcessorList([_Forced([*self._prompt, *self._answer])]))
            finally:
                hook.remove()
        change_TK = self._raw_TV.gather(-1, likely_TK) - torch.stack(kept).to(self._raw_TV)
        spread = float((self._raw_TV.amax(-1) - self._raw_TV.mean(-1)).max())
        measured = float((change_TK.amax(-1) - change_TK.amin(-1)).max())
        least = LEAST_STEPS * torch.finfo(self._target.dtype).eps * spread
        return SAFETY * max(measured, least) * max(self._penalty, 1 / self._penalty)

    def gaps(self, tokens: Sequence[int]) -> Tensor:
        """Distances of tokens below the best logit at the last places, one for each token, float64."""
        logits_TV = self.logits_TV[len(self._answer) - len(tokens) :]
        chosen_T1 = torch.tensor(list(tokens), device=logits_TV.device)[:, None]
        return (logits_TV.amax(-1) - logits_TV.gather(-1, chosen_T1)[:, 0]).double()


@dataclass(frozen=True, eq=False)
class _Forced(LogitsProcessor):
    """A processor that lets `generate` write a given answer."""

    text: Sequence[int]  # The prompt and the answer

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        forced_1V = torch.full_like(scores, -torch.inf)
        forced_1V[0, self.text[input_ids.shape[1]]] = 0.0
        return forced_1V


@dataclass(frozen=True, eq=False)
class Judge:
    """The comparison of answers of one target with their references."""

    target: Target
    settings: DecodeSettings = PLAIN_SETTINGS
    _drawn: dict[tuple[Request, tuple[int, ...]], tuple[int | None, float | None]] = field(default_factory=dict)

    def compare(self, request: Request, answer: Sequence[int], reference: Sequence[int], *,
                again: Callable[[], Sequence[int]] | None = None) -> Comparison:
        """Hold an answer against its reference.

        Args:
            request: prompt, longest answer, and temperature; a sampled answer is compared with the loop's without
                drafts, and every token of it with the draw from the untouched model's distribution.
            again: makes the reference of a greedy answer once more, alone and unpadded, when it came from a padded
                batch: padding is itself a change of shape that may flip a near-tie, and must not be blamed on the
                drafts."""
        place = first_divergence(answer, reference)
        if place is not None and again is not None:
            reference = again()
            place = first_divergence(answer, reference)
        if place is not None and not (place < min(len(answer), len(reference)) and self._ended(request, answer)):
            # One stopped and the other went on: a fault of the stopping rule, whatever the logits say.
            return Comparison(divergence=place)
        if request.temperature > 0:
            if not self._ended(request, answer):
                return Comparison(divergence=len(answer))
            # A reference that is no draw of the target either would excuse any difference.
            read = [self._wrong_draw(request, text) for text in ([answer] if place is None else [answer, reference])]
            wrong = [first for first, _ in read if first is not None]
            slack = max((one for _, one in read if one is not None), default=None)
            if wrong:
                return Comparison(divergence=min(wrong if place is None else [place, *wrong]), slack=slack)
            return Comparison(divergence=place, near_tie=place is not None, slack=slack)
        if place is None:
            return Comparison(divergence=None)
        # The answers have other texts from here on. All that follows is judged by the model's logits of this text.
        reading = NativeReading(self.target, request.tokens, answer, self.settings, request.max_new_tokens)
        gap = float(reading.gaps(answer[place:]).max())
        # If the two tokens are the target's two best, as in every tie of two, their gap is the top-2 gap.
        ends_there = NativeReading(self.target, request.tokens, [*answer[:place], reference[place]], self.settings,
                                   request.max_new_tokens)
        gap = max(gap, float(ends_there.gaps(reference[place : place + 1])[0]))
        return Comparison(divergence=place, gap=gap if math.isfinite(gap) else None, near_tie=gap < reading.slack,
                          slack=reading.slack)

    def _ended(self, request: Request, answer: Sequence[int]) -> bool:
        """True if the answer ended at its first end token, or at its longest length."""
        eos_ids = () if self.settings.ignore_eos else self.target.eos_ids
        ends = [place for place, token in enumerate(answer) if token in eos_ids]
        return ends == [len(answer) - 1] or (not ends and len(answer) == request.max_new_tokens)

    def _wrong_draw(self, request: Request, answer: Sequence[int]) -> tuple[int | None, float | None]:
        """The first place at which rounding does not explain the drawn token, and the slack if it was measured.

        Methods whose drafts are right draw the same answers, which are read once."""
        key = request, tuple(answer)
        if key not in self._drawn and answer:
            reading = NativeReading(self.target, request.tokens, answer, self.settings, request.max_new_tokens)
            # The loop takes one number of the stream a token, so the place in the answer is that in the stream.
            uniforms = uniform_stream(self.settings.seed, request.index, len(answer)).tolist()
            doubtful = [place for start in range(0, len(answer), PLACES) for place in self._outside(
                request, reading, uniforms, answer, range(start, min(start + PLACES, len(answer))))]
            wrong = next((place for place in doubtful
                          if not self._explained(request, reading, uniforms[place], answer[place], place)), None)
            self._drawn[key] = wrong, reading.slack if doubtful else None
        return self._drawn.get(key, (None, None))

    def _outside(self, request: Request, reading: NativeReading, uniforms: Sequence[float], answer: Sequence[int],
                 places: range) -> list[int]:
        """The places whose uniform number lies outside the share of the token."""
        shares_TV = law(reading.logits_TV[places.start : places.stop], request.temperature, self.settings).double()
        chosen_T1 = torch.tensor([answer[place] for place in places], device=shares_TV.device)[:, None]
        upper_T = shares_TV.cumsum(-1).gather(-1, chosen_T1)[:, 0]
        lower_T = upper_T - shares_TV.gather(-1, chosen_T1)[:, 0]
        return [place for place, lower, upper in zip(places, lower_T.tolist(), upper_T.tolist(), strict=True)
                if not lower <= uniforms[place] < upper]

    def _explained(self, request: Request, reading: NativeReading, uniform: float, token: int, place: int) -> bool:
        """True if logits within the slack give the token's share that uniform number.

        Two logits that move by s against each other move the odds of one token against the other by exp(s / T). The
        ends of filters move as well, and each of them is tried at both ends of its reach; of the tokens within s of
        such an end, any may stay and any may go."""
        slack, settings = reading.slack, self.settings
        # Beyond this both ends are everything, and exp would overflow.
        reach = min(slack / request.temperature, GREATEST_MOVE)
        moves = (-reach, 0.0, reach)
        logits_V = reading.logits_TV[place]
        top_k = {settings.top_k}
        if 0 < settings.top_k < len(logits_V):
            least = logits_V.topk(settings.top_k).values[-1]
            top_k |= {int((logits_V >= least + move).sum()) for move in (-slack, slack)} - {0}
        top_p = {_moved(settings.top_p, move) for move in moves} if settings.top_p < 1.0 else {1.0}
        min_p = {min(1.0, settings.min_p * math.exp(move)) for move in moves}
        order_V = torch.arange(len(logits_V), device=logits_V.device)
        for k, p, m in product(top_k, top_p, min_p):
            moved = DecodeSettings(top_k=k, top_p=p, min_p=m)
            kept_V = law(logits_V[None], request.temperature, moved)[0] > 0
            doubtful_V = (logits_V - logits_V[kept_V].min()).abs() <= slack if not bool(kept_V.all()) else ~kept_V
            if not bool((kept_V | doubtful_V)[token]):
                continue
            ends = []
            # The token's share begins earliest where what is doubtful before it goes and what is after it stays.
            for end, stays_V, move in ((token, order_V >= token, -reach), (token + 1, order_V <= token, reach)):
                held_V = torch.where(doubtful_V, stays_V, kept_V)
                shares_V = (logits_V.double() / request.temperature).masked_fill(~held_V, -torch.inf).softmax(-1)
                ends.append(_moved(float(shares_V[:end].sum()), move * _conspiracy(shares_V, end)))
            if ends[0] <= uniform < ends[1]:
                return True
        return False


def _conspiracy(shares_V: Tensor, end: int) -> float:
    """The move of the odds of the tokens before `end`, as a share of that of one token against another.

    The logarithm of the odds moves by the difference of two means of what the logits move by, that of the tokens before
    `end` and that of the others, weighted by their shares: what is likely for a few tokens is not for many at once."""
    parts = [part_V / part_V.sum().clamp(min=torch.finfo(part_V.dtype).tiny)
             for part_V in (shares_V[:end], shares_V[end:])]
    return math.sqrt(sum(float(part_V.square().sum()) for part_V in parts) / 2)


def _moved(share: float, move: float) -> float:
    """A probability whose odds are multiplied by exp(move), move from -GREATEST_MOVE to GREATEST_MOVE."""
    # Sums of shares may end a rounding step above 1.
    share = min(share, 1.0)
    return share * math.exp(move) / (share * math.exp(move) + 1 - share)


@torch.no_grad()
def positions(target: Target, request: Request, answer: Sequence[int], settings: DecodeSettings) -> tuple[float, ...]:
    """The position of each token of a sampled answer in the target's distribution, by the untouched model.

    A token that the filters leave no probability is at IMPOSSIBLE, and so is one after an end token, or the one that is
    missing where an answer ends too early."""
    logits_TV = NativeReading(target, request.tokens, answer, settings, request.max_new_tokens).logits_TV
    probs_TV = law(logits_TV, request.temperature, settings).double()
    answer_T1 = torch.tensor(answer, device=probs_TV.device)[:, None]
    own_T1 = probs_TV.gather(-1, answer_T1)
    likelier_T = probs_TV.masked_fill(probs_TV <= own_T1, 0.0).sum(-1)
    # Tokens that are equally likely stand in the order of their ids.
    before_TV = torch.arange(probs_TV.shape[-1], device=probs_TV.device) < answer_T1
    likelier_T = likelier_T + probs_TV.masked_fill((probs_TV != own_T1) | ~before_TV, 0.0).sum(-1)
    key = np.array([settings.seed % 2**64, request.index % 2**64, _POSITIONS], dtype=np.uint64)
    chance_T = torch.from_numpy(np.random.default_rng(key).random(len(answer))).to(probs_TV)
    places_T = (likelier_T + chance_T * own_T1[:, 0]).clamp(0.0, 1.0)
    found = torch.where(own_T1[:, 0] > 0, places_T, IMPOSSIBLE).tolist()
    eos_ids = () if settings.ignore_eos else target.eos_ids
    end = next((place + 1 for place, token in enumerate(answer) if token in eos_ids), request.max_new_tokens)
    return tuple(found[:end]) + (IMPOSSIBLE,) * abs(len(answer) - end)
