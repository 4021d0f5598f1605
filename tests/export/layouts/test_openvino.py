"""The format of OpenVINO GenAI, with a script in place of the conversion: its job, its folder, its refusals."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import ExportSettings
from draftsmith.modules import Drafter, DraftLM, DraftLMConfig, Eagle3, Eagle3Config, Target, UserError
from safetensors.torch import load_file
from support.artifacts import heads
from support.families import IDS
from support.targets import six_layers

from .test_engine_contracts import written

TOLD = """#!{python}
import json, os, shutil, sys
from pathlib import Path
job = json.loads(Path(sys.argv[2]).read_text())
source = Path(job["source"])
shutil.copytree(source, {copy!r})
Path({log!r}).write_text(json.dumps({{**job, "script": sys.argv[1], "safe": os.environ["PYTHONSAFEPATH"]}}))
Path(job["out"], "openvino_model.xml").write_text("<model/>")
Path(sys.argv[3]).write_text("{{}}")
"""


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


def exported(drafter: Drafter, target: Target, folder: Path) -> dict[str, Any]:
    """The job that the conversion was given; a copy of its source is in `folder/source`."""
    program = folder / "python"
    program.write_text(TOLD.format(python=sys.executable, log=str(folder / "log"), copy=str(folder / "source")))
    program.chmod(0o755)
    written(drafter, target, "openvino", folder / "out", ExportSettings(convert_with=program))
    found: dict[str, Any] = json.loads((folder / "log").read_text())
    return found


def test_eagle_3_is_converted_with_its_layers(tmp_path: Path, target: Target) -> None:
    job = exported(Eagle3.create(Eagle3Config(taps=(1, 2, 4)), target), target, tmp_path)
    assert job["layers"] == [1, 2, 4]
    assert Path(job["script"]).name == "openvino_conversion.py"
    # A file next to the script has the name of a package that the script imports.
    assert job["safe"] == "1"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".draftsmith.json", "README.md", "acceptance.json", "origin.json", "openvino_model.xml"}


@pytest.mark.parametrize("size", [None, len(IDS)])
def test_the_conversion_is_given_the_token_of_every_entry(tmp_path: Path, target: Target, size: int | None) -> None:
    config = Eagle3Config(taps=(1, 2, 4), vocabulary_size=size)
    exported(Eagle3.create(config, target, None if size is None else IDS), target, tmp_path)
    held = load_file(tmp_path / "source" / "model.safetensors")
    tokens = torch.arange(target.vocab_size) if size is None else IDS
    assert (held["d2t"] + torch.arange(len(tokens))).tolist() == tokens.tolist()
    assert len(held["lm_head.weight"]) == len(tokens)


def test_a_draft_model_is_converted_with_its_tokenizer(tmp_path: Path, target: Target) -> None:
    job = exported(DraftLM.create(DraftLMConfig(num_layers=1), target), target, tmp_path)
    assert job["layers"] is None
    names = {path.name for path in (tmp_path / "source").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "openvino_genai.draft_model" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("settings", "named"), [
    ({"num_layers": 2}, "2 layers"), ({"hidden_size": 48}, "the width 48 for states 32 wide"),
    ({"taps": (1, 4)}, "2 tapped layers"), ({"fc_norm": True}, "fc_norm"),
    ({"norm_output": True}, "norm_output"), ({"norm_before_fc": True}, "norm_before_fc"),
    ({"norm_before_residual": True}, "norm_before_residual"),
])
def test_what_it_does_not_run_is_refused(tmp_path: Path, target: Target, settings: dict[str, Any], named: str) -> None:
    drafter = Eagle3.create(Eagle3Config(**{"taps": (1, 2, 4), **settings}), target)
    with pytest.raises(UserError, match=f"this drafter has {named}; train another, or choose --format eagle, "):
        exported(drafter, target, tmp_path)
    assert not (tmp_path / "out").exists()


def test_an_interpreter_is_needed(tmp_path: Path, target: Target) -> None:
    drafter = DraftLM.create(DraftLMConfig(num_layers=1), target)
    with pytest.raises(UserError, match="give its interpreter with --convert_with PYTHON"):
        written(drafter, target, "openvino", tmp_path / "out")
    with pytest.raises(UserError, match=r"none does not start \(No such file or directory\); give the bin/python of an "
                                        "environment with optimum-intel"):
        written(drafter, target, "openvino", tmp_path / "out", ExportSettings(convert_with=Path("none")))
    with pytest.raises(UserError, match="holds draft language models, EAGLE-3 drafters and DFlash drafters"):
        written(heads(target), target, "openvino", tmp_path / "out")
    assert not (tmp_path / "out").exists()
