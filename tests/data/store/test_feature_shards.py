"""States in their number formats: the size of the errors of eight bits, of their files, and of the change of the loss.
Packing moves every piece whole, keeps segments apart and loses nothing; a batch in its stored format is decoded on its
device, to the bits that decoding each piece gives."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.data import Manifest, WantedStates
from draftsmith.data.datamodule import BatchConfig, DraftDataModule
from draftsmith.data.store.feature_shards import (
    CHANNELS,
    FORMATS,
    OPEN_BINS,
    STATES,
    TOKENS,
    Piece,
    StateSlice,
    format_named,
    open_features,
    packed,
    pad,
    plan_bins,
    read_features,
    state_file,
    unpacked,
)
from draftsmith.data.store.feature_store import Encoding, ShardStates
from draftsmith.modules import Eagle3, Eagle3Config, Features, Target, UserError
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.memory_plan import plan_recipe
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.trainers import draft_module, train_config
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.data.data_folders import conversations, encode
from torch import Tensor

EIGHT_BITS = ("int8", "fp8")
TAPS = (0,)
TINY = str(Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml")


def uneven(tokens: int = 60, width: int = 48) -> Tensor:
    """States as of a language model: two channels and a token are far larger than the others."""
    states_TD = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    states_TD[:, 7] *= 40
    states_TD[:, 20] *= 300
    states_TD[0] *= 100
    return states_TD


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_no_number_is_further_off_than_half_a_step(name: str) -> None:
    """Of int8 a step is a scale; of e4m3 an eighth of the power of two below the number, and 2**-9 near zero."""
    states_TD = uneven()
    held = FORMATS[name].packed(states_TD)
    scales_TD = held[TOKENS][:, None] * held[CHANNELS]
    half_TD = 0.5 * scales_TD if name == "int8" else torch.maximum(states_TD.abs() / 16, 2.0**-10 * scales_TD)
    found_TD = unpacked(held[STATES], held[CHANNELS], held[TOKENS])
    assert bool(((found_TD - states_TD).abs() <= 1.0001 * half_TD).all())


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.05), ("fp8", 0.04)])
def test_small_channels_are_kept_next_to_large_ones(name: str, bound: float) -> None:
    """Of int8 with scales of tokens alone the channels of usual size would have codes of 0; with scales of channels
    alone the large token would leave few codes to the others."""
    states_TD = uneven()
    held = FORMATS[name].packed(states_TD)
    apart_TD = unpacked(held[STATES], held[CHANNELS], held[TOKENS]) - states_TD
    others_TD, apart_TD = states_TD[1:], apart_TD[1:]
    assert float((apart_TD.norm(dim=0) / others_TD.norm(dim=0)).max()) < bound
    single = (others_TD / (others_TD.abs().amax(1, keepdim=True) / 127)).round()
    assert float((single[:, 3] == 0).float().mean()) > 0.4, "these states would not tell the ways apart"


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_states_are_read_back_in_their_own_format(name: str) -> None:
    """The rounding of a channel's scale to it adds nothing to that of the codes and of the result."""
    states_TD = uneven()
    for dtype, bound in ((torch.bfloat16, 0.045), (torch.float64, 0.04)):
        held = FORMATS[name].packed(states_TD.to(dtype))
        found_TD = unpacked(held[STATES], held[CHANNELS], held[TOKENS])
        assert found_TD.dtype == dtype
        assert float((found_TD - states_TD)[1:].norm()) < bound * float(states_TD[1:].norm())


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_zeros_and_no_tokens_have_scales_too(name: str) -> None:
    for states_TD in (torch.zeros(3, 4), torch.zeros(0, 4), torch.eye(4)):
        held = FORMATS[name].packed(states_TD)
        torch.testing.assert_close(unpacked(held[STATES], held[CHANNELS], held[TOKENS]), states_TD)


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_not_hidden(name: str, wrong: float) -> None:
    """Training stops at it; a code would be some number."""
    states_TD = uneven()
    states_TD[3, 5] = wrong
    held = FORMATS[name].packed(states_TD)
    finite_TD = unpacked(held[STATES], held[CHANNELS], held[TOKENS]).isfinite()
    assert not bool(finite_TD[3, 5])
    assert bool(torch.cat([finite_TD[:3], finite_TD[4:]]).all())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Two validation and twelve train conversations, without states."""
    return conversations(tmp_path_factory.mktemp("data"), tiny_target, 14, shard_prompts=4, validation_prompts=2)


@pytest.fixture
def folder(tokens: Path, tmp_path: Path) -> Path:
    """The same, to be written into."""
    return Path(shutil.copytree(tokens, tmp_path / "data"))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_files_hold_what_was_predicted_and_slices_are_those_of_the_whole(
    name: str, folder: Path, tiny_target: Target
) -> None:
    encoding = Encoding(tiny_target, folder, TAPS, form=name)
    records, width = Manifest.load(folder).shards, tiny_target.hidden_size
    assert WantedStates(taps=TAPS, form=name).bytes(10, tiny_target) == 10 * 2 * (width + 4), "two kinds of states"
    predicted = encoding.bytes
    assert predicted == encoding.tokens * 2 * (width + 4) + len(records) * 2 * 4 * width
    encoding.run(progress=False)
    assert read_features(folder).dtype == name
    written = 0
    for record, shard in zip(records, open_features(folder, records, TAPS), strict=True):
        held = load_file(folder / state_file(record, "final"))
        whole_TD = unpacked(held[STATES], held[CHANNELS], held[TOKENS])
        assert torch.equal(shard.slices(0, record.tokens)[0].states(), whole_TD)
        assert torch.equal(shard.slices(5, 9)[0].states(), whole_TD[5:9])
        assert shard.slices(5, 9)[1][0].states().shape == (4, width)
        written += 2 * sum(tensor.nbytes for tensor in held.values())
    assert written == predicted
    assert Encoding(tiny_target, folder, TAPS, form=name).tokens == 0
    assert Encoding(tiny_target, folder, TAPS).tokens > 0, "another format is made anew"


@pytest.mark.parametrize(("name", "bound"), [(None, 1e-6), ("int8", 0.005), ("fp8", 0.02)])
def test_the_loss_on_stored_states_is_that_on_computed_ones(name: str | None, bound: float, folder: Path,
                                                            tiny_target: Target) -> None:
    """Relative to the loss, of EAGLE-3 on taps with the target as teacher; the gradient likewise. States in the
    target's own format differ by the rounding of passes of another shape."""
    encode(tiny_target, folder, TAPS, form=name)
    config = BatchConfig(row_length=96, rows_per_batch=2)
    stored = DraftDataModule(folder, replace(config, states_format=name), TAPS)
    computed = DraftDataModule(folder, replace(config, states="computed"), TAPS)
    module = draft_module(Eagle3)(tiny_target, train_config(Eagle3)(
        objective="soft", drafter=Eagle3Config(steps=2, taps=TAPS)))
    module.configure_model()
    assert all(torch.equal(stored.packed_batch(number).text.tokens_BL, computed.packed_batch(number).text.tokens_BL)
               for number in range(3))
    found = []
    for data in (stored, computed):
        module.zero_grad()
        total = sum((module.loss(data.packed_batch(number).to("cpu")).total for number in range(3)), torch.zeros(()))
        torch.autograd.backward(total)
        found.append((float(total.detach()), torch.cat([weight.grad.flatten() for weight in module.parameters()])))
    (loss, gradient), (exact, wanted) = found
    assert name is None or loss != exact, "nothing was rounded"
    assert abs(loss - exact) <= bound * exact
    assert float((gradient - wanted).norm()) <= 10 * bound * float(wanted.norm())


