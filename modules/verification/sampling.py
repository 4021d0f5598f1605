"""The target's processed distribution, and its own choice of the next token.

The choice of the token at place t of a row uses the row's t-th uniform number and nothing else random. So a sampled
row is the same token for token in any batch, with any drafter and without one.

Shapes: B rows, N nodes, M nodes of a pass, V target vocabulary, R sampled rows.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from ..config_checks import Such
from ..number_formats import widened

LEAST_TEMPERATURE = 1e-3
"""Smallest temperature of a sampled row. Divided by it, logits of up to 100 are exact to 0.01 nats in float32, in which
transformers divides too; below it the second likeliest token needs a gap under a hundredth of a nat to be drawn once in
20,000 times."""
GREATEST_TEMPERATURE = 1e3  # Largest one: all tokens are about equally likely, and far above it float32 loses the rest
TEMPERATURES = f"0 (greedy) or from {LEAST_TEMPERATURE:g} to {GREATEST_TEMPERATURE:g}"  # For messages
_NUCLEUS_CANDIDATES = (512, 4096)
"""Tokens among which a nucleus is looked for first, and after them. Of the prompts that a target of 135M parameters
writes, one nucleus of 0.95 in five is larger than the first number, one in eighty than the second."""
_ROWS_TOGETHER = 8
"""Distributions that a CPU forms at a time, so that they stay in its cache: next to another program that needs the
memory, those of 40 rows took two to six times as long at once."""
_ENTRIES_TOGETHER = 1 << 26
"""Entries of the distributions that an accelerator forms at a time: 256 MiB of float32. Those of 32 rows with 64 nodes
and a vocabulary of 152,000 would take 1.2 GB for each of the ten or so that are needed at once."""
_STRIPES = 16  # Entries of a stripe, of which all are looked at for the largest ones or none
_BLOCK = 128  # Entries of a block in which the largest logit, or the drawn token, is looked for


def is_temperature(value: float) -> bool:
    """True for the temperatures of a request: 0 and those within the bounds."""
    return value == 0 or LEAST_TEMPERATURE <= value <= GREATEST_TEMPERATURE


Temperature = Annotated[float, Such(is_temperature, TEMPERATURES)]
Temperatures = Annotated[tuple[Temperature, ...], Such(len, f"one or more numbers, each {TEMPERATURES}")]
"""A setting's sampling temperature, and several of them."""


