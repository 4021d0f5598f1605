"""The target's processed distribution, its own choice of the next token, and the random numbers of a run.

Each number is a function of (seed, request, place, purpose). The choice of the token at place t of a row uses the row's
t-th number of `uniform_stream` and nothing else random, so a sampled row is the same token for token in any batch, with
any drafter and without one. Drafting by sampling and rejection need more numbers: they come from Philox4x32-10 (Salmon
et al., SC 2011), evaluated on the device, so that neither the batch, nor the order of the queue, nor the host changes
them.

Shapes: B rows, N nodes, M nodes of a pass, F nodes asked for, V target vocabulary, Q draft vocabulary, R sampled rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from ..config_checks import Such

LEAST_TEMPERATURE = 1e-3
"""Smallest temperature of a sampled row. Divided by it, logits of up to 100 are exact to 0.01 nats in float32, in which
transformers divides too; below it the second likeliest token needs a gap under a hundredth of a nat to be drawn once in
20,000 times."""
GREATEST_TEMPERATURE = 1e3  # Largest one: all tokens are about equally likely, and far above it float32 loses the rest
TEMPERATURES = f"0 (greedy) or from {LEAST_TEMPERATURE:g} to {GREATEST_TEMPERATURE:g}"  # For messages
_ROWS_TOGETHER = 2
"""Distributions that a CPU forms at a time, so that they stay in its cache: eight nuclei of 49,152 tokens took twice as
long at once as two by two."""
_ENTRIES_TOGETHER = 1 << 24
"""Entries of the distributions that an accelerator forms at a time: 64 MiB of float32 for each of ten or so tensors."""
_BLOCK = 128  # Entries of a block in which the largest logit, or the drawn token, is looked for
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_TESTS, _NOISE, _KEYS = 1, 2, 3


def widened(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 if they already are, in which transformers processes them."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def on_host(values: Tensor) -> bool:
    """True on a CPU, where the host knows a value once it is computed. On an accelerator it would wait for it, and
    neither a CUDA graph nor a compiler can ask at all."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


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
    top_k: int = 0  # The k likeliest tokens; 0 is all
    top_p: float = 1.0  # The likeliest tokens whose probabilities reach this sum
    min_p: float = 0.0  # The tokens with at least this share of the likeliest one's probability; 0 is all
    repetition_penalty: float = 1.0  # The penalty of tokens that occurred; 1 is none

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
    """Processing of the target's logits in transformers' order: penalty and biases, temperature, top-k, top-p, min-p.
    The first two depend on the node, and `at` applies them; all else takes logits that have them."""

    temperature_B: Tensor  # [B], float32; 0 is greedy, others from LEAST_TEMPERATURE to GREATEST_TEMPERATURE
    top_k: int = 0  # Keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # Keep the smallest set of likeliest tokens whose probabilities reach this sum; 1.0 keeps all
    min_p: float = 0.0  # Keep tokens with at least this share of the likeliest one's probability; 0.0 keeps all
    sampling_rows: tuple[int, ...] = ()  # Rows that may have a temperature above 0, known on the host
    adjust: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # Of logits [R, M, V], rows [R] and nodes [R, M]

    def adjusted(self, logits_RMV: Tensor, rows_R: Tensor, nodes_RM: Tensor) -> Tensor:
        """The logits at some nodes of some rows with penalty and biases, if there are any."""
        return logits_RMV if self.adjust is None else self.adjust(logits_RMV, rows_R, nodes_RM)

    def at(self, logits_BNV: Tensor, rows_R: Tensor, nodes_R: Tensor) -> tuple["Sampling", Tensor]:
        """(the processing of some rows, which may repeat; the adjusted logits at one node of each, [R, 1, V])."""
        adjusted_R1V = self.adjusted(logits_BNV[rows_R, nodes_R, None], rows_R, nodes_R[:, None])
        return replace(self, temperature_B=self.temperature_B[rows_R]), adjusted_R1V

    def distribution_at(self, logits_BNV: Tensor, rows_R: Tensor, nodes_R: Tensor) -> Tensor:
        """The distribution at one node of each of some rows, [R, V], float64."""
        sampling, logits_R1V = self.at(logits_BNV, rows_R, nodes_R)
        return sampling.distribution(logits_R1V)[:, 0].double()

    def distribution(self, logits_BNV: Tensor) -> Tensor:
        """Distribution of the next token, [B, N, V], float32 or wider; in greedy rows all of it is on the argmax."""
        greedy_BNV = torch.zeros_like(logits_BNV, dtype=torch.promote_types(logits_BNV.dtype, torch.float32))
        greedy_BNV = greedy_BNV.scatter(-1, logits_BNV.argmax(-1, keepdim=True), 1.0)
        if not self.sampling_rows:
            return greedy_BNV
        sampling_B11 = (self.temperature_B > 0)[:, None, None]
        return torch.where(sampling_B11, self.processed(logits_BNV, self.temperature_B), greedy_BNV)

    def processed(self, logits_BNV: Tensor, temperature_B: Tensor) -> Tensor:
        """The distributions of rows that sample, [B, N, V]; some others of greedy rows."""
        divisor_B11 = torch.where(temperature_B > 0, temperature_B, 1.0)[:, None, None]
        return probabilities(logits_BNV, divisor_B11, self.top_k, self.top_p, self.min_p)


