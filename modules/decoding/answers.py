"""Decoding of given requests with the one loop: all of them at once, or one pass by pass."""

from collections.abc import Callable, Iterator, Sequence

from ..interfaces.proposer import Proposer
from ..policies.base import Policy
from .loop import Loop, Observer
from .requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request
from .row_errors import DecodeError
from .state_recorder import StateRecorder
from .verifier import Verifier


def decode(target: Verifier, requests: Sequence[Request], settings: DecodeSettings, *, drafter: Proposer | None = None,
           policy: Policy | None = None, on_tokens: Callable[[Generation, list[int], bool], None] | None = None,
           deadline: float | None = None, observer: Observer | None = None, recorder: StateRecorder | None = None
           ) -> DecodeResult:
    """Continue all requests.

    Args:
        target: a `Target`, or a `Replay` of stored text.
        requests: prompts with their limits; their indices must differ.
        settings: batch size, sampling filters, stop texts.
        drafter: proposes tokens; None decodes plainly.
        policy: how its trees grow.
        on_tokens: called with (generation, its new tokens, whether it finished) after every pass.
        deadline: value of `time.monotonic()` after which no waiting request is started, and answers end, with `finish`
            "length", but those that lack of their request's `least` tokens.
        observer: called after every pass that verifies.
        recorder: gets the target's states at every token of the requests and their answers.

    Raises:
        UserError: if two requests have the same index, or the policy makes no sense with the drafter.
        DecodeError: if a request is wrong (an empty prompt, one that does not fit the target's context, a negative
            temperature), or a row went wrong on the way (NaN logits, a token or tree that cannot be verified). It is
            raised when all other rows have finished; its `result` holds every generation.
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
    """Continue one request and yield its new tokens pass by pass, those of a pass after `observer` was called.

    Args:
        target: a `Target`, or a `Replay` of stored text.
        request: the prompt with its limit.
        settings: sampling filters, stop texts.
        drafter: proposes tokens; None decodes plainly.
        policy: how its trees grow.
        observer: called after every pass that verifies.
        stats: gets the counts and times when the answer has ended.

    Raises:
        DecodeError: as `decode` does, after the tokens that came before the fault.
    """
    loop = Loop(target, [request], settings, drafter=drafter, policy=policy, observer=observer)
    for generation, tokens, _done in loop.run():
        # A pass in which a fault is found may have tokens from before it: they are right, and `decode` keeps them.
        if tokens or generation.finish != "error":
            yield tokens
        if generation.finish == "error":
            raise DecodeError(DecodeResult([generation], loop.stats))
    if stats is not None:
        stats.add(loop.stats)
