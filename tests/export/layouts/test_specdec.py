"""Acceptance heads in the official layout: the official outputs, the same names after export, refused mistakes."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import export_specdec, import_specdec
from draftsmith.modules import AcceptanceHead, AcceptanceHeadConfig, UserError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FIXTURE = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "specdec_pp.safetensors"


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
    head = import_specdec(tmp_path / "official")
    assert head.config == AcceptanceHeadConfig(num_layers=3, tie_blocks=True)
    with torch.no_grad():
        logits = head(tensors["input/draft_hidden"])
    torch.testing.assert_close(logits, tensors["output/logits"], atol=1e-5, rtol=0)
    chances = head.log_acceptance(tensors["input/draft_hidden"]).exp()
    torch.testing.assert_close(chances, tensors["output/accept_prob"], atol=1e-5, rtol=0)
    export_specdec(head, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(config)


def head_with(**settings: object) -> AcceptanceHead:
    head = AcceptanceHead(AcceptanceHeadConfig(**settings), 8)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_()
    return head


@pytest.mark.parametrize("settings", [{"num_layers": 1}, {"num_layers": 3, "tie_blocks": True}])
def test_export_and_import_judge_the_same(tmp_path: Path, settings: dict[str, object]) -> None:
    head, states = head_with(**settings), torch.randn(5, 8)
    back = import_specdec(export_specdec(head, tmp_path / "out"))
    assert back.config == head.config
    torch.testing.assert_close(back.log_acceptance(states), head.log_acceptance(states))


def test_separate_blocks_have_no_place_in_the_official_code(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one block 3 times, this head has 3 separate ones; train it with head.tie"):
        export_specdec(head_with(), tmp_path / "out")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    folder = export_specdec(head_with(num_layers=1), tmp_path / "out")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "extra": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"is no acceptance head of SpecDec.*5 tensors where 1 blocks have 4"):
        import_specdec(folder)
    (folder / "config.json").write_text('{"hidden_size": 9, "num_layers": 1}')
    with pytest.raises(UserError, match="is no acceptance head of SpecDec"):
        import_specdec(folder)
