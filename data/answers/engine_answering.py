"""Answers of the target from another engine, after a trial that it is the same model."""

import hashlib
import logging
import time
from abc import abstractmethod
from collections.abc import Sequence

import torch

from ...modules import DecodeResult, DecodeSettings, DecodeStats, Features, Generation, Request, UserError, decode
from ...modules.decoding.state_recorder import StateRecorder
from ..store.collate import Piece, pad
from .answering import Answerer

PROBES = ("Why is the sky blue?", "Name three colours.", "1, 2, 3, 4,", "Write a short poem about the sea.",
          "def add(a, b):", "Wie heißt du?", "What is 17 times 3?", "Once upon a time")  # Prompts of the trial
PROBE_TOKENS = 32  # Longest answer of the trial, in tokens
STEPS = 2  # Rounding steps of bfloat16, at the size of the best logit, within which another engine may choose otherwise
log = logging.getLogger(__name__)


class EngineAnswerer(Answerer):
    """Answers that another engine than `decode` writes for the target, which counts and compares; no states are
    recorded."""

    records = False
    engine: str  # Name in messages
    remedy: str  # Remedy if it does not answer as the target does, the end of a message

    @abstractmethod
    def _answers(self, requests: Sequence[Request], deadline: float | None) -> list[Generation]:
        """The answered requests in their order; after the deadline only those are started that are to get some tokens
        whatever the time."""

    # Trial -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Let the engine answer the trial's prompts greedily and compare with the target: UserError if it answers
        otherwise, or not at all. Differences where the target is undecided within rounding are logged."""
        prompts = [tuple(self.template.prompt([{"role": "user", "content": text}])) for text in PROBES]
        tokens = 1 if self.target.placement.slow else PROBE_TOKENS
        longest = min(tokens, self.target.context_length - max(map(len, prompts)))
        requests = [Request(prompt, number, longest) for number, prompt in enumerate(prompts)]
        own = decode(self.target, requests, DecodeSettings(batch_size=len(requests))).generations
        gaps = [gap for one, answer in zip(own, self._answers(requests, None), strict=True)
                if (gap := self._gap(one, answer.tokens)) is not None]
        if gaps:
            log.warning("%d of %d answers of %s leave the target's own at a near-tie (logits that differ by up to "
                        "%.2g)", len(gaps), len(own), self.engine, max(gaps))

    def _gap(self, own: Generation, answer: Sequence[int]) -> float | None:
        """Gap between the logits of the first tokens that differ; None for equal answers. UserError if rounding does
        not explain it."""
        # Neither goes on after the other's end: both end at an end token or at the limit.
        pairs = zip(own.tokens, answer, strict=False)
        place = next((place for place, (mine, other) in enumerate(pairs) if mine != other), None)
        if place is None:
            return None
        before_N = torch.tensor([*own.request.tokens, *own.tokens[:place]])
        text: Features = pad([Piece(tokens_N=before_N, supervised_N=torch.ones_like(before_N, dtype=torch.bool))])
        with torch.no_grad():
            final_BLD = self.target.encode(text.to(self.target.device)).final()
            logits_V = self.target.logits(final_BLD[0, -1]).float()
        best, chosen = (float(logits_V[token]) for token in (own.tokens[place], answer[place]))
        gap, bound = best - chosen, STEPS * torch.finfo(torch.bfloat16).eps * abs(best)
        if gap > bound:
            words = [self.target.tokenizer.decode([token]) for token in (answer[place], own.tokens[place])]
            raise UserError(
                f"{self.engine} does not answer as the target does: after {place} tokens of an answer to "
                f"{PROBES[own.request.index]!r} it writes {words[0]!r} where the target writes {words[1]!r}, whose "
                f"logit is larger by {gap:.2g} (rounding explains {bound:.2g}); {self.remedy}")
        return gap

    # Answers ---------------------------------------------------------------------------------------------------------

    def seed_of(self, request: Request) -> int:
        """Seed of a request's random stream; 31 bits, since some engines take no larger one."""
        digest = hashlib.sha256(f"{self.settings.seed} {request.index}".encode()).digest()
        return int.from_bytes(digest[:4], "little") >> 1

    def generation(self, request: Request, tokens: list[int]) -> Generation:
        """A whole answer of the engine, which ended at an end token or at the limit."""
        return Generation(request, tokens, finish="eos" if tokens[-1] in self.target.eos_ids else "length")

    def decoded(self, requests: Sequence[Request], deadline: float | None, recorder: StateRecorder | None
                ) -> DecodeResult:
        """The answers to requests by the engine, whole, without states to record."""
        started = time.perf_counter()
        found = self._answers(requests, deadline)
        return DecodeResult(found, DecodeStats(seconds=time.perf_counter() - started))
