"""Tests on a device: what a test makes is there, with the same numbers, and what the package makes is not."""

import pytest
import torch
from draftsmith.modules import Features, Target, Topology
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.devices.on_device import tensors_on
from support.devices.pretended_device import DEVICE, pretended_device


def test_what_a_test_makes_is_on_the_device() -> None:
    here = torch.rand(3, generator=torch.Generator().manual_seed(0))
    with pretended_device(), tensors_on(DEVICE):
        there = torch.rand(3, generator=torch.Generator().manual_seed(0))
        assert there.device == DEVICE
        assert there.tolist() == here.tolist()
        assert torch.tensor([1, 2]).device == DEVICE
        assert torch.arange(3, device="cpu").device.type == "cpu"
        assert Target(tiny_model(), tiny_tokenizer(), name="tiny").device == DEVICE
    assert torch.zeros(2).device.type == "cpu"


def test_what_the_package_makes_is_not() -> None:
    with pretended_device(), tensors_on(DEVICE):
        assert Features.from_rows([([1, 2], [True, True])]).tokens_BL.device.type == "cpu"
        assert Topology.chain(2).plant(torch.tensor([[1, 2, 3]])).ancestors_BNN.device == DEVICE


def test_on_a_cpu_nothing_changes(tiny_target: Target, request: pytest.FixtureRequest) -> None:
    make = Target.__init__
    with tensors_on(torch.device("cpu")):
        assert Target.__init__ is make
    assert "on_device" not in request.fixturenames
    assert tiny_target.device.type == "cpu"
