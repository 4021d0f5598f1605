"""Every tensor that a decoding loop holds from pass to pass, by the path of attributes that leads to it."""

from collections.abc import Iterator
from typing import Any

from draftsmith.modules import Loop, Proposer, Target
from torch import Tensor, nn

from .recorded_operations import address

_LEFT_OUT = ("target", "decoder", "drafter")  # Attributes that lead to weights
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # Address, shape and strides


def held_tensors(loop: Loop) -> dict[str, Place]:
    """Place of every tensor of the loop's batch: cache, draft state, random numbers, roots, and what a drafter without
    weights stores."""
    found: dict[str, Place] = {}
    seen: set[int] = set()
    drafters = [loop.drafter, *getattr(loop.drafter, "parts", ())]
    stores = {f"store {number}": vars(one) for number, one in enumerate(drafters)
              if isinstance(one, Proposer) and not isinstance(one, nn.Module)}
    for path, tensor in _walk({"batch": loop.batch, "recorded": loop.recorded, **stores}, "", seen):
        found[path] = address(tensor), tuple(tensor.shape), tuple(tensor.stride())
    return found


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in seen or isinstance(value, (Target, nn.Module, type, str, int, float)) or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside = [(str(name), one) for name, one in value.items()]
    elif isinstance(value, (list, tuple, set)):
        inside = [(str(place), one) for place, one in enumerate(value)]
    elif type(value).__module__.startswith("draftsmith."):
        inside = list(vars(value).items())
    else:
        return
    for name, one in inside:
        if name not in _LEFT_OUT:
            yield from _walk(one, f"{path}.{name}" if path else name, seen)
