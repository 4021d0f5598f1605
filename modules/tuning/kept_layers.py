"""Search for the layers of a target that draft for it best while the others are skipped (Draft & Verify,
arXiv:2309.08168; SWIFT, arXiv:2410.06916).

Whole layers are kept or skipped. A choice is judged by one pass of its layers over each answer, as SWIFT judges, and by
seconds of steps on this machine: tokens a second of the chain whose length is best for it.

Shapes: T tokens of a text, K tokens of its answer, V vocabulary."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..baselines.registry import LayerDraft
from ..target.model import Target
from ..target.partial_passes import skipping
from ..token_tree import Topology
from .step_timing import measure_cost

LONGEST = 6  # Most tokens of a chain
Text = tuple[Sequence[int], int]  # Tokens of a prompt with its answer, and how many the prompt has
Speeds = Callable[[int, int, float], float]
"""Speed-up over plain decoding of a chain by so many layers, of so many tokens, with such an accepted length."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Layers that draft, with what is predicted of them."""

    kept: tuple[int, ...]  # The layers, ascending
    tokens: int  # Tokens of a chain, at least 1
    speed_up: float  # Predicted speed-up over plain decoding


@torch.no_grad()
def search(target: Target, texts: Sequence[Text], speeds: Speeds, seconds: float, *, seed: int = 0,
           clock: Callable[[], float] = time.monotonic) -> tuple[Choice, int]:
    """(the best choice found, how many were judged) in so many seconds, one at least. First come all early exits, every
    second layer and all layers; from the best of them one layer is added, left out or exchanged as long as that is
    better, in random order. Raises UserError for targets whose layers cannot be run apart."""
    target.require_plain_layers("the search for layers")
    count, chance, ends_at = target.num_layers, random.Random(seed), clock() + seconds
    # From the middle on: a few minutes for a large target end before all of them are judged.
    first, *others = sorted(range(1, count + 1), key=lambda one: abs(2 * one - count))
    best = judge(target, texts, tuple(range(first)), speeds)
    former: Choice | None = None
    judged = {best.kept}

    def better(kept: tuple[int, ...], than: Choice) -> Choice:
        """The choice of these layers if it is new and better."""
        if not kept or kept in judged or clock() >= ends_at:
            return than
        judged.add(kept)
        return max(than, judge(target, texts, kept, speeds), key=lambda one: one.speed_up)

    for kept in (*(range(exit_) for exit_ in others), sorted({*range(0, count, 2), count - 1})):
        best = better(tuple(kept), best)
    while best != former and clock() < ends_at:
        former = best
        toggled = [(one,) for one in range(count)]
        exchanged = [(one, other) for one in range(count) for other in range(one)]
        for changes in (*chance.sample(toggled, count), *chance.sample(exchanged, len(exchanged))):
            # An exchange of two kept layers would leave out both.
            if len(changes) == 1 or (changes[0] in best.kept) != (changes[1] in best.kept):
                best = better(tuple(sorted({*best.kept} ^ {*changes})), best)
    return best, len(judged)


def judge(target: Target, texts: Sequence[Text], kept: tuple[int, ...], speeds: Speeds) -> Choice:
    """The chain of the best length by these layers. Its accepted length is the mean over all places of the answers: as
    many tokens of a chain are right there as the next tokens agree, each after the text before it."""
    runs: list[int] = []
    with target.native() as model, skipping(target.layers, kept):
        for tokens, start in texts:
            tokens_T = torch.tensor(tokens, device=target.device)
            logits_TV = model(tokens_T[None, :-1], use_cache=False).logits[0]
            right, run = (logits_TV[start - 1 :].argmax(-1) == tokens_T[start:]).tolist(), 0
            for hit in reversed(right):
                run = run + 1 if hit else 0
                runs.append(run)
    choices = []
    for length in range(1, LONGEST + 1):
        accepted = 1 + sum(min(run, length) for run in runs) / max(1, len(runs))
        choices.append(Choice(kept=kept, tokens=length, speed_up=speeds(len(kept), length, accepted)))
    return max(choices, key=lambda one: one.speed_up)


def measured_speeds(target: Target, seconds: float) -> Speeds:
    """Speed-ups by steps that are timed on this machine: with one layer that drafts and with all of them, between which
    the seconds of a draft grow by the layer."""
    count = target.num_layers
    one, whole = (measure_cost(target, LayerDraft(target, range(layers)), Topology.chain(LONGEST), seconds=seconds / 2)
                  for layers in (1, count))

    def speed_up(layers: int, tokens: int, accepted: float) -> float:
        share, nodes = (layers - 1) / max(1, count - 1), 1 + tokens
        drafting = (1 - share) * one.draft_seconds(nodes) + share * whole.draft_seconds(nodes)
        return accepted * one.pass_seconds(1) / (one.pass_seconds(nodes) + drafting)

    return speed_up
