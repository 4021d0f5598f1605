"""Positions of sampled tokens in the target's distribution: uniform where drafting by sampling is exact.

Let p be the target's distribution after a text, x the token that was emitted there, and v a uniform number. If x was
drawn from p, the position u = (sum of p over the tokens likelier than x) + v p(x) is uniform on [0, 1], and independent
of all positions before it (Rosenblatt, 1952). So the positions of all tokens of all answers are one sample of the
uniform distribution if drafting is exact, and lie too low or too high where it prefers some tokens.

Shapes: T tokens of an answer, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from ...modules import DecodeSettings, Request, Target
from ...modules.verification.sampling import probabilities, widened
from .uniformity import IMPOSSIBLE

ROUNDING = 2e-3
"""Distance by which half precision may move the positions at temperature 1; divided by the temperature below it. In
bfloat16 the positions of exact answers were about a third of it apart at temperatures from 0.03 to 0.1."""
GREATEST_ROUNDING = 0.03
"""Its bound: what a token's rank can lose to rounding does not grow for ever."""
_POSITIONS = 0xD157
"""Separates these uniform numbers from all that decoding uses."""


@torch.no_grad()
def positions(target: Target, request: Request, answer: Sequence[int], settings: DecodeSettings) -> tuple[float, ...]:
    """The position of each token of a sampled answer in the target's distribution, by the untouched model.

    A token that the filters leave no probability is at IMPOSSIBLE.

    Args:
        target: the model whose distribution it is.
        request: prompt, index and temperature.
        answer: its tokens.
        settings: filters, penalty and seed.
    """
    probs_TV = _distributions(target, request, answer, settings)
    own_T1 = probs_TV.gather(-1, torch.tensor(answer, device=probs_TV.device)[:, None])
    likelier_T = probs_TV.masked_fill(probs_TV <= own_T1, 0.0).sum(-1)
    # Tokens that are equally likely stand in the order of their ids.
    before_TV = torch.arange(probs_TV.shape[-1], device=probs_TV.device) < torch.tensor(
        answer, device=probs_TV.device)[:, None]
    likelier_T = likelier_T + probs_TV.masked_fill((probs_TV != own_T1) | ~before_TV, 0.0).sum(-1)
    key = np.array([settings.seed % 2**64, request.index % 2**64, _POSITIONS], dtype=np.uint64)
    chance_T = torch.from_numpy(np.random.default_rng(key).random(len(answer))).to(probs_TV)
    places_T = (likelier_T + chance_T * own_T1[:, 0]).clamp(0.0, 1.0)
    return tuple(torch.where(own_T1[:, 0] > 0, places_T, IMPOSSIBLE).tolist())


def _distributions(target: Target, request: Request, answer: Sequence[int], settings: DecodeSettings) -> Tensor:
    """The target's distribution before each token of an answer, [T, V], float64."""
    tokens = torch.tensor([[*request.tokens, *answer]], device=target.device)
    with target.native() as model:
        logits_TV = model(input_ids=tokens, use_cache=False).logits[0, len(request.tokens) - 1 : -1]
    logits_TV = widened(logits_TV)
    if settings.repetition_penalty != 1.0:
        penalise = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)
        logits_TV = torch.cat([penalise(tokens[:, : len(request.tokens) + place], logits_TV[place : place + 1])
                               for place in range(len(answer))])
    temperature = torch.tensor(request.temperature, device=target.device)
    return probabilities(logits_TV, temperature, settings.top_k, settings.top_p, settings.min_p).double()


def rounding(dtype: torch.dtype, temperature: float) -> float:
    """The distance between distributions that the rounding of a number format explains; none in float32 and wider."""
    if dtype in (torch.float32, torch.float64) or temperature == 0:
        return 0.0
    return min(GREATEST_ROUNDING, ROUNDING / min(1.0, temperature))
