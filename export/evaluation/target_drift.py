"""Drift of an adapted target: how much its answers differ from the original target's.

Shapes: B rows, L positions, N tokens of the original's answers, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from ...modules import DecodeSettings, Features, Request, Target, UserError, decode
from .methods import PromptSets
from .results import EvaluationRun

CHUNK = 128  # Positions whose whole distributions are formed at once


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Difference between the adapted and the original target, on the original's greedy answers to held-out prompts."""

    prompts: int  # Answers compared
    tokens: int  # Their tokens, at each of which the distributions of both targets are compared
    kl: float  # Mean KL(original || adapted) of the next token's distributions, in nats
    agreement: float  # Share of the tokens that the adapted target would also choose after the same text


@torch.no_grad()
def measure_drift(original: Target, adapted: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
                  batch_size: int = 8) -> Drift:
    """Let the original answer the prompts greedily, and compare both targets' distributions at each token.

    Raises:
        UserError: if there is no prompt.
    """
    if not prompts:
        raise UserError("there is no prompt to measure the target's drift on; give at least one")
    requests = [Request(tuple(prompt), index, max_new_tokens) for index, prompt in enumerate(prompts)]
    answers = decode(original, requests, DecodeSettings(batch_size=batch_size)).generations
    # On the original's own answers: those are the texts whose distribution a user would miss.
    divergence, agreed, tokens = 0.0, 0, 0
    for answer in answers:
        prompt = answer.request.tokens
        row = Features.from_rows([([*prompt, *answer.tokens], [False] * len(prompt) + [True] * len(answer.tokens))])
        own, theirs = (target.encode(row).final()[0, len(prompt) - 1 : -1] for target in (original, adapted))
        # Two distributions over a large vocabulary in double precision: a long answer at once would fill the memory.
        for start in range(0, len(own), CHUNK):
            log_p_NV, log_q_NV = (target.logits(states[start : start + CHUNK]).double().log_softmax(-1)
                                  for target, states in ((original, own), (adapted, theirs)))
            divergence += float(torch.nn.functional.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True))
            chosen_N = torch.tensor(answer.tokens[start : start + CHUNK], device=log_q_NV.device)
            agreed += int((log_q_NV.argmax(-1) == chosen_N).sum())
        tokens += len(answer.tokens)
    return Drift(prompts=len(answers), tokens=tokens, kl=divergence / tokens, agreement=agreed / tokens)


def with_drift(run: EvaluationRun, original: Target, adapted: Target, prompt_sets: PromptSets, *, max_new_tokens: int,
               limit: int = 24) -> EvaluationRun:
    """The same run with its target's drift, measured on the first turns of its own questions.

    Args:
        limit: most questions of each set, spread over it.
    """
    prompts = []
    for questions in prompt_sets.values():
        count = min(limit, len(questions))
        prompts += [questions[place * len(questions) // count].prompt([]) for place in range(count)]
    found = measure_drift(original, adapted, prompts, max_new_tokens=max_new_tokens)
    return replace(run, header={**run.header, "drift": asdict(found)})
