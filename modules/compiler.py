"""torch.compile with a reason where it fails: a function that cannot be compiled is computed as it is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_settings
import torch.fx.experimental._config as symbol_settings
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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
            self.refuse(error)
            return plain(*args, **kwargs)

    @contextmanager
    def watched(self, watch: Callable[[bool], None]) -> Iterator[None]:
        """A block in which `watch` is called."""
        before, self.watch = self.watch, watch
        try:
            yield
        finally:
            self.watch = before

    def refuse(self, error: Exception) -> None:
        """Compute everything without a graph from now on."""
        said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # The first line says where, the second what.
        self.refusal = f"torch.compile fails here ({' '.join(said[:2])[:200]})"

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
