"""Rates of a device, floating-point operations and bytes read a second, measured by short probes or stated."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from ...modules import UserError

PROBE_SECONDS = 0.2
"""Seconds of each of the two probes, after a first run that is not counted."""
_TOKENS, _WIDTH = 512, 2048
"""Rows and columns of the probed product."""
_READ_BYTES = 128 * 2**20
"""Bytes of the matrix that the probe of the bandwidth reads; more than a processor's caches hold."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Work that a device does in a second."""

    flops: float
    """Floating-point operations of matrix products."""
    bandwidth: float
    """Bytes read from memory."""
    origin: str
    """Origin of both numbers, for people."""

    @classmethod
    def stated(cls, flops: float | None, bandwidth: float | None) -> Self | None:
        """The rates of a device that is not here; None where neither is given.

        Raises:
            UserError: if one is missing, or a rate is not above 0 and finite.
        """
        if flops is None and bandwidth is None:
            return None
        if flops is None or bandwidth is None:
            missing = "flops" if flops is None else "bandwidth"
            raise UserError(f"a device that is not here is stated by --flops and --bandwidth, and {missing} is missing;"
                            " give both, or neither to plan for the device here")
        for name, rate in (("flops", flops), ("bandwidth", bandwidth)):
            if not 0 < rate < math.inf:
                raise UserError(f"{name} must be above 0 and finite, in units a second, got {rate:g}")
        return cls(flops=flops, bandwidth=bandwidth, origin="as stated")

    @classmethod
    def measured(cls, dtype: torch.dtype, device: torch.device) -> Self:
        """The rates of a device here: a product of 512 tokens in a number format, and a product with one vector."""
        read = _READ_BYTES // dtype.itemsize // _WIDTH
        left, right, matrix = (torch.ones(rows, _WIDTH, dtype=dtype, device=device) for rows in (_TOKENS, _WIDTH, read))
        vector = left[0]
        return cls(
            flops=2 * _TOKENS * _WIDTH**2 / _seconds(lambda: left @ right, device),
            bandwidth=_READ_BYTES / _seconds(lambda: matrix @ vector, device),
            origin=f"measured here in {2 * PROBE_SECONDS:g} s, {torch.get_num_threads()} threads"
                   if device.type == "cpu" else f"measured on {device} in {2 * PROBE_SECONDS:g} s",
        )

    def seconds(self, operations: float, read: float = 0) -> float:
        """Seconds of work that computes and reads at the same time."""
        return max(operations / self.flops, read / self.bandwidth)


def on_device(name: str) -> torch.device:
    """Kind of the device that a target is on here, by `target.device`."""
    cuda = torch.cuda.is_available() and name.partition(":")[0] in ("auto", "cuda")
    return torch.device("cuda" if cuda else "cpu")


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the fastest of as many as fit into the probe: others may use the machine too."""
    taken: list[float] = []
    while len(taken) < 2 or sum(taken[1:]) < PROBE_SECONDS:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
