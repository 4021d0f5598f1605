"""Answers of the target from a server, after a trial that it is the same model."""

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ..modules import (
    DecodeResult,
    DecodeSettings,
    DecodeStats,
    Features,
    Generation,
    Request,
    Target,
    UserError,
    decode,
)
from ..modules.decoding.state_recorder import StateRecorder
from .answer_server import AnswerServer, Sampling
from .answering import Answerer
from .chat import ChatTemplate
from .collate import Piece, pad

PROBES = ("Why is the sky blue?", "Name three colours.", "1, 2, 3, 4,", "Write a short poem about the sea.",
          "def add(a, b):", "Wie heißt du?", "What is 17 times 3?", "Once upon a time")
"""Prompts of the trial."""
PROBE_TOKENS = 32
"""Longest answer of the trial, in tokens."""
STEPS = 2
"""Rounding steps of bfloat16, at the size of the best logit, within which another engine may choose otherwise."""
Outcome = list[int] | Exception | None
"""Tokens of an answer, the reason why there are none, or None after the deadline."""
log = logging.getLogger(__name__)


class ServerAnswerer(Answerer):
    """Answers that a server writes for the target; no states are recorded.

    Args:
        server: serves the target.
        target: the same model, which counts and compares.
        template: of its tokenizer.
        settings: number of requests at once, sampling filters and seed.
        max_new_tokens: longest answer.
        on_tokens: called with the number of tokens of each answer.
    """

    def __init__(self, server: AnswerServer, target: Target, template: ChatTemplate, settings: DecodeSettings,
                 max_new_tokens: int, on_tokens: Callable[[int], None]) -> None:
        super().__init__(target, template, settings, max_new_tokens, on_tokens)
        self.server = server
        self.sampling = Sampling(top_k=settings.top_k, top_p=settings.top_p, eos_ids=target.eos_ids,
                                 vocab_size=target.vocab_size)

    def check(self) -> None:
        """Let the server answer the trial's prompts greedily and compare with the target.

        Differences where the target is undecided within rounding are logged.

        Raises:
            UserError: if it answers otherwise, or not at all.
        """
        if self.server.kind == "openai":
            log.info("%s serves %s", self.server.address, self.server.model)
        prompts = [self._probe(text) for text in PROBES]
        longest = min(PROBE_TOKENS, self.target.context_length - max(map(len, prompts)))
        requests = [Request(prompt, number, longest) for number, prompt in enumerate(prompts)]
        own = decode(self.target, requests, DecodeSettings(batch_size=len(requests))).generations
        gaps = [gap for one, answer in zip(own, self._answers(requests, None), strict=True)
                if (gap := self._gap(one, answer.tokens)) is not None]
        if gaps:
            log.warning("%d of %d answers of %s leave the target's own at a near-tie (logits that differ by up to "
                        "%.2g)", len(gaps), len(own), self.server.address, max(gaps))

    def _probe(self, text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        return tuple(self.template.prompt(messages))

    def _gap(self, own: Generation, answer: Sequence[int]) -> float | None:
        """Gap between the logits of the first tokens that differ; None for equal answers.

        Raises:
            UserError: if it is more than rounding explains.
        """
        place = next((place for place, pair in enumerate(zip(own.tokens, answer, strict=False)) if pair[0] != pair[1]),
                     None)
        if place is None:
            # Neither goes on after the other's end: both end at an end token or at the limit.
            return None
        before = [*own.request.tokens, *own.tokens[:place]]
        logits_V = self._logits(before)
        best, chosen = (float(logits_V[token]) for token in (own.tokens[place], answer[place]))
        gap, bound = best - chosen, STEPS * torch.finfo(torch.bfloat16).eps * abs(best)
        if gap > bound:
            words = [self.target.tokenizer.decode([token]) for token in (answer[place], own.tokens[place])]
            raise UserError(
                f"{self.server.address} does not serve the target: after {place} tokens of an answer to "
                f"{PROBES[own.request.index]!r} it writes {words[0]!r} where the target writes {words[1]!r}, whose "
                f"logit is larger by {gap:.2g} (rounding explains {bound:.2g}); serve {self.target.identity.name}, or "
                "set distill.engine: own")
        return gap

    @torch.no_grad()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        tokens_N = torch.tensor(tokens)
        features: Features = pad([Piece(tokens_N=tokens_N, supervised_N=torch.ones_like(tokens_N, dtype=torch.bool))])
        final_BLD = self.target.encode(features.to(self.target.device)).final()
        return self.target.logits(final_BLD[0, -1]).float()

    # Requests --------------------------------------------------------------------------------------------------------

    def _recorder(self, taps: tuple[int, ...] | None) -> StateRecorder | None:
        return None

    def _decode(self, requests: Sequence[Request], deadline: float | None,
                recorder: StateRecorder | None) -> DecodeResult:
        started = time.perf_counter()
        found = self._answers(requests, deadline)
        return DecodeResult(found, DecodeStats(seconds=time.perf_counter() - started))

    def _answers(self, requests: Sequence[Request], deadline: float | None) -> list[Generation]:
        """The answered requests in their order; none is sent after the deadline."""
        waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)
        done: queue.SimpleQueue[tuple[Request, Outcome]] = queue.SimpleQueue()
        stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    return
                done.put((request, self._answer_one(request, deadline)))

        # Threads that end with the process: a signal must not wait for a slow server.
        for _ in range(min(self.settings.batch_size, len(requests))):
            threading.Thread(target=work, daemon=True).start()
        try:
            return self._collected(requests, done)
        finally:
            stopped.set()

    def _answer_one(self, request: Request, deadline: float | None) -> Outcome:
        """The outcome of a request; an error belongs to the thread that waits for it."""
        if deadline is not None and time.monotonic() >= deadline:
            return None
        digest = hashlib.sha256(f"{self.settings.seed} {request.index}".encode()).digest()
        try:
            return self.server.answer(request, self.sampling, int.from_bytes(digest[:4], "little") >> 1)
        except Exception as error:  # noqa: BLE001 raised again where it is waited for
            return error

    def _collected(self, requests: Sequence[Request],
                   done: "queue.SimpleQueue[tuple[Request, Outcome]]") -> list[Generation]:
        found: dict[int, Generation] = {}
        for _ in requests:
            request, tokens = done.get()
            if isinstance(tokens, Exception):
                raise tokens
            if tokens is not None:
                finish = "eos" if tokens[-1] in self.sampling.eos_ids else "length"
                found[request.index] = Generation(request, tokens, finish=finish)  # type: ignore[arg-type]
                self.on_tokens(len(tokens))
        return [found[request.index] for request in requests if request.index in found]
