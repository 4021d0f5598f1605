"""Decoder layers compiled with torch.compile: everything of a layer but its cache and its attention, as one graph.

The small operations of a layer (norms, rotations, gates, residual sums) become a few kernels. Its cache grows and its
masks change from pass to pass, which no graph should depend on: in a compiled layer attention is one operation that the
compiler does not look into (`draftsmith::attend`), and that calls what the pass has set. Layers of one kind share their
graphs, which hold the numbers of rows and tokens as symbols. One row and one token have graphs of their own, since
torch takes a size of 1 for a constant: four for a kind of layer, however batches and trees grow.

Shapes: B rows, N tokens of a pass, H query heads, G key-value heads, E head dimension, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...compiler import Compiler, bounded
from ..attention.tree_attention import Asked, PassedOn, attend_masked, attending
from ..partial_passes import replaced

Form = Callable[..., Any]  # A compiled forward of a kind of layer, whose first argument is the layer
Adapt = Callable[[Compiler, Form, nn.Module], Form]  # Gives a layer of one kind its form
_FOR_ATTENTION = {"past_key_values", "attention_mask", "key_positions", "near_masks"}  # Read by attention alone
PACKED = "the linear layers are packed for oneDNN, which no graph can hold (set target.pack: 0)"
"""The reason that layers on a CPU are not compiled."""


class CompiledLayers:
    """The compiled forms of some layers, put in the place of their own inside a block; a forward is compiled once for
    each kind. `adapt` makes of (compiler, form of a kind, layer) the function that runs in its place and sets the
    attention."""

    def __init__(self, layers: Sequence[nn.Module], compiler: Compiler, adapt: Adapt) -> None:
        self.compiler = compiler
        kinds: dict[Any, None] = dict.fromkeys(map(type, layers))
        forms = {kind: compiler.compiled(kind.forward) for kind in kinds}
        self.forwards = [(layer, adapt(compiler, forms[type(layer)], layer)) for layer in layers]

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        """Nothing: a copy of the layers has forms of its own."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which the compiled forms run."""
        with replaced(self.forwards), bounded():
            yield


def of_transformers(compiler: Compiler, form: Form, layer: nn.Module) -> Form:
    """The forward of a decoder layer of transformers, in a pass with a cache, by its compiled form."""
    numbers = {vars(part)["layer_idx"] for part in layer.modules() if "layer_idx" in vars(part)}
    if len(numbers) != 1:
        compiler.refusal = (f"{type(layer).__name__} writes to the layers {sorted(numbers)} of the cache; a compiled "
                            "layer must write to one")
        return partial(type(layer).forward, layer)
    number, passed_on = numbers.pop(), PassedOn()

    def forward(*args: Any, **given: Any) -> Any:
        attended = False
        cache, mask = given.get("past_key_values"), given.get("attention_mask")
        if cache is None or mask is None:
            compiler.refusal = f"{type(layer).__name__} is not given its cache and its mask under transformers' names"
            return type(layer).forward(layer, *args, **given)
        others = {name: value for name, value in given.items() if name not in _FOR_ATTENTION}

        def attend(asked: Asked) -> Tensor:
            nonlocal attended
            attended = True
            keys, values = cache.update(asked.key, asked.value, number)
            return attend_masked(asked.query, keys, values, mask, asked.form, given.get("query_positions"),
                                 given.get("key_positions"), given.get("near_masks"))

        with attending(attend):
            found = form(layer, *args, past_key_values=passed_on, apart=True, **others)
        if attended:
            return found
        # Nothing has been stored: the layer can be computed as it is.
        compiler.refusal = f"{type(layer).__name__} does not hand on what its attention is to be"
        return type(layer).forward(layer, *args, **given)

    return forward
