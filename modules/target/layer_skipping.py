"""Context managers that make a model run some of its layers only, or let nodes enter at a later one.

Each keeps the model's own forward pass, so embeddings, positions, masks and the last norm are the architecture's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..virtual_nodes import VirtualNodes

Forward = Callable[..., Tensor]  # The forward of a layer


@contextmanager
def skipping(layers: nn.ModuleList, kept: Sequence[int]) -> Iterator[None]:
    """Let only the layers `kept` of a model do anything inside the block."""
    skipped = [layer for index, layer in enumerate(layers) if index not in set(kept)]
    with replaced((layer, _unchanged) for layer in skipped):
        yield


@contextmanager
def first_layers(layers: nn.ModuleList, count: int) -> Iterator[list[Tensor]]:
    """Let only the first `count` layers of a model run, fewer than it has; their outputs are added to the list."""
    # The model's own forward ends in its norm, which the drafter's states come before: they are kept on the way.
    outputs: list[Tensor] = []

    def end(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        outputs.append(hidden_states)
        return hidden_states

    after = [(layer, _unchanged if place else end) for place, layer in enumerate(layers[count:])]
    with replaced(after):
        yield outputs


@contextmanager
def later_layers(layers: nn.ModuleList, first: int, states: Tensor | None) -> Iterator[None]:
    """Let a model start at its layer `first`, at least 1, from the given outputs of the layer before it; without states
    it runs as a whole."""
    if states is None:
        yield
        return

    def enter(_hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return states

    before = [(layer, enter if place + 1 == first else _unchanged) for place, layer in enumerate(layers[:first])]
    with replaced(before):
        yield


@contextmanager
def injected(layers: nn.ModuleList, virtual: VirtualNodes | None) -> Iterator[None]:
    """Give the virtual nodes of a pass, its last ones, their own states at a later layer inside the block."""
    injection = None if virtual is None else virtual.injection
    if virtual is None or injection is None:
        yield
        return
    anchors_BM1, count = virtual.anchors_BM.clamp(min=0)[..., None], virtual.anchors_BM.shape[1]

    def enter(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        hidden_BND = args[0] if args else kwargs["hidden_states"]
        before_BMD = hidden_BND.gather(1, anchors_BM1.expand(-1, -1, hidden_BND.shape[-1]))
        states_BMD = injection.states(before_BMD, virtual.slots_BM).to(hidden_BND.dtype)
        changed_BND = torch.cat([hidden_BND[:, :-count], states_BMD], dim=1)
        return ((changed_BND, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed_BND})

    handle = layers[injection.layer].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
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
