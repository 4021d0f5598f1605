"""Answers of the target from another engine, after a trial that it is the same model: from an inference server that
continues token ids, vLLM's OpenAI-style endpoint or SGLang's own.

Text would have to be tokenized again, and gives other tokens where the model did not write the tokenizer's choice: only
servers that return token ids are used."""

import hashlib
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from multiprocessing.pool import ThreadPool
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch

from ...modules import DecodeResult, DecodeSettings, DecodeStats, Generation, Request, Target, UserError, decode
from ...modules.decoding.recorders import StateRecorder
from ...modules.files.json_records import MistypedError, parse_json, shortened, typed
from ..prompts.chat import ChatTemplate
from ..store.feature_shards import Piece, pad
from .answering import Answerer

PROBES = ("Why is the sky blue?", "Name three colours.", "1, 2, 3, 4,", "Write a short poem about the sea.",
          "def add(a, b):", "Wie heißt du?", "What is 17 times 3?", "Once upon a time")  # Prompts of the trial
PROBE_TOKENS = 32  # Longest answer of the trial, in tokens
STEPS = 2  # Rounding steps of bfloat16, at the size of the best logit, within which another engine may choose otherwise
KEY = "DRAFTSMITH_SERVER_KEY"  # Variable of the environment with the server's key, where it asks for one
GENERATE = "/generate"  # End of the address of SGLang's own endpoint
ANSWER_SECONDS = 600.0  # Longest wait for an answer
PAUSES = (1.0, 4.0, 16.0)  # Seconds before each repetition of a request that failed on the way or in the server
ANSWER_BYTES = 64 * 2**20  # Largest response
Asked = TypeVar("Asked")
Given = TypeVar("Given")
REMEDY = "set distill.engine: own, or use a server of the same model"
log = logging.getLogger(__name__)


