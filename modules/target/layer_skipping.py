"""Context manager that makes a model skip some of its layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def skipping(layers: nn.ModuleList, kept: Sequence[int]) -> Iterator[None]:
    """Let only the layers `kept` of a model do anything inside the block."""
    skipped = [layer for index, layer in enumerate(layers) if index not in set(kept)]
    # Hooks that spread a model over devices replace `forward` on the layer too: what was there must come back.
    former = [layer.__dict__.get("forward") for layer in skipped]
    for layer in skipped:
        layer.__dict__["forward"] = _unchanged
    try:
        yield
    finally:
        for layer, forward in zip(skipped, former, strict=True):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def _unchanged(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return hidden_states
