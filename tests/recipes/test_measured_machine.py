"""Runs on machines that are measured: what pays decides no byte, and a measured number format is kept in the folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import load_target
from draftsmith.modules.target import linear_forms
from draftsmith.modules.target.linear_forms import TOKENS, LinearTimes
from draftsmith.modules.target.loading import self_check
from draftsmith.modules.target.loading.loading import load_in_format
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.stages import workspace

PLAIN_PAYS = LinearTimes(dtype="float32", tokens=TOKENS, plain=(1.0,) * 6, packed=(2.0,) * 6)
BOTH_PAY = LinearTimes(dtype="float32", tokens=TOKENS, plain=(1.0, 1.0, 3.0, 3.0, 3.0, 3.0), packed=(2.0,) * 6)


def made(out: Path, *words: str) -> dict[str, bytes]:
    """Files of a run's data, training and artifact that must not depend on the machine."""
    for command in ("distill", "train"):
        assert main([command, "--config", "tiny", "--out", str(out), *words]) == 0
    names = ("config.json", "model.safetensors", "README.md", "best.safetensors")
    return {str(file.relative_to(out)): file.read_bytes() for folder in ("data", "train", "artifact")
            for file in sorted((out / folder).iterdir())
            if file.name in names or (folder == "data" and file.name != "stats.json")}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not linear_forms.has_packed_product(torch.float32),
                    reason="this build has no packed product")
def test_no_measurement_changes_a_byte_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    # Packed products that differ by far more than rounding show in every byte which form ran.
    original = linear_forms._packed_forward
    monkeypatch.setattr(linear_forms, "_packed_forward", lambda x, **given: original(x, **given) + 0.1)
    monkeypatch.setattr(self_check, "check_logits", lambda *_given, **_options: None)
    monkeypatch.setattr(linear_forms, "worth_measuring", lambda _model: True)
    found = []
    for times in (PLAIN_PAYS, BOTH_PAY):
        def measured(_model: Any, dtypes: Any, times: LinearTimes = times) -> Any:
            return dict.fromkeys(dtypes, times)

        monkeypatch.setattr(linear_forms, "measure_linears", measured)
        out = tmp_path / str(len(found))
        found.append(made(out))
        tuning = json.loads((out / "artifact" / "tuning.json").read_text())
        assert tuning["linear_layers"]["packed_from"] == times.fastest()
    assert found[0] == found[1]
    said = capsys.readouterr().out
    assert "linear layers plain, which was measured to be fastest here" in said
    assert "packed for oneDNN in passes of 4 tokens or more, plain in smaller ones, which was measured" in said


@pytest.mark.long
def test_a_measured_number_format_is_kept_for_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    formats = iter(("bfloat16", "float32"))
    monkeypatch.setattr(workspace, "fastest_format", lambda _config, _rows: next(formats))
    loaded = []
    monkeypatch.setattr(workspace, "load_target", lambda config: loaded.append(config.dtype) or load_target(config))
    words = ["--config", "tiny", "--out", str(tmp_path), "--target.dtype", "fastest"]
    # The first process measures; the second one, which would find another format, goes on with the first one's.
    for _ in range(2):
        assert main(["distill", *words]) == 0
    assert loaded[0] == "bfloat16"
    assert set(loaded) == {"bfloat16"}
    assert json.loads((tmp_path / "machine.json").read_text()) == {"dtype": "bfloat16"}
    assert capsys.readouterr().out.count("was measured to be fastest in bfloat16") == 1
    (tmp_path / "machine.json").write_text('{"dtype": "int8"}')
    (tmp_path / "stages.json").unlink()
    assert main(["distill", *words]) == 2
    assert "machine.json is damaged: dtype must be one of float32, bfloat16" in capsys.readouterr().err


@pytest.mark.long
def test_a_measured_format_for_train_prompts_is_kept_and_used_for_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = iter(("bfloat16", "float32"))
    measured, loaded, cast = [], [], []
    monkeypatch.setattr(workspace, "fastest_format", lambda _config, rows: measured.append(rows) or next(formats))
    monkeypatch.setattr(workspace, "load_target", lambda config: loaded.append(config.dtype) or load_target(config))
    monkeypatch.setattr(workspace, "load_in_format",
                        lambda *given: cast.append(given[2]) or load_in_format(*given))
    words = ["--config", "tiny", "--out", str(tmp_path), "--distill.train_dtype", "fastest"]
    assert main(["distill", *words]) == 0
    manifest = (tmp_path / "data" / "manifest.json").read_bytes()
    (tmp_path / "stages.json").unlink()
    assert main(["distill", *words]) == 0
    assert measured == [64]
    assert loaded == ["auto"] * 2
    assert cast == [torch.bfloat16] * 2
    assert (tmp_path / "data" / "manifest.json").read_bytes() == manifest
    assert json.loads(manifest)["recipe"]["distill"]["train_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "machine.json").read_text()) == {"train_dtype": "bfloat16"}
    assert capsys.readouterr().out.count("answering 64 prompts at once was measured to be fastest in bfloat16") == 1


def test_no_format_is_measured_for_given_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "fastest_format", None)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    parsed = COMMANDS["run"].parse([
        "--config", "tiny", "--out", str(tmp_path / "run"), "--distill.train_dtype", "fastest",
        "--distill.answered_by", "text", "--prompts.origin", "file", "--prompts.path", str(file)])
    here = workspace.Workspace(parsed)
    assert here.distill_config.train_dtype == "own"
    assert here.train_target() is None
