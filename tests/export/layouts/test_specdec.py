"""Acceptance heads in the official layout: the official outputs, the same names after export, refused mistakes."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import (
    StoredHead,
    load_artifact,
    save_artifact,
    save_head,
)
from draftsmith.export.layouts.specdec import SPECDEC, export_specdec, read_specdec
from draftsmith.modules import (
    AcceptanceHead,
    AcceptanceHeadConfig,
    SamplingSetting,
    Target,
    TargetConfig,
    Topology,
    UserError,
    load_target,
)
from draftsmith.recipes.__main__ import main
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import CASES, randomised

FIXTURE = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "specdec_pp.safetensors"


@pytest.fixture(scope="module")
def tiny() -> Target:
    """The target that the command line knows by name."""
    return load_target(TargetConfig(name="tiny-random"))


def test_the_official_head_gives_the_official_chances_and_comes_back_as_it_was(tmp_path: Path) -> None:
    if not FIXTURE.is_file():
        pytest.skip("the recorded outputs of the official code are not next to the repository")
    tensors = load_file(FIXTURE)
    with safe_open(FIXTURE, "pt") as file:
        config = file.metadata()["config"]
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    (tmp_path / "official").mkdir()
    (tmp_path / "official" / "config.json").write_text(config)
    save_file(weights, tmp_path / "official" / "model.safetensors")
    head = imported(tmp_path / "official")
    assert head.config == AcceptanceHeadConfig(num_layers=3, tie_blocks=True)
    with torch.no_grad():
        logits = head(tensors["input/draft_hidden"])
    torch.testing.assert_close(logits, tensors["output/logits"], atol=1e-5, rtol=0)
    chances = head.log_acceptance(tensors["input/draft_hidden"]).exp()
    torch.testing.assert_close(chances, tensors["output/accept_prob"], atol=1e-5, rtol=0)
    again = folder_of(head, tmp_path / "again")
    again = load_file(again / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(config)


def imported(folder: Path) -> AcceptanceHead:
    return read_specdec(SPECDEC.checkpoint(folder))


def folder_of(head: AcceptanceHead, folder: Path) -> Path:
    folder.mkdir()
    export_specdec(head, folder)
    return folder


def head_with(**settings: object) -> AcceptanceHead:
    head = AcceptanceHead(AcceptanceHeadConfig(**settings), 8)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_()
    return head


@pytest.mark.parametrize("settings", [{"num_layers": 1}, {"num_layers": 3, "tie_blocks": True}])
def test_export_and_import_judge_the_same(tmp_path: Path, settings: dict[str, object]) -> None:
    head, states = head_with(**settings), torch.randn(5, 8)
    back = imported(folder_of(head, tmp_path / "out"))
    assert back.config == head.config
    torch.testing.assert_close(back.log_acceptance(states), head.log_acceptance(states))


def test_separate_blocks_have_no_place_in_the_official_code(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one block 3 times, this head has 3 separate ones; train it with head.tie"):
        folder_of(head_with(), tmp_path / "out")


def with_heads(folder: Path, target: Target, *temperatures: float, tied: bool = True) -> Path:
    """An artifact of a draft model with heads for these temperatures."""
    save_artifact(folder, randomised(CASES["draft-lm"].make(target)), target.identity, {}, Topology.chain(2))
    for temperature in temperatures:
        head = AcceptanceHead(AcceptanceHeadConfig(num_layers=2, tie_blocks=tied), 24)
        with torch.no_grad():
            head.output.bias.fill_(temperature)
        save_head(folder, StoredHead(head=head, setting=SamplingSetting(temperature=temperature, top_p=0.9)))
    return folder


def test_the_command_writes_the_head_of_a_temperature(tmp_path: Path, tiny: Target) -> None:
    words = ["export", "--format", "specdec", "--out", str(tmp_path / "out"), "--artifact"]
    both = with_heads(tmp_path / "both", tiny, 0.0, 1.0)
    for temperature in (1.0, 0.0):
        assert main([*words, str(both), "--temperature", f"{temperature:g}"]) == 0
        back, own = imported(tmp_path / "out"), load_artifact(both, tiny).heads[temperature].head
        assert back.config == own.config
        assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in back.state_dict().items())
        assert back.output.bias[0].item() == temperature
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "README.md", ".draftsmith.json", "origin.json",
        "acceptance.json"}
    assert main([*words, str(with_heads(tmp_path / "one", tiny, 1.0))]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "a draft_lm drafter" in text
    assert "sampled at temperature 1, top_p 0.9" in text


@pytest.mark.parametrize(("heads", "words", "message"), [
    ((), "--format specdec", "holds an acceptance head, and this artifact has none; train one with drafts"),
    ((0.0, 1.0), "--format specdec", "has heads for the temperatures 0, 1; choose one with --temperature 1"),
    ((0.0,), "--format specdec --temperature 0.5", "no acceptance head for temperature 0.5, only for 0; choose one "
                                                   "of these, or train one with draftsmith specdec --temperatures"),
    ((0.0,), "--format huggingface --temperature 0", "temperature 0 chooses an acceptance head, of which the format "
                                                     "huggingface holds none; leave it out, or choose --format specd"),
])
def test_an_export_without_a_fitting_head_is_refused(
    tmp_path: Path, tiny: Target, heads: tuple[float, ...], words: str, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = with_heads(tmp_path / "a", tiny, *heads)
    assert main(["export", "--artifact", str(folder), "--out", str(tmp_path / "out"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_export_of_separate_blocks_is_refused(
    tmp_path: Path, tiny: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_heads(tmp_path / "a", tiny, 0.0, tied=False)
    words = ["export", "--artifact", str(folder), "--out", str(tmp_path / "out"), "--format", "specdec"]
    assert main(words) == 2
    assert "this head has 2 separate ones; train it with head.tie_blocks: true" in capsys.readouterr().err


def test_other_folders_are_refused(tmp_path: Path) -> None:
    folder = folder_of(head_with(num_layers=1), tmp_path / "out")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "extra": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"is no acceptance head of SpecDec.*5 tensors where 1 blocks have 4"):
        imported(folder)
    (folder / "config.json").write_text('{"hidden_size": 9, "num_layers": 1}')
    with pytest.raises(UserError, match="is no acceptance head of SpecDec"):
        imported(folder)
