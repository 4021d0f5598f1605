"""Held-out answers of a target, encoded."""

from draftsmith.modules import DecodeSettings, Features, Request, Target, decode


def encoded_answers(target: Target, requests: list[Request]) -> list[Features]:
    result = decode(target, requests, DecodeSettings(batch_size=4))
    rows = [([*g.request.tokens, *g.tokens], [False] * len(g.request.tokens) + [True] * len(g.tokens))
            for g in result.generations]
    return [target.encode(Features.from_rows(rows[:3])), target.encode(Features.from_rows(rows[3:]))]
