"""Answers of the target from a server."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from ...modules import DecodeSettings, Generation, Request, Target
from ..prompts.chat import ChatTemplate
from .answer_server import AnswerServer, Sampling
from .engine_answering import EngineAnswerer

Outcome = list[int] | Exception | None
"""Tokens of an answer, the reason why there are none, or None after the deadline."""
log = logging.getLogger(__name__)


class ServerAnswerer(EngineAnswerer):
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
        self.server, self.engine = server, server.address
        self.remedy = f"serve {target.identity.name}, or set distill.engine: own"
        self.sampling = Sampling(top_k=settings.top_k, top_p=settings.top_p, eos_ids=target.eos_ids,
                                 vocab_size=target.vocab_size)

    def _introduce(self) -> None:
        if self.server.kind == "openai":
            log.info("%s serves %s", self.server.address, self.server.model)

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
        try:
            return self.server.answer(request, self.sampling, self.seed_of(request))
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
                found[request.index] = self.generation(request, tokens)
                self.on_tokens(len(tokens))
        return [found[request.index] for request in requests if request.index in found]