@dataclass(frozen=True, kw_only=True)
class SamplingSetting:
    """The sampling of an answer, as far as it decides the target's distribution: filters of a greedy answer decide
    nothing and are left out, so that equal settings compare equal."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """The k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """The likeliest tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """The tokens with at least this share of the likeliest one's probability; 0 is all."""
    repetition_penalty: float = 1.0
    """The penalty of tokens that occurred; 1 is none."""

    def __post_init__(self) -> None:
        if self.temperature == 0:
            # The argmax survives every filter.
            for name, value in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
                object.__setattr__(self, name, value)

    def __str__(self) -> str:
        unset = SamplingSetting(temperature=self.temperature)
        filters = [f"{name} {value:g}" for name, value in vars(self).items() if value != getattr(unset, name)]
        return ", ".join([f"temperature {self.temperature:g}", *filters])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Processing of the target's logits in transformers' order: temperature, top-k, top-p, min-p."""

    temperature_B: Tensor  # [B], float32; 0 is greedy, others from LEAST_TEMPERATURE to GREATEST_TEMPERATURE
    top_k: int = 0  # Keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # Keep the smallest set of likeliest tokens whose probabilities reach this sum; 1.0 keeps all
    min_p: float = 0.0  # Keep tokens with at least this share of the likeliest one's probability; 0.0 keeps all
    sampling_rows: tuple[int, ...] = ()  # Rows with a temperature above 0, known on the host

    def distribution(self, logits_BNV: Tensor) -> Tensor:
        """Distribution of the next token, [B, N, V], float32 or wider; in greedy rows all of it is on the argmax."""
        greedy_BNV = torch.zeros_like(logits_BNV, dtype=torch.promote_types(logits_BNV.dtype, torch.float32))
        greedy_BNV = greedy_BNV.scatter(-1, logits_BNV.argmax(-1, keepdim=True), 1.0)
        if not self.sampling_rows:
            return greedy_BNV
        sampling_B11 = (self.temperature_B > 0)[:, None, None]
        return torch.where(sampling_B11, self.processed(logits_BNV, self.divisor_B11), greedy_BNV)

    @property
    def divisor_B11(self) -> Tensor:
        """The temperature of rows that sample, 1 in greedy ones, [B, 1, 1]."""
        return torch.where(self.temperature_B > 0, self.temperature_B, 1.0)[:, None, None]

    def processed(self, logits_BNV: Tensor, temperature_B11: Tensor) -> Tensor:
        """The distributions of rows that sample, [B, N, V]."""
        return probabilities(logits_BNV, temperature_B11, self.top_k, self.top_p, self.min_p)


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The target's processed distribution [..., V] in float32 (float64 logits stay so), at temperatures above 0.

    `top_k` keeps the k likeliest tokens and all that equal the last of them, 0 all; `top_p` the smallest set of
    likeliest tokens whose probabilities reach this sum; `min_p` those with at least this share of the likeliest
    one's."""
    scaled = widened(logits) / temperature
    if 0 < top_k < scaled.shape[-1]:
        bound = _largest(scaled, top_k)[..., -1:]
        scaled = scaled.masked_fill(scaled < bound, -torch.inf)
    probs = _nucleus(scaled, top_p) if top_p < 1.0 else scaled.softmax(-1)
    if min_p > 0.0:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probabilities reach `top_p`, renormalised.

    Of tokens as likely as the last one kept, those with the highest ids stay, so that neither the order of a sort nor
    the rest of the batch decides; transformers leaves it to its sort, which does the same in small vocabularies."""
    probs = scaled.softmax(-1)
    # Rounding leaves the sum next to 1. What is cut off is at most 1 - top_p, as transformers has it.
    total = _blocked(probs).sum(-1, dtype=torch.float64).sum(-1, keepdim=True)
    end = _end(probs, top_p + (total - 1))
    kept = probs >= end.last
    # Ties are rare in float32, and looking at them takes longer than all the rest.
    if _sorted_whole(probs) or bool(end.tied.any()):
        equal = probs == end.last
        wanted = end.count - (probs > end.last).sum(-1, keepdim=True)
        kept &= ~equal | (equal.sum(-1, keepdim=True) - equal.cumsum(-1) < wanted)
    nucleus = torch.where(kept, probs, 0.0)
    return nucleus / nucleus.sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class _End:
    """The end of the fewest first entries that reach a sum, at least one; each [..., 1]."""

    last: Tensor  # The last of them
    count: Tensor  # Their number
    tied: Tensor  # True where the entry after the last equals it

    @classmethod
    def of(cls, ordered: Tensor, bound: Tensor) -> "_End":
        """Of entries in descending order and a sum, which is added in float64."""
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        count = (before < bound).sum(-1, keepdim=True).clamp(min=1)
        last, after = (ordered.gather(-1, places.clamp(max=ordered.shape[-1] - 1)) for places in (count - 1, count))
        return cls(last=last, count=count, tied=(count < ordered.shape[-1]) & (last == after))


def _end(probs: Tensor, bound: Tensor) -> _End:
    """The end of the smallest set of likeliest tokens that reaches a sum, float64 [..., 1]. On a CPU sorting the whole
    vocabulary costs more than the target's pass; ordering the first few hundred tokens is mostly enough."""
    size = probs.shape[-1]
    if _sorted_whole(probs):
        return _End.of(probs.sort(dim=-1, descending=True).values, bound)
    rows_RV, bound_R1 = probs.reshape(-1, size), bound.reshape(-1, 1)
    found = _End.of(_largest(rows_RV, _NUCLEUS_CANDIDATES[0]), bound_R1)
    for former, number in pairwise((*(few for few in _NUCLEUS_CANDIDATES if few < size), size)):
        # The entry after the last must be among them too.
        short_R = (found.count == former)[:, 0]
        if not bool(short_R.any()):
            break
        more = _End.of(_largest(rows_RV[short_R], number), bound_R1[short_R])
        for name, values in vars(more).items():
            getattr(found, name)[short_R] = values
    return _End(**{name: values.view_as(bound) for name, values in vars(found).items()})


