"""Counter-based random numbers: each is a function of (seed, request, place, purpose), wherever it is needed.

`uniform_stream` in `requests.py` holds the numbers of the emitted tokens. Drafting by sampling and rejection need more:
they come from Philox4x32-10 (Salmon et al., SC 2011), evaluated on the device, so that neither the batch, nor the
order of the queue, nor the host changes them.

Shapes: B rows, N nodes of a tree, F nodes asked for, Q draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_TESTS, _NOISE, _KEYS = 1, 2, 3


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
    """The random numbers of one pass of a batch, and each row's temperature.

    Key: the low words of seed and request index. Counter: number, place of the tree's root in the answer, purpose and
    node, high word of the seed. An index whose high word is not 0 gets a key and a last counter word derived from all
    128 bits by the generator itself. A pass emits at least one token, so no two passes of a request share a place."""

    seed: int  # The run's
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
        """Standard Gumbel noise for `count` entries below each node, [B, F, count], float32.

        -log(E) with E = -log(1 - u): float32 keeps the many digits of small u, where the largest noise comes from."""
        words_BFQ = self._words((_NOISE << 24) + nodes_BF, count)
        uniforms = ((words_BFQ.float() + 0.5) / 2**32).clamp(max=1 - 2**-24)
        return -(-torch.log1p(-uniforms)).log()

    def _words(self, purpose_BF: Tensor, count: int) -> Tensor:
        """`count` words of 32 bits, int64, for each purpose, [B, F, count]."""
        blocks = torch.arange(-(-count // 4), device=self.places_B.device)
        places_B11, requests_B11 = self.places_B[:, None, None], self.requests_B[:, None, None]
        low_B11, high_B11 = (torch.full_like(places_B11, (self.seed >> shift) & _MASK) for shift in (0, 32))
        plain = (low_B11, requests_B11 & _MASK, high_B11)
        # Seed and index have 128 bits, key and last word of the counter 96. Where the index is above 2^32 the three
        # words are derived from all bits, so that no two requests share their numbers.
        beyond_B11 = (requests_B11 >> 32) & _MASK
        purpose = torch.full_like(places_B11, _KEYS << 24)
        derived = philox((beyond_B11, torch.zeros_like(places_B11), purpose, high_B11), plain[:2])
        first, second, last_B11 = (torch.where(beyond_B11 == 0, a, b) for a, b in zip(plain, derived, strict=False))
        words = torch.stack(philox((blocks, places_B11, purpose_BF[..., None], last_B11), (first, second)), dim=-1)
        return words.flatten(-2)[..., :count]
