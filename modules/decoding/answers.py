"""Decoding of given requests with the one loop: all of them at once, one pass by pass, or by the call of transformers'
`generate`, with its preparation of prompts and settings and our loop in place of its own.

Shapes: B rows, L tokens of the longest prompt, T tokens of the longest answer."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as native

from ..errors import UserError
from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from ..target.loading.generation_defaults import GenerationDefaults, TokenBiases, refused_settings, sampling_defaults
from ..target.model import Target
from .constraints import Processor
from .loop import Loop, Observer
from .recorders import StateRecorder
from .requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request
from .verifier import DecodeError, Verifier


def decode(target: Verifier, requests: Sequence[Request], settings: DecodeSettings, *, drafter: Proposer | None = None,
           policy: Policy | None = None, on_tokens: Callable[[Generation, list[int], bool], None] | None = None,
           deadline: float | None = None, observer: Observer | None = None, recorder: StateRecorder | None = None
           ) -> DecodeResult:
    """Continue all requests with a target, or a `Replay` of stored text, and a drafter with the policy by which its
    trees grow, or plainly; see `Loop`. Every pass calls `on_tokens` with (generation, its new tokens, whether it
    finished). After `deadline`, of `time.monotonic()`, no waiting request is started, and answers end, with `finish`
    "length", but those that lack of their request's `least` tokens.

    Raises:
        UserError: if two requests have the same index, or the policy makes no sense with the drafter.
        DecodeError: when all other rows have finished, if a request is wrong (such as an empty prompt), or a row went
            wrong on the way (NaN logits, a token or tree that cannot be verified). Its `result` holds all generations.
    """
    finished: dict[int, Generation] = {}
    loop = Loop(target, requests, settings, drafter=drafter, policy=policy, observer=observer, recorder=recorder)
    for generation, tokens, done in loop.run(deadline):
        if on_tokens is not None:
            on_tokens(generation, tokens, done)
        if done:
            finished[generation.request.index] = generation
    # Rows finish in any order; what a deadline kept from starting is missing.
    ordered = [finished[request.index] for request in requests if request.index in finished]
    result = DecodeResult(ordered, loop.stats)
    if any(generation.finish == "error" for generation in ordered):
        raise DecodeError(result)
    return result


def stream(target: Verifier, request: Request, settings: DecodeSettings, *, drafter: Proposer | None = None,
           policy: Policy | None = None, observer: Observer | None = None, stats: DecodeStats | None = None
           ) -> Iterator[list[int]]:
    """Continue one request and yield its new tokens pass by pass, those of a pass after `observer` was called; `stats`
    gets the counts and times in the end. Raises DecodeError as `decode` does, after the tokens before the fault."""
    loop = Loop(target, [request], settings, drafter=drafter, policy=policy, observer=observer)
    for generation, tokens, _done in loop.run():
        # A pass in which a fault is found may have tokens from before it: they are right, and `decode` keeps them.
        if tokens or generation.finish != "error":
            yield tokens
        if generation.finish == "error":
            raise DecodeError(DecodeResult([generation], loop.stats))
    if stats is not None:
        stats.add(loop.stats)


_TAKEN = {"input_ids", "attention_mask", "generation_config", "tokenizer", "logits_processor"}
"""Arguments that are no settings of a generation config."""
_WARPERS = (native.TemperatureLogitsWarper, native.TopKLogitsWarper, native.TopPLogitsWarper, native.MinPLogitsWarper)


def drafted_generate(target: Target, drafting: Callable[..., tuple[Proposer, Policy]], inputs: Tensor | None,
                     streamer: Any, references: Sequence[str], given: Mapping[str, Any]) -> Tensor:
    """Prompts and answers as `generate` gives them, [B, L + T]; see `Artifact.generate`. UserError names what the call
    asks for and decoding with drafts does not offer. `drafting` gives drafter and policy for a batch size and a
    temperature; `inputs` are the prompts, unless `given`, the other arguments of `generate`, has them; the `streamer`
    gets the prompt and each token of the answer; `references` are a text that all answers may resemble, or one each."""
    # generate takes lists of tokens as tensors too.
    given = {name: value.tolist() if isinstance(value, Tensor) and name not in _TAKEN else value
             for name, value in given.items()}
    # The loop has stop texts of its own: for its own transformers asks a callable's call for a tokenizer in vain.
    config, own = given.get("generation_config"), target.model.generation_config.stop_strings
    named = (given.pop("stop_strings", None), None if config is None else config.stop_strings, own)
    stops = next((one for one in named if one is not None), None)
    if stops is not None and not (isinstance(stops, str | list | tuple) and all(isinstance(one, str) for one in stops)):
        raise UserError(f"stop_strings must be a text or a list of texts, got {stops!r}; give for example ['\\n\\n']")
    if config is not None:
        given["generation_config"] = config = copy(config)
        config.stop_strings = None
    if own is not None:
        # Only an argument keeps transformers from filling in the model's own.
        given["stop_strings"] = None
    known = _TAKEN | vars(GenerationConfig()).keys()  # type: ignore[no-untyped-call]
    _refuse(given, [name for name, value in given.items() if value is not None and name not in known])

    # Before transformers' own streamers see several prompts, which they refuse in words of their own.
    prompts = given.get("input_ids") if inputs is None else inputs
    if streamer is not None and prompts is not None and len(prompts) > 1:
        raise UserError(f"a streamer shows one answer, got {len(prompts)} prompts; give one, or no streamer")

    if not all(isinstance(text, str) for text in references):
        raise UserError(f"reference must be a text, or one for each prompt, got {references!r:.60}; give texts")
    if prompts is not None and len(references) not in (0, 1, len(prompts)):
        raise UserError(f"reference holds {len(references)} texts for {len(prompts)} prompts; give one for all, or one "
                        "for each")

    # transformers passes a callable neither the streamer nor any argument that its own loop does not name; the closure
    # knows them. Other names of parameters here would take arguments away from its preparation.
    def answer(model: Any, input_ids: Tensor, *, generation_config: Any, logits_processor: Any,
               **model_kwargs: Any) -> Tensor:
        _refuse(vars(generation_config))
        defaults = sampling_defaults(generation_config, generation_config.eos_token_id, target.vocab_size,
                                     input_ids.shape[1])
        mask_BL = model_kwargs.get("attention_mask")
        mask_BL = torch.ones_like(input_ids) if mask_BL is None else mask_BL.bool()
        if bool((mask_BL[:, 1:] < mask_BL[:, :-1]).any()):
            raise UserError("a prompt has padding or a gap after its first token (attention_mask); put the padding on "
                            "the left (padding_side='left' of the tokenizer)")
        room = generation_config.max_length - input_ids.shape[1]
        requests, defaults = _requests(target, defaults, input_ids, mask_BL, room, references, logits_processor,
                                       list(given.get("logits_processor") or ()))
        # From torch's own random numbers, so that torch.manual_seed decides as it does in `generate`.
        seed = int(torch.randint(2**63 - 1, ())) if defaults.temperature else 0
        settings = DecodeSettings.as_generate(
            defaults, batch_size=len(requests), seed=seed, eos_ids=defaults.eos_ids, biases=defaults.biases,
            stop=(stops,) if isinstance(stops, str) else tuple(stops or ()), stop_from_prompt=True)
        drafter, policy = drafting(batch_size=len(requests), temperature=defaults.temperature)

        def show(_answer: Generation, tokens: list[int], _done: bool) -> None:
            for token in tokens if streamer is not None else ():
                streamer.put(torch.tensor([token]))

        made = decode(target, requests, settings, drafter=drafter, policy=policy, on_tokens=show)
        found = made.generations
        if made.stats.graph_refusal:
            warnings.warn(f"decoding is not replayed as CUDA graphs: {made.stats.graph_refusal}", stacklevel=2)
        if streamer is not None:
            streamer.end()
        # Rows that have ended are filled up as in `generate`; without an end token all are equally long.
        ends = generation_config.eos_token_id
        pad = next((token for token in (generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends]))
                    if token is not None), 0)
        longest = max(len(one.tokens) for one in found)
        answers_BT = [[*one.tokens, *[pad] * (longest - len(one.tokens))] for one in found]
        return torch.cat([input_ids, torch.tensor(answers_BT).to(input_ids)], dim=1)

    sequences: Tensor = target.model.generate(inputs, streamer=streamer, custom_generate=answer, **given)
    return sequences


def _requests(target: Target, defaults: GenerationDefaults, input_ids: Tensor, mask_BL: Tensor, room: int,
              references: Sequence[str], prepared: Sequence[Processor], own: Sequence[Processor]
              ) -> tuple[list[Request], GenerationDefaults]:
    """(the requests of a call of `generate`, what is left of its defaults); `own` of the `prepared` processors are the
    caller's."""
    prompts = [tuple(row_L[mask_L.bool()].tolist()) for row_L, mask_L in zip(input_ids, mask_BL, strict=True)]
    texts: list[tuple[int, ...]] = [tuple(target.tokenizer.encode(text, add_special_tokens=False))
                                    for text in references] or [()]
    texts = texts * len(prompts) if len(texts) == 1 else texts
    requests = [Request(prompt, index, room, defaults.temperature, reference=text)
                for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))]
    if not own and defaults.biases == defaults.biases.alone:
        return requests, defaults
    # A call's own processor stands in for transformers' of its kind, and those of texts see the padding of the batch:
    # all of them are taken as they stand.
    kept = [one for one in prepared if type(one) not in _WARPERS or any(one is mine for mine in own)]
    requests = [replace(one, processors=tuple(_of_row(each, row_L[: len(row_L) - len(one.tokens)]) for each in kept))
                for one, row_L in zip(requests, input_ids, strict=True)]
    return requests, replace(defaults, biases=TokenBiases(), repetition_penalty=1.0)


def _of_row(processor: Processor, padding_L: Tensor) -> Processor:
    """A processor of a batch as it treats one row, with the padding that it sees before the row's text."""
    if isinstance(processor, native.RepetitionPenaltyLogitsProcessor):
        # The batch's own leaves the padding of each row out.
        return native.RepetitionPenaltyLogitsProcessor(processor.penalty)
    if len(padding_L) == 0:
        return processor

    def padded(text_1L: Tensor, logits_1V: Tensor) -> Any:
        return processor(torch.cat([padding_L[None], text_1L], dim=1), logits_1V)

    return padded


def _refuse(settings: Mapping[str, Any], unknown: list[str] | None = None) -> None:
    """Refuse what decoding with drafts does not offer. Raises UserError."""
    # The last one asks for more than tokens.
    refused = [*(unknown or ()), *refused_settings(settings),
               *(["return_dict_in_generate"] if settings.get("return_dict_in_generate") else [])]
    if refused:
        raise UserError(f"decoding with drafts does not offer {', '.join(refused)}; leave it out, or call generate of "
                        "the model itself")
