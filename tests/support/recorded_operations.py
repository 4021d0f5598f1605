"""A recorder of torch's operations that stands in for CUDA graphs: it repeats them on the very same tensors.

Like a graph it runs no Python code again: numbers that the host knew while recording stay what they were, and a result
is written where it was written then. What would make the host wait, which no graph can hold, is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass
class Records:
    """Records of computations, and how often each was repeated."""

    made: list["Record"] = field(default_factory=list)

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record a computation."""
        record = Record()
        with record:
            body()
        self.made.append(record)
        return record.replay


class Record(TorchDispatchMode):
    """The operations inside the block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _WAITS & set(func.tags):
            raise RuntimeError(f"{func} makes the host wait, which a graph cannot hold")
        result = func(*args, **kwargs)
        if not func.is_view:
            self.operations.append((func, args, kwargs, _tensors(result)))
        return result

    def replay(self) -> None:
        """Run them again, and put what they make where it was."""
        self.replays += 1
        for func, args, kwargs, written in self.operations:
            for place, value in zip(written, _tensors(func(*args, **kwargs)), strict=True):
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
