"""Tests on an accelerator: the tensors that a test makes, and the targets made while it runs, are put there.

A test of a file with `pytestmark = pytest.mark.usefixtures("on_device")` runs unchanged on a CPU. With a CUDA device
its tensors are made on the CPU, so that random numbers are the same, and moved; tensors that the package makes are not,
so that code which forgets the device fails.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draftsmith.modules import Target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TESTS = Path(__file__).resolve().parents[2]


class MovedTensors(TorchFunctionMode):
    """Moves the tensors that functions of torch make for a test to a device, unless they are given one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        by_test = TESTS in Path(sys._getframe(1).f_code.co_filename).parents
        if by_test and func in _device_constructors() and kwargs.get("device") is None and isinstance(made, Tensor):
            return made.to(self.device)
        return made


@contextmanager
def tensors_on(device: torch.device) -> Iterator[None]:
    """A block in which a test's tensors and all new targets are on a device."""
    if device.type == "cpu":
        yield
        return
    make = Target.__init__

    def made_there(self: Target, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.to(device)

    with MovedTensors(device), patch.object(Target, "__init__", made_there):
        yield


@cache
def _tiny(dtype: torch.dtype, device: torch.device) -> Target:
    return Target(tiny_model(dtype=dtype), tiny_tokenizer(), name="tiny-random").to(device)


def _placed(target: Target, request: pytest.FixtureRequest) -> Target:
    """The shared target, or an equal one on the device of a test whose tensors are there."""
    if "on_device" not in request.fixturenames:
        return target
    device: torch.device = request.getfixturevalue("device")
    return target if device.type == "cpu" else _tiny(target.dtype, device)


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """A test whose tensors and targets are on the device."""
    with tensors_on(device):
        yield


@pytest.fixture
def tiny_target(tiny_target: Target, request: pytest.FixtureRequest) -> Target:
    """The random Llama in float32, where the test's tensors are; read-only."""
    return _placed(tiny_target, request)


@pytest.fixture
def tiny_target_f64(tiny_target_f64: Target, request: pytest.FixtureRequest) -> Target:
    """The same in float64."""
    return _placed(tiny_target_f64, request)
