"""The target of an artifact as a folder: the same weights by their hash, whatever they were read from; and with its own
head, which is imported, continued and written back: the folder is the target, byte by byte but for it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.export import export_artifact, load_artifact, read_description, save_artifact
from draftsmith.export.layouts.parts.checkpoint import Checkpoint
from draftsmith.export.stored_drafter import load_drafter
from draftsmith.modules import Mtp, MtpConfig, Target, TargetConfig, UserError, load_target
from draftsmith.modules.files.atomic_files import file_sha256
from draftsmith.recipes.__main__ import main
from draftsmith.trainers import draft_module, fit, train_config
from draftsmith.trainers.train_config import Start
from families.mtp.cases import head
from safetensors.torch import load_file, save_file
from support.artifacts import TREE, heads
from support.cases import CycleData
from support.target_folders import LINES, change, load, with_head
from support.targets import tied_target
from support.tiers import others_long

from .test_engine_contracts import written

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only", "ignore:.*is_gradient_checkpointing")


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_is_the_target(tmp_path: Path, tiny_target: Target, tied: bool) -> None:
    target = tied_target() if tied else tiny_target
    again = load_target(TargetConfig(name=str(written(heads(target), target, "target", tmp_path / "out"))))
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
    again = load_target(TargetConfig(name=str(written(heads(real_target), real_target, "target", tmp_path / "out"))))
    assert again.identity.weights_hash == real_target.identity.weights_hash
    asked = [{"role": "user", "content": "What is a draft horse?"}]
    assert again.tokenizer.apply_chat_template(asked) == real_target.tokenizer.apply_chat_template(asked)


# A target's own head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", others_long(LINES, ("qwen3-next",)))
def test_import_continue_export(line: str, tmp_path: Path) -> None:
    folder = with_head(line, tmp_path / "target", torch.bfloat16)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    words = ["import", "--format", "mtp", "--target.name", str(folder), "--tree", "[[0],[1],[0,0]]", "--out"]
    assert main([*words, str(tmp_path / "artifact")]) == 0
    facts = read_description(tmp_path / "artifact")["provenance"]["imported"]
    assert facts == {"format": "mtp", "folder": "target",
                     "files": {"model.safetensors": file_sha256(folder / "model.safetensors")}}
    target = load(folder)
    artifact = load_artifact(tmp_path / "artifact", target)
    # Untouched it gives the target's files back, to the byte.
    out = written(artifact.drafter, target, "mtp", tmp_path / "same")
    names, there = ({str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
                    for place in (folder, out))
    assert there == names | {"README.md", "acceptance.json", "origin.json", ".draftsmith.json"}
    for name in names:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
        # What is edited in the export leaves the target as it was.
        assert not (out / name).samefile(folder / name)
    text = (out / "README.md").read_text()
    assert """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'""" in text
    assert "--speculative-algorithm NEXTN" in text
    # Continued it changes the head alone.
    module = draft_module(Mtp)(target, train_config(Mtp)(drafter=MtpConfig(steps=2), max_steps=3, lr=1e-2,
                                                         checkpoint_every=3, validate_every=3, precision="32-true"))
    stored = load_drafter(tmp_path / "artifact", target)
    module.continue_from(Start(drafter=stored.drafter, weights_sha256=stored.config["weights_sha256"]))
    fit(module, CycleData(), tmp_path / "train", progress=False)
    out = written(module.drafter, target, "mtp", tmp_path / "continued")
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    known = LINES[line].names
    assert {f"{known[part]}.weight" for part in ("enorm", "hnorm", "eh_proj", "norm")} <= changed
    assert all(name.startswith(tuple(known.values())) for name in changed)
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: tensor.dtype
                                                                       for name, tensor in before.items()}
    again = load(out)
    assert again.identity.weights_hash == target.identity.weights_hash
    for name, tensor in Mtp.create(MtpConfig(), again).state_dict().items():
        torch.testing.assert_close(tensor, module.drafter.state_dict()[name].to(torch.bfloat16).float())


