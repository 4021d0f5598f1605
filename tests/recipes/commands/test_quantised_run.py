"""The whole main job for a quantised target: run, evaluate, export and generate, all answers identical."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.recipes.__main__ import main
from support.quantised_folders import compressed_tensors, write_quantised

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml"
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "compressed-tensors", "int8"])
def test_a_draft_of_a_quantised_target_is_exact_and_says_so(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, artifact = tmp_path / "model", str(tmp_path / "run" / "artifact")
    target = ["--target.name", str(folder)]
    if form == "fp8":
        write_quantised(folder, FP8, torch.float8_e4m3fn, "weight_scale_inv", blocks=True)
    elif form == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        write_quantised(folder, compressed_tensors("int", ["lm_head"]), torch.int8)
    else:
        pytest.importorskip("torchao")
        target = []
    rounded = ["--target.quantization", "int8"] if form == "int8" else []
    assert main(["run", "--config", str(TINY), "--out", str(tmp_path / "run"), *target, *rounded]) == 0
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["lossless"]
    assert found["identical"] == found["prompts"] > 0
    card = (tmp_path / "run" / "artifact" / "README.md").read_text()
    assert f"quantised ({form}): the draft is distilled from these" in card
    # What rounds the weights on reading comes with the artifact, like the target's name.
    assert ("quantization='int8'" in card) == (form == "int8")
    assert main(["evaluate", "--artifact", artifact, *target, "--out", str(tmp_path / "report"), "--temperatures",
                 "[0.0,1.0]", "--limit", "2", "--max-new-tokens", "16", "--speed-prompts", "1"]) == 0
    layout = ["--format", "medusa", "--out", str(tmp_path / "medusa")]
    assert main(["export", "--artifact", artifact, *target, *layout]) == 0
    answer = ["generate", "--artifact", artifact, *target, "--prompt", "hello", "--max-new-tokens", "9"]
    assert main(answer) == 0
    if form == "int8":
        capfd.readouterr()
        assert main([*answer, "--target.quantization", "float8"]) == 2
        assert "this was made for the target tiny-random with weights_hash" in capfd.readouterr().err