def test_formats_are_refused_that_differ(folder: Path, tiny_target: Target) -> None:
    wanted = [WantedStates(form="int8"), WantedStates(taps=(1,), form="fp8")]
    with pytest.raises(UserError, match=r"in the number formats fp8, int8; set batch\.states_format of all to one"):
        ShardStates(tiny_target, folder, wanted)
    assert format_named(None, torch.bfloat16).name == "bfloat16"


@pytest.mark.long
def test_a_recipe_stores_the_states_of_its_answers_in_eight_bits(tmp_path: Path) -> None:
    words = ["--config", TINY, "--out", str(tmp_path), "--batch.states_format", "int8"]
    assert main(["distill", *words]) == 0
    data = tmp_path / "data"
    assert read_features(data).dtype == "int8"
    records = Manifest.load(data).shards
    assert all(len(shard.slices(0, 2)[0].states()) == 2 for shard in open_features(data, records, ()))
    given = COMMANDS["run"].parse([*words, "--distill.budget_tokens", "1000"]).values
    assert plan_recipe(given).stored_states == 1000 * (32 + 4)


def piece(length: int, seed: int = 0, first: int = 0, states: bool = False) -> Piece:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    final_ND = torch.randn(length, 3, generator=generator)
    return Piece(tokens_N=torch.randint(4, 90, (length,), generator=generator, dtype=torch.int32),
                 supervised_N=torch.rand(length, generator=generator) < 0.5, first=first,
                 final=StateSlice(final_ND) if states else None, taps={2: StateSlice(final_ND * 2)} if states else {})


@given(lengths=st.lists(st.integers(1, 40), max_size=60), row_length=st.integers(40, 90))
def test_every_piece_stands_in_one_row_that_holds_it(lengths: list[int], row_length: int) -> None:
    rows = plan_bins(lengths, row_length)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= row_length for row in rows)
    # The rows that were closed for want of room were the fullest: at most the open ones may be half empty.
    assert sum(2 * sum(lengths[place] for place in row) <= row_length for row in rows) <= OPEN_BINS