def _sorted_whole(probs: Tensor) -> bool:
    """True for vocabularies that are sorted whole: small ones, and all on an accelerator, which would wait for the
    host to learn whether fewer entries are enough."""
    return probs.device.type != "cpu" or probs.shape[-1] <= _NUCLEUS_CANDIDATES[0]


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest entries in descending order, [..., count]: they lie in the stripes whose maxima are largest.
    On a CPU finding these takes a tenth of the time of torch's `topk`, which then looks at those stripes alone."""
    size = values.shape[-1]
    if values.device.type != "cpu" or size % _STRIPES or 3 * count > size // _STRIPES:
        return values.topk(count, dim=-1).values
    striped = values.reshape(*values.shape[:-1], _STRIPES, size // _STRIPES)
    # An entry among the largest `count` lies in one of the `count` stripes with the largest maxima.
    best = striped.amax(-2).topk(count, dim=-1, sorted=False).indices
    inside = striped.gather(-1, best[..., None, :].expand(*best.shape[:-1], _STRIPES, count))
    return inside.flatten(-2).topk(count, dim=-1).values


def log_probabilities(logits_BMV: Tensor, tokens_BM: Tensor) -> Tensor:
    """The raw log-probability of one token at each node, [B, M]: of the softmax of the target's logits, before penalty,
    temperature and filters."""
    wide_BMV = widened(logits_BMV)
    return wide_BMV.gather(-1, tokens_BM[..., None])[..., 0] - wide_BMV.logsumexp(-1)


def penalise(logits_BMV: Tensor, penalty: float, seen_BV: Tensor, paths_BMN: Tensor) -> Tensor:
    """transformers' repetition penalty on raw logits [B, M, V], for the tokens that the row has read and those of
    `paths_BMN`, from the root to each node; repeat any of these to fill up.

    A logit of a token that occurred is divided by the penalty when positive and multiplied when negative, once however
    often it occurred (arXiv:1909.05858, eq. 2)."""
    # A mark for each token, so that one that both the text and the path hold is penalised once.
    occurred_BMV = seen_BV[:, None].expand_as(logits_BMV).scatter(-1, paths_BMN, True)
    penalised_BMV = torch.where(logits_BMV < 0, logits_BMV * penalty, logits_BMV / penalty)
    return torch.where(occurred_BMV, penalised_BMV, logits_BMV)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by the inverse of the distribution function, summed in float64, at `uniforms` in [0, 1). It is looked up
    at the ends of blocks of tokens, then inside one: on a CPU a running sum over every token takes ten times as
    long."""
    blocked = _blocked(probs)
    ends = blocked.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = uniforms.double()[..., None] * ends[..., -1:]
    block = _passing(ends, wanted)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocked.gather(-2, block[..., None].expand(*block.shape, blocked.shape[-1]))[..., 0, :]
    return (block * blocked.shape[-1] + _passing(inside.double().cumsum(-1), wanted - before))[..., 0]


def _passing(ends: Tensor, wanted: Tensor) -> Tensor:
    """The first place whose running sum is above `wanted`, [..., 1]: never one that adds nothing to the sum, not even
    where rounding put `wanted` at the last sum. Where the sums are zero or NaN it is some place."""
    below = torch.nextafter(ends[..., -1:], torch.zeros_like(wanted))
    place = torch.searchsorted(ends, torch.minimum(wanted, below).clamp(min=0), right=True)
    return place.clamp(max=ends.shape[-1] - 1)


def _blocked(values: Tensor) -> Tensor:
    """The entries in blocks, [..., V / block, block]; those of a vocabulary that cannot be divided are one block."""
    size = values.shape[-1]
    return values.reshape(*values.shape[:-1], -1, size if size % _BLOCK else _BLOCK)


def argmax(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)`, [...], in two steps: torch's own takes ten times as long on a CPU as finding the maximum. It
    is that of the first block that has it; a NaN counts as the largest, as it does there."""
    blocked = _blocked(logits)
    if logits.device.type != "cpu" or blocked.shape[-2] == 1:
        return logits.argmax(-1)
    best = blocked.amax(-1).argmax(-1)
    inside = blocked.gather(-2, best[..., None, None].expand(*best.shape, 1, _BLOCK))
    found: Tensor = best * _BLOCK + inside[..., 0, :].argmax(-1)
    return found


def node_groups(rows: int, nodes: int, entries: int) -> list[slice]:
    """Consecutive groups of nodes such that the distributions of one group fit into _ENTRIES_TOGETHER in all rows."""
    size = max(1, _ENTRIES_TOGETHER // (rows * entries))
    return [slice(start, min(start + size, nodes)) for start in range(0, nodes, size)]


def choose_at(logits_BNV: Tensor, uniforms_BN: Tensor, sampling: Sampling, nodes_B: Tensor) -> Tensor:
    """`choose` at one node of each row, [B]."""
    rows_B = torch.arange(len(nodes_B), device=nodes_B.device)
    return choose(logits_BNV[rows_B, nodes_B, None], uniforms_BN[rows_B, nodes_B, None], sampling)[:, 0]


def choose(logits_BNV: Tensor, uniforms_BN: Tensor, sampling: Sampling) -> Tensor:
    """The target's own next token at every node, [B, N]: the argmax in greedy rows, a draw in the others."""
    chosen_BN = argmax(logits_BNV)
    if not sampling.sampling_rows:
        return chosen_BN
    if logits_BNV.device.type != "cpu":
        # Greedy rows too: an accelerator would wait for a list of the others.
        drawn_BN = torch.cat([
            draw(sampling.processed(logits_BNV[:, nodes], sampling.divisor_B11), uniforms_BN[:, nodes])
            for nodes in node_groups(*logits_BNV.shape)], dim=1)
        return torch.where(sampling.temperature_B[:, None] > 0, drawn_BN, chosen_BN)
    # A few rows at a time, so that their distributions stay in the cache.
    together = max(1, _ROWS_TOGETHER // logits_BNV.shape[1])
    for start in range(0, len(sampling.sampling_rows), together):
        rows_R = list(sampling.sampling_rows[start : start + together])
        probs_RNV = sampling.processed(logits_BNV[rows_R], sampling.temperature_B[rows_R][:, None, None])
        chosen_BN[rows_R] = draw(probs_RNV, uniforms_BN[rows_R])
    return chosen_BN