def probabilities(logits: Tensor, temperature: Tensor, top_k: int = 0, top_p: float = 1.0,
                  min_p: float = 0.0) -> Tensor:
    """The target's processed distribution [..., V] in float32 (float64 logits stay so), at temperatures above 0.
    `top_k` keeps the k likeliest tokens and all that equal the last of them, 0 all; `top_p` the smallest set of
    likeliest tokens whose probabilities reach this sum; `min_p` those with at least this share of the likeliest
    one's."""
    scaled = widened(logits) / temperature
    if 0 < top_k < scaled.shape[-1]:
        bound = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < bound, -torch.inf)
    probs = _nucleus(scaled, top_p) if top_p < 1.0 else scaled.softmax(-1)
    if min_p > 0.0:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probabilities reach `top_p`, renormalised. Of tokens as likely as the
    last one kept, those with the highest ids stay, so that neither the order of a sort nor the rest of the batch
    decides; transformers leaves it to its sort, which does the same in small vocabularies."""
    probs = scaled.softmax(-1)
    # Rounding leaves the sum next to 1. What is cut off is at most 1 - top_p, as transformers has it, and never all.
    total = probs.sum(-1, keepdim=True, dtype=torch.float64)
    bound = (top_p + (total - 1)).clamp(min=torch.finfo(torch.float64).tiny)
    last = _last(probs, bound)
    nucleus = probs * (probs >= last)
    # Ties are rare in float32, and looking at them takes longer than all the rest.
    if not on_host(probs) or bool((nucleus.sum(-1, keepdim=True, dtype=torch.float64) - last >= bound).any()):
        equal = probs == last
        likelier = (probs * (probs > last)).sum(-1, keepdim=True, dtype=torch.float64)
        after = equal.sum(-1, keepdim=True) - equal.cumsum(-1)
        nucleus = nucleus * (~equal | (likelier + after * last.double() < bound))
    return nucleus / nucleus.sum(-1, keepdim=True)


def _last(probs: Tensor, bound: Tensor) -> Tensor:
    """The probability of the last of the fewest likeliest tokens that reach a sum above 0, float64 [..., 1]."""
    if on_host(probs):
        # Sorted by numpy, which takes a thirtieth of the time of torch's sort.
        ordered = torch.from_numpy(np.sort(probs.detach().numpy(), axis=-1)).flip(-1)
        place = torch.searchsorted(ordered.cumsum(-1, dtype=torch.float64), bound)
        return ordered.gather(-1, place.clamp(max=probs.shape[-1] - 1))
    # The largest number such that the tokens at least so likely reach the sum, bit by bit: numbers from 0 to 2 are in
    # the order of their bits, the first two of which are 0. 30 steps for float32, 62 for float64, of six operations.
    bits = torch.zeros_like(bound, dtype=torch.int32 if probs.dtype == torch.float32 else torch.int64)
    for bit in reversed(range(torch.finfo(probs.dtype).bits - 2)):
        tried = bits | (1 << bit)
        mass = (probs * (probs >= tried.view(probs.dtype))).sum(-1, keepdim=True, dtype=torch.float64)
        bits = torch.where(mass >= bound, tried, bits)
    return bits.view(probs.dtype)


def log_probabilities(logits_BMV: Tensor, tokens_BM: Tensor) -> Tensor:
    """The raw log-probability of one token at each node, [B, M]: of the softmax of the target's logits, before penalty,
    temperature and filters."""
    wide_BMV = widened(logits_BMV)
    return wide_BMV.gather(-1, tokens_BM[..., None])[..., 0] - wide_BMV.logsumexp(-1)


def penalise(logits_BMV: Tensor, penalty: float, seen_BV: Tensor, paths_BMN: Tensor) -> Tensor:
    """transformers' repetition penalty on raw logits [B, M, V], for the tokens that the row has read and those of
    `paths_BMN`, from the root to each node; repeat any of these to fill up. A logit of a token that occurred is divided
    by the penalty when positive and multiplied when negative, once however often it occurred (arXiv:1909.05858, eq.
    2)."""
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


def choose(logits_BNV: Tensor, uniforms_BN: Tensor, sampling: Sampling) -> Tensor:
    """The target's own next token at every node, [B, N]: the argmax in greedy rows, a draw in the others."""
    chosen_BN = argmax(logits_BNV)
    if not sampling.sampling_rows:
        return chosen_BN
    if not on_host(logits_BNV):
        # Greedy rows too: an accelerator would wait for a list of the others.
        drawn_BN = draw(sampling.processed(logits_BNV, sampling.temperature_B), uniforms_BN)
        return torch.where(sampling.temperature_B[:, None] > 0, drawn_BN, chosen_BN)
    # A few rows at a time, so that their distributions stay in the cache.
    sampled_S, together = (sampling.temperature_B > 0).nonzero()[:, 0], max(1, _ROWS_TOGETHER // logits_BNV.shape[1])
    for start in range(0, len(sampled_S), together):
        rows_R = sampled_S[start : start + together]
        probs_RNV = sampling.processed(logits_BNV[rows_R], sampling.temperature_B[rows_R])
        chosen_BN[rows_R] = draw(probs_RNV, uniforms_BN[rows_R])
    return chosen_BN


def uniform_stream(seed: int, index: int, count: int) -> Any:
    """`count` uniform numbers in [0, 1) for one request, float64; the same whatever the batch and the drafter."""
    # An array of whole numbers: a list with an entry from 2^63 becomes float64 in numpy, which loses its low digits.
    key = np.array([seed % 2**64, index % 2**64], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words, int64, of each 128-bit counter under each 64-bit key; words broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap modulo 2^64; their halves are right all the same.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (((second >> 32) & _MASK) ^ c1 ^ k0, second & _MASK, ((first >> 32) & _MASK) ^ c3 ^ k1,
                          first & _MASK)
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The random numbers of one pass of a batch, and each row's temperature. Key: the low words of seed and request
    index. Counter: number, place of the tree's root in the answer, purpose and node, high word of the seed. An index
    whose high word is not 0 gets a key and a last counter word derived from all 128 bits by the generator itself. A
    pass emits at least one token, so no two passes of a request share a place."""

    seed: int | Tensor  # The run's; a tensor holds its low 64 bits, int64
    requests_B: Tensor  # Index of each row's request, int64
    places_B: Tensor  # Tokens the row had emitted when the tree was grown, int64
    temperature_B: Tensor  # The row's temperature, float32; 0 is greedy

    @property
    def sampling_B(self) -> Tensor:
        """Rows that sample."""
        return self.temperature_B > 0

    def tests(self, size: int) -> Tensor:
        """A uniform number for the acceptance test of each node, [B, N], float64 in (0, 1)."""
        purpose_B1 = torch.full_like(self.places_B, _TESTS << 24)[:, None]
        return (self._words(purpose_B1, size)[:, 0].double() + 0.5) / 2**32

    def gumbels(self, nodes_BF: Tensor, count: int) -> Tensor:
        """Standard Gumbel noise for `count` entries below each node, [B, F, count], float32. -log(E) with E = -log(1 -
        u): float32 keeps the many digits of small u, where the largest noise comes from."""
        words_BFQ = self._words((_NOISE << 24) + nodes_BF, count)
        uniforms = ((words_BFQ.float() + 0.5) / 2**32).clamp(max=1 - 2**-24)
        return -(-torch.log1p(-uniforms)).log()

    def _words(self, purpose_BF: Tensor, count: int) -> Tensor:
        """`count` words of 32 bits, int64, for each purpose, [B, F, count]."""
        blocks = torch.arange(-(-count // 4), device=self.places_B.device)
        places_B11, requests_B11 = self.places_B[:, None, None], self.requests_B[:, None, None]
        low_B11, high_B11 = (torch.zeros_like(places_B11) + ((self.seed >> shift) & _MASK) for shift in (0, 32))
        plain = (low_B11, requests_B11 & _MASK, high_B11)
        # Seed and index have 128 bits, key and last word of the counter 96. Where the index is above 2^32 the three
        # words are derived from all bits, so that no two requests share their numbers.
        beyond_B11 = (requests_B11 >> 32) & _MASK
        purpose = torch.full_like(places_B11, _KEYS << 24)
        derived = philox((beyond_B11, torch.zeros_like(places_B11), purpose, high_B11), plain[:2])
        first, second, last_B11 = (torch.where(beyond_B11 == 0, a, b) for a, b in zip(plain, derived, strict=False))
        words = torch.stack(philox((blocks, places_B11, purpose_BF[..., None], last_B11), (first, second)), dim=-1)
        return words.flatten(-2)[..., :count]