class AnswerServer:
    """A server by its address, http://host:port/v1 of an OpenAI-style one or http://host:port/generate of SGLang;
    UserError if it is no such address."""

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address = address.rstrip("/")
        self.kind: Literal["openai", "sglang"] = "sglang" if self.address.endswith(GENERATE) else "openai"

    @cached_property
    def model(self) -> str:
        """Name of the first model that an OpenAI-style server lists; UserError if it lists none, or is not reached."""
        listed = self.response(f"{self.address}/models", None)
        try:
            models = typed([entry["id"] for entry in listed["data"]], list[str], "data")
        except (MistypedError, KeyError, TypeError) as error:
            raise UserError(f"{self.address}/models lists no models; give the address of an OpenAI-style server, which "
                            "ends in /v1") from error
        if not models:
            raise UserError(f"{self.address} serves no model; start it with the target")
        return str(models[0])

    def answer(self, request: Request, settings: DecodeSettings, target: Target, seed: int) -> list[int]:
        """New tokens of a request, the end token included, by the settings' filters; the target should be the server's
        model. UserError if the server cannot be reached, refuses, or gives an answer that is none."""
        # All that a server would otherwise take from the checkpoint's generation defaults is given.
        common = {"temperature": request.temperature, "top_p": settings.top_p, "top_k": settings.top_k or -1,
                  "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": list(target.eos_ids),
                  "skip_special_tokens": False}
        if self.kind == "openai":
            content = self.response(f"{self.address}/completions", {
                **common, "model": self.model, "prompt": list(request.tokens), "max_tokens": request.max_new_tokens,
                "seed": seed, "return_token_ids": True})
        else:
            content = self.response(self.address, {"input_ids": list(request.tokens), "sampling_params": {
                **common, "max_new_tokens": request.max_new_tokens, "sampling_seed": seed}})
        try:
            if self.kind == "openai":
                [choice] = content["choices"]
                tokens, prompt = typed(choice["token_ids"], list[int], "token_ids"), choice.get("prompt_token_ids")
                finish, stopped_by = choice.get("finish_reason"), choice.get("stop_reason")
            else:
                reason = content.get("meta_info", {}).get("finish_reason") or {}
                tokens, prompt = typed(content["output_ids"], list[int], "output_ids"), None
                finish, stopped_by = reason.get("type"), reason.get("matched")
        except (MistypedError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"{self.address} returned no token ids ({shortened(content)}); use a server that does "
                            "(vLLM's return_token_ids, SGLang's /generate), or set distill.engine: own") from error
        # A server that tokenizes again or adds a start token would answer another prompt.
        if prompt is not None and prompt != list(request.tokens):
            raise UserError(f"{self.address} read another prompt than it was given, {shortened(prompt)}; {REMEDY}")
        if wrong := [token for token in tokens if not 0 <= token < target.vocab_size]:
            raise UserError(f"{self.address} wrote token {wrong[0]}, and the target's ids are 0 to "
                            f"{target.vocab_size - 1}; {REMEDY}")
        tokens = list[int](tokens[: request.max_new_tokens])
        ends = [place for place, token in enumerate(tokens) if token in target.eos_ids]
        if ends:
            return tokens[: ends[0] + 1]
        if len(tokens) == request.max_new_tokens:
            return tokens
        # Some servers leave the end token out.
        named = [one for one in target.eos_ids if one == stopped_by] or target.eos_ids
        if finish == "stop" and len(named) == 1:
            return [*tokens, named[0]]
        raise UserError(f"{self.address} ended an answer after {len(tokens)} of {request.max_new_tokens} tokens without"
                        f" end token ({finish}); raise its context length, or lower distill.max_new_tokens")

    def response(self, where: str, sent: dict[str, Any] | None) -> Any:
        """The JSON that a request gives, which is repeated where the connection or the server fails. UserError if that
        does not help, the server refuses the request, or its response is not JSON."""
        headers = {"Content-Type": "application/json"}
        if KEY in os.environ:
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        body, failed = None if sent is None else json.dumps(sent).encode(), Exception()
        for pause in (*PAUSES, None):
            # A new one each time: a request that went through a proxy would go there unencrypted when it is repeated.
            asked = urllib.request.Request(where, body, headers)
            try:
                with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as response:
                    return parse_json(response.read(ANSWER_BYTES), where, "give the address of an inference server")
            except urllib.error.HTTPError as error:
                with error:
                    said = " ".join(error.read(2000).decode("utf-8", "replace").split())[:200]
                reason, failed = f"status {error.code}: {said}", error
                if error.code < 500 and error.code not in (408, 429):
                    raise UserError(f"{where} refuses a request ({reason}); correct the address or the server's "
                                    "settings") from error
            except (OSError, http.client.HTTPException) as error:
                reason, failed = str(getattr(error, "reason", "") or error or type(error).__name__), error
            if pause is not None:
                time.sleep(pause)
        raise UserError(f"{self.address} does not answer ({reason}); start the server and the same command again: "
                        "finished shards are kept") from failed


