"""The interface of a target to the decoding loop.

Shapes: B active rows, M selected nodes, K nodes of a path.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compiler import Compiler
from ..interfaces.optional_parts import VerifiedRows
from ..target.pass_output import PassOutput
from ..target.token_biases import TokenBiases
from ..token_tree import TokenTree


class Rows(VerifiedRows, Protocol):
    """A batch of sequences inside something that answers tree passes: `TargetRows`, or stored text."""

    shared: PassOutput | None  # The pass over the prefix that all rows start with; None where no such pass was run

    def run(self, tree: TokenTree, rows: list[int] | None = None, select_BM: Tensor | None = None) -> PassOutput: ...

    def commit(self, path_BK: Tensor, counts_B: Tensor, host_counts: list[int], *, moved: bool = True) -> None: ...

    def open(self, row: int, index: int) -> int: ...

    def wipe(self, row: int) -> None: ...

    def keep(self, order: list[int]) -> None: ...


class Verifier(Protocol):
    """A target, or stored text in its place."""

    tokenizer: Any
    compiler: Compiler  # Compiles its layers and those of the drafter

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def biases(self) -> TokenBiases: ...

    def compiled(self) -> AbstractContextManager[None]: ...

    def start(self, rows: int, capacity: int, taps: Sequence[int] = (), prefix: Sequence[int] = ()) -> Rows: ...