def test_rows_are_well_filled() -> None:
    lengths = torch.randint(40, 240, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(lengths) / (512 * len(plan_bins(lengths, 512))) > 0.9


def test_a_packed_row_written_out() -> None:
    first = Piece(tokens_N=torch.tensor([5, 6]), supervised_N=torch.tensor([False, True]))
    second = Piece(tokens_N=torch.tensor([7, 8, 9]), supervised_N=torch.tensor([True, True, False]), first=4)
    batch = packed([[first, second], [second]], 6).to("cpu")
    assert batch.tokens_BL.tolist() == [[5, 6, 7, 8, 9, 0], [7, 8, 9, 0, 0, 0]]
    assert batch.segments_BL.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1]]
    assert batch.positions_BL.tolist() == [[0, 1, 4, 5, 6, 0], [4, 5, 6, 0, 0, 0]]
    assert batch.supervised_BL.long().tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    labels, valid = batch.labels(1)
    assert valid.long().tolist() == [[1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], "no label across segments"
    assert labels[0, 0] == 6


def test_states_follow_their_tokens() -> None:
    pieces = [piece(3, states=True), piece(4, seed=1, states=True)]
    batch = packed([[pieces[0], pieces[1]], [pieces[1]]], 9).to("cpu")
    assert torch.equal(batch.final()[0, 3:7], batch.final()[1, :4])
    assert torch.equal(batch.taps[2], batch.final() * 2)
    assert not batch.final()[1, 4:].any()


def test_states_of_only_some_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 3 pieces of a batch bring states"):
        packed([[piece(3, states=True), piece(2)], [piece(4)]], 6).to("cpu")
    with pytest.raises(ValueError, match="hold no target states; encode them"):
        packed([[piece(2)]]).to("cpu").final()


def test_oversized_pieces_are_refused() -> None:
    with pytest.raises(UserError, match="row_length 4 is shorter than a row of 5 tokens"):
        packed([[piece(5)]], 4).to("cpu")
    with pytest.raises(UserError, match="row_length 4 is shorter than a piece of 5 tokens"):
        plan_bins([1, 5], 4)


def test_packing_changes_no_state_of_the_target(tiny_target_f64: Target) -> None:
    pieces = [piece(7), piece(5, seed=1), piece(9, seed=2)]
    alone = tiny_target_f64.encode(pad(pieces), (1,))
    together = tiny_target_f64.encode(packed([pieces[:2], pieces[2:]], 20).to("cpu"), (1,))
    for (row, start), (number, length) in zip([(0, 0), (0, 7), (1, 0)], [(0, 7), (1, 5), (2, 9)], strict=True):
        for here, single in ((together.final(), alone.final()), (together.taps[1], alone.taps[1])):
            torch.testing.assert_close(here[row, start : start + length], single[number, :length], rtol=0, atol=1e-10)


WIDTH = 48


def two_files(name: str, dtype: torch.dtype = torch.bfloat16) -> list[tuple[dict[str, torch.Tensor], StateSlice]]:
    """Two files of states with unlike channels, and a slice of each."""
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        states_TD = torch.randn(40, WIDTH, generator=generator) * torch.rand(WIDTH, generator=generator).exp() ** 4
        held = FORMATS[name].packed(states_TD.to(dtype))
        scales = (held[CHANNELS], held[TOKENS][5:17]) if CHANNELS in held else None
        found.append((held, StateSlice(held[STATES][5:17], scales)))
    return found


def stored_piece(states: StateSlice) -> Piece:
    length = len(states.codes_ND)
    return Piece(tokens_N=torch.arange(length) + 4, supervised_N=torch.ones(length, dtype=torch.bool), final=states,
                 taps={3: states})


@pytest.mark.device
@pytest.mark.parametrize("name", ["int8", "fp8", "bfloat16"])
def test_a_batch_of_several_files_is_decoded_on_its_device(name: str, device: torch.device) -> None:
    (_, first), (_, second) = two_files(name)
    batch = packed([[stored_piece(first), stored_piece(second)], [stored_piece(second)]], 30)
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
        (_, first), (_, second) = two_files(name, torch.float32)
        batch = packed([[stored_piece(first)], [stored_piece(second)]], 30).to("cpu")
        assert batch.final_BLD is not None
        assert torch.equal(batch.final_BLD[0, :12], first.states())
        assert torch.equal(batch.final_BLD[1, :12], second.states())
        assert not batch.final_BLD[0, 12:].any()


def test_every_tensor_of_a_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory needs a GPU: here the places are marked that would be."""
    (_, first), (_, second) = two_files("int8")
    batch = packed([[stored_piece(first)], [stored_piece(second)]], 30)
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
