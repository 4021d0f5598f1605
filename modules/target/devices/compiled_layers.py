"""torch.compile with a reason where it fails, and decoder layers compiled by it: all of a layer but its cache and its
attention, as one graph.

The small operations of a layer (norms, rotations, gates, residual sums) become a few kernels. Its cache grows and its
masks change from pass to pass, which no graph should depend on: in a compiled layer attention is one operation that the
compiler does not look into (`draftsmith::attend`), and that calls what the pass has set. Layers of one kind share their
graphs, which hold the numbers of rows and tokens as symbols. One row and one token have graphs of their own, since
torch takes a size of 1 for a constant: four for a kind of layer, however batches and trees grow."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_settings
import torch.fx.experimental._config as symbol_settings
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..attention.segment_attention import AttentionForm
from ..attention.tree_attention import PassedOn, attend_masked, attending
from ..partial_passes import replaced

BACKEND = "inductor"  # Compiler of torch.compile
MOST_GRAPHS = 64
"""Graphs of one piece of code before it is computed without them. A decoder layer has four, for one row or several and
for one token or several; layers of several models may share their code."""


class Compiler:
    """Compiles functions by a backend of torch.compile, and computes them without a graph from the first one on that
    cannot be compiled. A graph is made before any of it runs, so that nothing is done twice where that fails."""

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend or BACKEND
        self.refusal = ""  # The reason that something is computed without a graph; empty where all is compiled
        self.seconds = 0.0  # Seconds that compiling has taken
        self.graphs = 0  # Graphs that were made
        self.watch: Callable[[bool], None] = lambda _busy: None  # Called with True before a graph is made, False after

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, of tensors, without a cache and without reading a value from its device, compiled when it is
        called, and plain where that is impossible."""
        made = torch.compile(function, fullgraph=True, dynamic=True, backend=self._make)
        return partial(self._run, made, function)

    def _run(self, made: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A mode that watches every operation sees none inside a graph, so torch would run none.
        if self.refusal or is_in_torch_dispatch_mode(include_infra_modes=False):
            return plain(*args, **kwargs)
        try:
            return made(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            # The first line says where, the second what. Everything is computed without a graph from now on.
            self.refusal = f"torch.compile fails here ({' '.join(said[:2])[:200]})"
            return plain(*args, **kwargs)

    @contextmanager
    def watched(self, watch: Callable[[bool], None]) -> Iterator[None]:
        """A block in which `watch` is called."""
        before, self.watch = self.watch, watch
        try:
            yield
        finally:
            self.watch = before

    def _make(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        """The backend, with the time that it takes."""
        started = time.perf_counter()
        self.graphs += 1
        self.watch(True)
        try:
            return lookup_backend(self.backend)(graph, examples)
        finally:
            self.seconds += time.perf_counter() - started
            self.watch(False)


@contextmanager
def bounded() -> Iterator[None]:
    """A block in which graphs are made for no more shapes than they must be, at most `MOST_GRAPHS` of them."""
    # Two sizes that are equal once need not be so the next time.
    equal_sizes_apart = symbol_settings.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with equal_sizes_apart, dynamo_settings.patch(recompile_limit=MOST_GRAPHS):
        yield


Form = Callable[..., Any]  # A compiled forward of a kind of layer, whose first argument is the layer
Adapt = Callable[[Compiler, Form, nn.Module], Form]  # Gives a layer of one kind its form
_FOR_ATTENTION = {"past_key_values", "attention_mask", "key_positions", "near_masks", "tree_parts"}  # Read there alone
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

        def attend(query: Tensor, key: Tensor, value: Tensor, own: AttentionForm) -> Tensor:
            nonlocal attended
            attended = True
            keys, values = cache.update(key, value, number)
            return attend_masked(query, keys, values, mask, own, given.get("query_positions"),
                                 given.get("key_positions"), given.get("near_masks"), given.get("tree_parts"))

        with attending(attend):
            found = form(layer, *args, past_key_values=passed_on, apart=True, **others)
        if attended:
            return found
        # Nothing has been stored: the layer can be computed as it is.
        compiler.refusal = f"{type(layer).__name__} does not hand on what its attention is to be"
        return type(layer).forward(layer, *args, **given)

    return forward
