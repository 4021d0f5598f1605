"""Flex attention on a CPU with gradients: the unfused computation that its graph stands for, which torch refuses to run
backwards there."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.nn.attention.flex_attention as torch_flex


@contextmanager
def unfused_flex() -> Iterator[None]:
    """A block in which flex attention computes all scores at once, on any device and with gradients."""
    with (patch.object(torch_flex, "_validate_device", lambda *_states: None),
          patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)):
        yield
