"""A batch in its stored number format is decoded on its device, to the bits that decoding each piece gives."""

import pytest
import torch
from draftsmith.data.store.collate import Piece, packed
from draftsmith.data.store.feature_shards import CHANNELS, FORMATS, STATES, TOKENS, StateSlice
from draftsmith.modules import Features

WIDTH = 48


def files(name: str, dtype: torch.dtype = torch.bfloat16) -> list[tuple[dict[str, torch.Tensor], StateSlice]]:
    """Two files of states with unlike channels, and a slice of each."""
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        states_TD = torch.randn(40, WIDTH, generator=generator) * torch.rand(WIDTH, generator=generator).exp() ** 4
        held = FORMATS[name].packed(states_TD.to(dtype))
        scales = (held[CHANNELS], held[TOKENS][5:17]) if CHANNELS in held else None
        found.append((held, StateSlice(held[STATES][5:17], scales)))
    return found


def piece(states: StateSlice) -> Piece:
    length = len(states.codes_ND)
    return Piece(tokens_N=torch.arange(length) + 4, supervised_N=torch.ones(length, dtype=torch.bool), final=states,
                 taps={3: states})


@pytest.mark.device
@pytest.mark.parametrize("name", ["int8", "fp8", "bfloat16"])
def test_a_batch_of_several_files_is_decoded_on_its_device(name: str, device: torch.device) -> None:
    (_, first), (_, second) = files(name)
    batch = packed([[piece(first), piece(second)], [piece(second)]], 30)
    assert batch.final is not None
    assert batch.final.codes_BLD.dtype == FORMATS[name].dtype, "decoded too early"
    found = (batch if device.type == "cpu" else batch.moved(torch.Tensor.pin_memory)).to(device)
    assert found.final_BLD is not None
    assert found.final().device.type == device.type
    wanted_BLD = torch.zeros(2, 30, WIDTH, dtype=torch.bfloat16)
    wanted_BLD[0, :12], wanted_BLD[0, 12:24], wanted_BLD[1, :12] = first.states(), second.states(), second.states()
    assert torch.equal(found.final().cpu(), wanted_BLD)
    assert torch.equal(found.taps[3].cpu(), wanted_BLD)


def test_the_host_decodes_the_same_bits() -> None:
    for name in ("int8", "fp8"):
        (_, first), (_, second) = files(name, torch.float32)
        batch = packed([[piece(first)], [piece(second)]], 30).to("cpu")
        assert batch.final_BLD is not None
        assert torch.equal(batch.final_BLD[0, :12], first.states())
        assert torch.equal(batch.final_BLD[1, :12], second.states())
        assert not batch.final_BLD[0, 12:].any()


def test_every_tensor_of_a_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory needs a GPU: here the places are marked that would be."""
    (_, first), (_, second) = files("int8")
    batch = packed([[piece(first)], [piece(second)]], 30)
    marked: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        marked.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    held = batch.moved(torch.Tensor.pin_memory)
    moved: list[int] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.data_ptr())
        return tensor

    held.moved(noted)
    assert sorted(moved) == sorted(marked)
    assert len(marked) == 4 + 2 * 4, "text, codes and three kinds of scales of two kinds of states"
    found, wanted = held.to("cpu"), batch.to("cpu")
    assert isinstance(found, Features)
    assert torch.equal(found.taps[3], wanted.taps[3])
