"""Recipes that continue a draft: its shape is planned, its accepted length reported, a changed or unfit one refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from draftsmith.export import read_description
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.stages.workspace import Workspace
from safetensors.torch import load_file
from support.artifacts import edit


def words(out: Path, start: Path, *more: str) -> list[str]:
    """Options of the tiny recipe that continues an artifact."""
    return ["--config", "tiny", "--out", str(out), "--train.start", str(start), *more]


def test_a_plan_has_the_shape_of_the_start(tiny_run: Path, tmp_path: Path) -> None:
    start = tiny_run / "artifact"
    parameters = sum(weight.numel() for weight in load_file(start / "model.safetensors").values())
    for more, expected in (((), parameters), (("--drafter.num_heads", "5"), parameters // 3 * 5)):
        parsed = COMMANDS["run"].parse(words(tmp_path, start, *more))
        module = Workspace(parsed).tried
        assert module.drafter.heads[0][0].linear.weight.is_meta, "a plan reads no weights"
        assert sum(weight.numel() for weight in module.drafter.parameters()) == expected


def test_a_start_that_does_not_fit_is_refused_before_anything_is_answered(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = Path(shutil.copytree(tiny_run / "artifact", tmp_path / "start"))
    identity, out = read_description(start)["target"], tmp_path / "out"

    def refused(start: Path, *more: str, at: Path = out) -> str:
        assert main(["distill", *words(at, start, *more)]) == 2
        assert not (out / "data" / "manifest.json").exists()
        return capsys.readouterr().err

    assert "nowhere holds no artifact (config.json is missing); give the folder" in refused(tmp_path / "nowhere")
    assert f"holds no artifact (config.json is missing); give {tiny_run / 'artifact'}" in refused(tiny_run)
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert f"make an artifact of this one with draftsmith import --folder {published}" in refused(published)
    assert "the artifact that this run would write; choose another --out" in refused(tmp_path / "artifact", at=tmp_path)
    assert "holds a drafter of the family medusa, and this recipe trains hydra" in refused(start, "--family", "hydra")
    assert "drafter.num_heads is 2, and the drafter of train.start has 3" in refused(start, "--drafter.num_heads", "2")
    edit(start, target=identity | {"weights_hash": "other"})
    assert "with weights_hash other, but the target here" in refused(start)
    edit(start, target=identity | {"hidden_size": 64})
    assert "with hidden_size 64, but the target here" in refused(start)


@pytest.mark.long
def test_a_continued_draft_is_reported_next_to_its_start(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = Path(shutil.copytree(tiny_run / "artifact", tmp_path / "start")), tmp_path / "out"
    given = words(out, start, "--data", str(tiny_run / "data"), "--train.max_steps", "10", "--drafter.num_heads", "4")
    assert main(["run", *given]) == 0
    assert f"continues the drafter in {start}, with its num_heads 3" in capsys.readouterr().out
    before = read_description(start)
    found, result = read_description(out / "artifact"), json.loads((out / "train" / "result.json").read_text())
    # The same held-out text as that of the run that made the start.
    length = before["provenance"]["acceptance"]["accepted_length"]
    assert result["curve"][0]["accepted_length"] == length
    assert result["accepted_length"] >= length
    assert found["provenance"]["start"] == {"weights_sha256": before["weights_sha256"], "accepted_length": length}
    assert f"| continues | the drafter with weights `{before['weights_sha256']}`, {length:.2f} tokens per" in (
        out / "artifact" / "README.md").read_text()
    assert f"of held-out text, {length:.2f} before this training" in (out / "report.html").read_text()
    assert main(["run", *given]) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 4
    edit(start, provenance={})
    assert main(["run", *given]) == 2
    assert re.search(r"train was started with train.start '[0-9a-f]+\.\.\., now it is '[0-9a-f]+\.\.\.;",
                     capsys.readouterr().err)


@pytest.mark.long
def test_a_draft_is_carried_over_to_another_version_of_its_target(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out, name = tiny_run / "artifact", tmp_path / "out", str(tmp_path / "tuned")
    tiny_model(seed=1).save_pretrained(name)
    tiny_tokenizer().save_pretrained(name)
    given = words(out, start, "--target.name", name)
    assert main(["run", *given]) == 2
    assert "continue the draft by draftsmith run with train.start and --retarget" in capsys.readouterr().err
    assert not (out / "data" / "manifest.json").exists()
    assert main(["run", *given, "--retarget"]) == 0
    said = capsys.readouterr().out
    assert f"carries the draft for tiny-random over to {name}" in said
    assert "tokenizers" not in said
    lossless = json.loads((out / "evaluation.json").read_text())["lossless"]
    assert lossless["identical"] == lossless["prompts"] > 0
    former, made = read_description(start), read_description(out / "artifact")
    assert made["provenance"]["start"]["target"] == former["target"]
    assert made["target"]["weights_hash"] != former["target"]["weights_hash"]
    card = (out / "artifact" / "README.md").read_text()
    assert f"`{former['weights_sha256']}` for tiny-random (`{former['target']['weights_hash'][:12]}`), " in card
    assert main(["export", "--artifact", str(out / "artifact"), "--target.name", name, "--format", "medusa", "--out",
                 str(tmp_path / "medusa")]) == 0
    back = ["--folder", str(tmp_path / "medusa"), "--out", str(tmp_path / "back")]
    assert main(["import", "--format", "medusa", *back, "--target.name", name, "--tree", "3"]) == 0
    said = []
    for artifact in (out / "artifact", tmp_path / "back"):
        capsys.readouterr()
        assert main(["generate", "--artifact", str(artifact), "--target.name", name, "--prompt", "hello",
                     "--max_new_tokens", "16"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_nothing_is_carried_over_without_a_start_and_another_tokenizer_is_named(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--config", "tiny", "--out", str(tmp_path / "a"), "--retarget"]) == 2
    assert "retarget is true, and nothing is carried over to this target; name the artifact with train.start" in (
        capsys.readouterr().err)
    start = Path(shutil.copytree(tiny_run / "artifact", tmp_path / "start"))
    edit(start, target=read_description(start)["target"] | {"tokens_hash": "other"})
    parsed = COMMANDS["run"].parse(words(tmp_path / "b", start, "--retarget"))
    assert Workspace(parsed).target.vocab_size > 0
    assert "the tokenizers of tiny-random and tiny-random differ" in capsys.readouterr().out
