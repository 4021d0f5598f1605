"""The target of an artifact as a folder: the same weights by their hash, whatever they were read from."""

from pathlib import Path

import pytest
import torch
from draftsmith.export import Artifact, export_artifact, load_artifact, save_artifact
from draftsmith.modules import Target, TargetConfig, UserError, load_target
from draftsmith.recipes.__main__ import main
from support.artifacts import TREE, heads
from support.targets import tied_target


def written(target: Target, out: Path) -> Path:
    artifact = Artifact(drafter=heads(target), target=target, topology=TREE, identity=target.identity, provenance={})
    return export_artifact(artifact, target, "target", out)


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_is_the_target(tmp_path: Path, tiny_target: Target, tied: bool) -> None:
    target = tied_target() if tied else tiny_target
    again = load_target(TargetConfig(name=str(written(target, tmp_path / "out"))))
    assert again.identity.weights_hash == target.identity.weights_hash
    tokens = torch.tensor([[5, 9, 11]])
    with target.native() as model, again.native() as copy, torch.no_grad():
        assert torch.equal(model(tokens).logits, copy(tokens).logits)


def test_the_command_writes_it_in_the_asked_number_format(tmp_path: Path, tiny_target: Target) -> None:
    save_artifact(tmp_path / "a", heads(tiny_target), tiny_target.identity, {}, TREE)
    words = ["export", "--artifact", str(tmp_path / "a"), "--format", "target", "--out", str(tmp_path / "out")]
    assert main([*words, "--target.dtype", "bfloat16"]) == 0
    assert load_target(TargetConfig(name=str(tmp_path / "out"), dtype="bfloat16")).dtype == torch.bfloat16
    assert "in bfloat16" in (tmp_path / "out" / "README.md").read_text()
    assert main(words) == 0
    # The draft is one for the folder too.
    again = load_target(TargetConfig(name=str(tmp_path / "out")))
    assert load_artifact(tmp_path / "a", again).target is again


def test_it_holds_no_fewer_bits_of_the_draft(tmp_path: Path, tiny_target: Target,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    save_artifact(tmp_path / "a", heads(tiny_target), tiny_target.identity, {}, TREE)
    words = ["export", "--artifact", str(tmp_path / "a"), "--format", "target", "--out", str(tmp_path / "out")]
    assert main([*words, "--weights", "int8"]) == 2
    assert "the format target holds its weights as they were trained, got weights 'int8'" in capsys.readouterr().err
    artifact = load_artifact(tmp_path / "a", tiny_target)
    with pytest.raises(UserError, match="the format merged holds the target of an artifact that changes it, and this "
                                        "one does not; choose --format medusa"):
        export_artifact(artifact, tiny_target, "merged", tmp_path / "out")


@pytest.mark.real
@pytest.mark.long
def test_the_embedded_gguf_file_becomes_a_folder(tmp_path: Path, real_target: Target) -> None:
    again = load_target(TargetConfig(name=str(written(real_target, tmp_path / "out"))))
    assert again.identity.weights_hash == real_target.identity.weights_hash
    asked = [{"role": "user", "content": "What is a draft horse?"}]
    assert again.tokenizer.apply_chat_template(asked) == real_target.tokenizer.apply_chat_template(asked)
