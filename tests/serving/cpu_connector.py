"""vLLM's connector of hidden states where there is no GPU: it copies by pinned memory and events of CUDA, which vLLM's
build for CPUs replaces by blanks. Everything else is vLLM's own: its passes, its files and their locks, its server.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector

# What a blank event lacks: it is over as soon as it is recorded.
torch.cuda.Event.query = lambda _event: True


@contextmanager
def unpinned() -> Iterator[None]:
    """A block in which no memory is pinned."""
    made = torch.empty_like
    torch.empty_like = lambda *given, pin_memory=False, **more: made(*given, **more)
    try:
        yield
    finally:
        torch.empty_like = made


class CpuConnector(ExampleHiddenStatesConnector):
    """That connector on a CPU."""

    def _submit_async_write(self, pending: Any) -> None:
        with unpinned():
            super()._submit_async_write(pending)