def test_another_folders_head_is_imported_and_files_without_it_are_linked(tmp_path: Path) -> None:
    folder, other = with_head("qwen3-next", tmp_path / "target"), tmp_path / "other"
    head = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
    other.mkdir()
    save_file({name: 2 * tensor for name, tensor in head.items()},
              other / "model.safetensors-00001-of-00001.safetensors")
    shutil.copyfile(folder / "config.json", other / "config.json")
    # No shard of a checkpoint: no layout reads it.
    save_file(head, other / "model_of_another-1.safetensors")
    assert Checkpoint(other, "none", "config.json").files == [other / "model.safetensors-00001-of-00001.safetensors"]
    (other / "model_of_another-1.safetensors").unlink()
    change(folder, dict.fromkeys(head))
    save_file(head, folder / "mtp.safetensors")
    words = ["import", "--format", "mtp", "--target.name", str(folder), "--folder", str(other), "--tree", "2", "--out"]
    assert main([*words, str(tmp_path / "artifact")]) == 0
    target = load(folder)
    artifact = load_artifact(tmp_path / "artifact", target)
    out = written(artifact.drafter, target, "mtp", tmp_path / "out")
    after = load_file(out / "mtp.safetensors")
    assert all(torch.equal(after[name], 2 * tensor) for name, tensor in head.items())
    assert (out / "model.safetensors").samefile(folder / "model.safetensors")
    # The head of another target has no place in these files.
    shape = artifact.drafter.block
    for changes, sentence in (({"shared_expert_intermediate_size": 24}, r"of shape \[32, 16\], this one.* \[32, 24\]"),
                              ({"num_experts": 2}, "of shape .*, this one, which was made for another target, of"),
                              ({"mlp_only_layers": [0]}, "of shape None, this one, .*; give that with --target.name")):
        drafter = Mtp(MtpConfig(), target, replace(shape, model=shape.model | changes))
        drafter.bind(target)
        with pytest.raises(UserError, match=sentence):
            written(drafter, target, "mtp", tmp_path / "none")


@pytest.mark.long
def test_the_head_is_a_baseline_of_an_evaluation(tmp_path: Path) -> None:
    """Also next to an artifact of the same family."""
    folder = with_head("qwen3-next", tmp_path / "target")
    words = ["import", "--format", "mtp", "--target.name", str(folder), "--tree", "3", "--out"]
    assert main([*words, str(tmp_path / "artifact")]) == 0
    words = ["evaluate", "--artifact", str(tmp_path / "artifact"), "--target.name", str(folder), "--baselines",
             "[native_head]", "--out", str(tmp_path / "report"), "--limit", "4", "--max_new_tokens", "8",
             "--speed_prompts", "0", "--batch_sizes", "2"]
    assert main(words) == 0
    found = json.loads((tmp_path / "report" / "evaluation.json").read_text())
    assert {"mtp", "native_head"} <= set(found["header"]["artifacts"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert {"mtp", "native_head"} <= {row.split("|")[1].strip() for row in text.splitlines() if row.startswith("| ")}


def test_a_target_without_a_head_has_no_place_for_one(tiny_target: Target, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    drafter = Mtp.create(MtpConfig(), tiny_target, start=head(tiny_target))
    with pytest.raises(UserError, match="was not read from a folder of safetensors files"):
        written(drafter, tiny_target, "mtp", tmp_path / "out")
    assert main(["import", "--format", "mtp", "--target.name", "tiny-random", "--tree", "2", "--out",
                 str(tmp_path / "out")]) == 2
    assert "was not read from a folder of safetensors files" in capsys.readouterr().err
    assert main(["import", "--format", "eagle", "--target.name", "tiny-random", "--tree", "2", "--out",
                 str(tmp_path / "out")]) == 2
    assert "import needs the folder of the checkpoint in the format eagle; give it with --folder" in \
        capsys.readouterr().err
    assert not (tmp_path / "out").exists()
