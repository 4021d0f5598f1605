"""Context managers that make a model run some of its layers only.

Each keeps the model's own forward pass, so embeddings, positions, masks and the last norm are the architecture's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Forward = Callable[..., Tensor]
"""The forward of a layer."""


@contextmanager
def skipping(layers: nn.ModuleList, kept: Sequence[int]) -> Iterator[None]:
    """Let only the layers `kept` of a model do anything inside the block."""
    skipped = [layer for index, layer in enumerate(layers) if index not in set(kept)]
    with _replaced((layer, _unchanged) for layer in skipped):
        yield


@contextmanager
def first_layers(layers: nn.ModuleList, count: int) -> Iterator[list[Tensor]]:
    """Let only the first `count` layers of a model run, fewer than it has; their outputs are added to the list."""
    outputs: list[Tensor] = []

    def end(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        outputs.append(hidden_states)
        return hidden_states

    after = [(layer, _unchanged if place else end) for place, layer in enumerate(layers[count:])]
    with _replaced(after):
        yield outputs


@contextmanager
def later_layers(layers: nn.ModuleList, first: int, states: Tensor | None) -> Iterator[None]:
    """Let a model start at its layer `first`, at least 1, from the given outputs of the layer before it.

    Without states the model runs as a whole.
    """
    if states is None:
        yield
        return

    def enter(_hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return states

    before = [(layer, enter if place + 1 == first else _unchanged) for place, layer in enumerate(layers[:first])]
    with _replaced(before):
        yield


@contextmanager
def _replaced(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Run other forwards in place of those of some layers inside the block."""
    given = list(forwards)
    # Hooks that spread a model over devices replace `forward` on the layer too: what was there must come back.
    former = [layer.__dict__.get("forward") for layer, _ in given]
    for layer, forward in given:
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for (layer, _), own in zip(given, former, strict=True):
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = own


def _unchanged(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return hidden_states