class ServerAnswerer(Answerer):
    """Answers that a server writes for the target, as many requests at once as the settings have slots; the target
    counts and compares, and no states are recorded."""

    records = False

    def __init__(self, server: AnswerServer, target: Target, template: ChatTemplate, settings: DecodeSettings,
                 max_new_tokens: int, on_tokens: Callable[[int], None]) -> None:
        super().__init__(target, template, settings, max_new_tokens, on_tokens)
        self.server = server

    # Trial -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Let the server name its model and answer the trial's prompts greedily, and compare with the target: UserError
        if it answers otherwise, or not at all. Differences where the target is undecided within rounding are logged."""
        if self.server.kind == "openai":
            log.info("%s serves %s", self.server.address, self.server.model)
        prompts = [tuple(self.template.prompt([{"role": "user", "content": text}])) for text in PROBES]
        tokens = 1 if self.target.placement.slow else PROBE_TOKENS
        longest = min(tokens, self.target.context_length - max(map(len, prompts)))
        requests = [Request(prompt, number, longest) for number, prompt in enumerate(prompts)]
        own = decode(self.target, requests, DecodeSettings(batch_size=len(requests))).generations
        gaps = [gap for one, answer in zip(own, self.decoded(requests, None, None).generations, strict=True)
                if (gap := self._gap(one, answer.tokens)) is not None]
        if gaps:
            log.warning("%d of %d answers of %s leave the target's own at a near-tie (logits that differ by up to "
                        "%.2g)", len(gaps), len(own), self.server.address, max(gaps))

    def _gap(self, own: Generation, answer: Sequence[int]) -> float | None:
        """Gap between the logits of the first tokens that differ; None for equal answers. UserError if rounding does
        not explain it."""
        # Neither goes on after the other's end: both end at an end token or at the limit.
        pairs = zip(own.tokens, answer, strict=False)
        place = next((place for place, (mine, other) in enumerate(pairs) if mine != other), None)
        if place is None:
            return None
        before_N = torch.tensor([*own.request.tokens, *own.tokens[:place]])
        text = pad([Piece(tokens_N=before_N, supervised_N=torch.ones_like(before_N, dtype=torch.bool))])
        with torch.no_grad():
            final_BLD = self.target.encode(text.to(self.target.device)).final()
            logits_V = self.target.logits(final_BLD[0, -1]).float()
        best, chosen = (float(logits_V[token]) for token in (own.tokens[place], answer[place]))
        gap, bound = best - chosen, STEPS * torch.finfo(torch.bfloat16).eps * abs(best)
        if gap > bound:
            words = [self.target.tokenizer.decode([token]) for token in (answer[place], own.tokens[place])]
            raise UserError(
                f"{self.server.address} does not answer as the target does: after {place} tokens of an answer to "
                f"{PROBES[own.request.index]!r} it writes {words[0]!r} where the target writes {words[1]!r}, whose "
                f"logit is larger by {gap:.2g} (rounding explains {bound:.2g}); serve "
                f"{self.target.identity.name}, or set distill.engine: own")
        return gap

    # Answers ---------------------------------------------------------------------------------------------------------

    def decoded(self, requests: Sequence[Request], deadline: float | None,
                recorder: StateRecorder | None) -> DecodeResult:
        """The answers to requests by the server, whole, in their order, without states to record; after the deadline
        only those requests are sent that are to get some tokens."""
        started = time.perf_counter()

        def answer(request: Request) -> list[int] | None:
            if deadline is None or request.least or time.monotonic() < deadline:
                # Each request has a stream of its own; 31 bits, since some engines take no larger seed.
                digest = hashlib.sha256(f"{self.settings.seed} {request.index}".encode()).digest()
                seed = int.from_bytes(digest[:4], "little") >> 1
                return self.server.answer(request, self.settings, self.target, seed)
            return None

        found: dict[int, Generation] = {}
        for request, tokens in at_once(answer, requests, self.settings.batch_size):
            if tokens is not None:
                found[request.index] = Generation(
                    request, tokens, finish="eos" if tokens[-1] in self.target.eos_ids else "length")
                self.on_tokens(len(tokens))
        answered = [found[request.index] for request in requests if request.index in found]
        return DecodeResult(answered, DecodeStats(seconds=time.perf_counter() - started))


def at_once(work: Callable[[Asked], Given], items: Sequence[Asked], width: int) -> Iterator[tuple[Asked, Given]]:
    """Each item with what `work` gives for it, as they come, so many at work at once; raises what `work` does."""
    # Its threads end with the process: a signal must not wait for a slow server.
    with ThreadPool(max(1, min(width, len(items)))) as pool:
        yield from pool.imap_unordered(lambda item: (item, work(item)), items)


def check_address(address: str, possible: str = "distill.engine must be own or") -> None:
    """Refuse what is no address of a server, by a sentence that begins with what is possible. Raises UserError."""
    try:
        parts = urlsplit(address)
        # The port is parsed when it is read.
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known:
        raise UserError(f"{possible} an address such as http://localhost:8000/v1, got {address!r}")
