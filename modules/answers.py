"""Held-out answers written anew: a target that has changed no longer says what the stored ones hold."""

from collections.abc import Sequence

from .decode import decode
from .features import Features
from .replay import Replay
from .requests import DecodeSettings
from .target import Target


def answered_anew(target: Target, features: Sequence[Features], batch_size: int = 16) -> list[Features]:
    """The prompts of stored conversations with the greedy answers that `target` gives now, one row each, encoded.

    These answers are the target's own, so that drafts can be replayed on them exactly. Each is at most as long as the
    one it stands for.

    Args:
        target: writes and encodes the answers.
        features: encoded conversations, one a row; each of their answers is a prompt of its own here.
        batch_size: answers written at a time; it changes none of them.
    """
    requests = Replay(target, features).requests
    written = decode(target, requests, DecodeSettings(batch_size=batch_size)).generations
    rows = [([*one.request.tokens, *one.tokens], [False] * len(one.request.tokens) + [True] * len(one.tokens))
            for one in written]
    return [target.encode(Features.from_rows([row])) for row in rows]
