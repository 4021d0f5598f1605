"""Answers of the target by transformers' continuous batching."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from ...modules import DecodeSettings, Generation, Request, Target, UserError
from ...modules.target.devices.placement import Placement
from ..prompts.chat import ChatTemplate
from .engine_answering import EngineAnswerer

PAGE = 256
"""Tokens of one page of the cache."""
SPARE_PAGES = 8
"""Pages of the cache beyond those of the answers: it is given out in groups of pages."""
BATCH_TOKENS = 2048
"""Tokens of one pass, prompts and answers together."""
WAIT = 1.0
"""Seconds after which a thread that wrote nothing is looked at."""


def require_whole(placement: Placement) -> None:
    """Refuse a target that is not whole on one device. Raises UserError."""
    if placement.spread:
        raise UserError(f"distill.engine is transformers, which takes a target that is whole on one device, and "
                        f"target.placement is {placement.name}; set distill.engine: own, or target.placement: "
                        "replicated")


class BatchAnswerer(EngineAnswerer):
    """Answers that transformers writes for the target by continuous batching; no states are recorded.

    Prompts and answers of all slots are one pass, with the cache in pages.

    Args:
        target: answers, with transformers' own attention, flash attention where it is installed.
        template: of its tokenizer.
        settings: number of requests at once, sampling filters and seed.
        max_new_tokens: longest answer.
        on_tokens: called with the number of tokens of each answer.

    Raises:
        UserError: if the target is spread over devices, or has attention that transformers' paged cache leaves out.
    """

    engine = "transformers' continuous batching"
    remedy = "set distill.engine: own"

    def __init__(self, target: Target, template: ChatTemplate, settings: DecodeSettings, max_new_tokens: int,
                 on_tokens: Callable[[int], None]) -> None:
        super().__init__(target, template, settings, max_new_tokens, on_tokens)
        require_whole(target.placement)
        if (cap := getattr(target.config, "attn_logit_softcapping", None)) is not None:
            raise UserError(f"{target.identity.name} caps its attention scores at {cap:g}, which {self.engine} leaves "
                            f"out; {self.remedy}")

    def _answers(self, requests: Sequence[Request], deadline: float | None) -> list[Generation]:
        found: dict[int, Generation] = {}
        # The engine has one temperature for all its requests: each has a run of its own.
        for temperature in sorted({request.temperature for request in requests}):
            waiting = deque(request for request in requests if request.temperature == temperature)
            if deadline is None or time.monotonic() < deadline:
                with self._running(waiting, temperature) as manager:
                    for one in self._written(manager, waiting, deadline):
                        found[one.request.index] = one
                        self.on_tokens(len(one.tokens))
        return [found[request.index] for request in requests if request.index in found]

    @contextmanager
    def _running(self, requests: Sequence[Request], temperature: float) -> Iterator[Any]:
        """The engine with room for the requests, started; it ends with the block, finished or not.

        Raises:
            UserError: if it does not take the target.
        """
        longest = max(len(request.tokens) + request.max_new_tokens for request in requests)
        slots = min(self.settings.batch_size, len(requests))
        filters = {"temperature": temperature, "top_k": self.settings.top_k or None, "top_p": self.settings.top_p}
        sampling = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=temperature > 0, eos_token_id=list(self.target.eos_ids) or -1, pad_token_id=0,
            **(filters if temperature > 0 else {}))
        half = self.target.dtype in (torch.float16, torch.bfloat16)
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=slots * ceil(longest / PAGE) + SPARE_PAGES, max_requests_per_batch=slots,
            max_batch_tokens=max(slots, BATCH_TOKENS), seed=self.seed_of(requests[0]),
            auto_switch_to_flash=half and self.target.device.type == "cuda" and is_flash_attn_2_available())
        with self.target.native() as model:
            try:
                manager = model.init_continuous_batching(sampling, config)
                manager.warmup()
            except Exception as error:
                # It refuses models by errors of every kind, from attention that it does not know to memory.
                raise UserError(f"{self.engine} does not take {self.target.identity.name}: {error}; {self.remedy}"
                                ) from error
            manager.start()
            try:
                yield manager
            finally:
                manager.stop(hard_stop=True)
                manager.destroy()

    def _written(self, manager: Any, waiting: deque[Request], deadline: float | None) -> Iterator[Generation]:
        """The answers in the order in which they end; a slot that is free takes the next request."""
        open_requests: dict[str, Request] = {}
        while True:
            while waiting and len(open_requests) < self.settings.batch_size:
                if deadline is not None and time.monotonic() >= deadline:
                    waiting.clear()
                    break
                request = waiting.popleft()
                name = manager.add_request(list(request.tokens), max_new_tokens=request.max_new_tokens)
                open_requests[name] = request
            if not open_requests:
                return
            result = manager.get_result(timeout=WAIT)
            if result is None:
                # Its thread ends without a word to those who wait.
                if not manager.is_running():
                    error = manager.background_thread_status.fatal_error
                    raise UserError(f"{self.engine} ended before its answers: {error}; {self.remedy}")
            elif result.error is not None:
                raise UserError(f"{self.engine} ended an answer: {result.error}; {self.remedy}")
            elif result.is_finished():
                tokens = list(result.generated_tokens)
                yield self.generation(open_requests.pop(result.request_id), tokens)
