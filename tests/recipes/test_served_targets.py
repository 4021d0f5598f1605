"""The whole way of targets of the kinds that people serve: from the model to a measured, exported draft."""

import json
from pathlib import Path

import pytest
import yaml
from draftsmith.recipes.__main__ import main
from support.prompt_files import many, write_prompts
from support.served_targets import SERVED

LAYOUTS = {"medusa": "medusa", "eagle3": "eagle"}
TAPPED = ("gated delta rule and experts", "sinks", "layers of unlike shape", "pictures")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.slow
# Taps read the layers whose states differ in kind or place; heads are enough where all of it lies inside the layers.
@pytest.mark.parametrize(("kind", "family"), [(kind, "eagle3" if kind in TAPPED else "medusa") for kind in SERVED])
def test_a_target_goes_from_a_run_to_an_export(kind: str, family: str, tmp_path: Path) -> None:
    """Answers with a tree, greedy and sampled, are those of the target alone."""
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text()) | {
        "family": family, "target": {"name": str(SERVED[kind](tmp_path / "target"))}, "out": str(tmp_path / "run"),
        "prompts": {"origin": "file", "path": str(tmp_path / "prompts.jsonl")}}
    write_prompts(tmp_path, many(24))
    recipe["distill"] |= {"budget_tokens": 400, "max_new_tokens": 24, "validation_prompts": 4}
    recipe["train"] |= {"max_steps": 6, "validate_every": 3, "warmup_steps": 1}
    recipe["evaluate"] |= {"temperatures": [0.0, 1.0], "speed_prompts": 0, "limit": 2, "max_new_tokens": 12,
                           # A tree of eight nodes, however little the held-out text and the machine would choose.
                           "policies": ["eagle2-8"]}
    if family != "medusa":
        del recipe["drafter"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "--config", str(tmp_path / "recipe.yaml")]) == 0
    content = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert {entry["temperature"] for entry in content["measurements"]} == {0.0, 1.0}
    for entry in content["measurements"]:
        assert entry["lossless"]["identical"] == entry["prompts"], entry["lossless"]
        assert entry["nodes"] > 2, entry["method"]
    assert main(["export", "--artifact", str(tmp_path / "run" / "artifact"), "--format", LAYOUTS[family], "--out",
                 str(tmp_path / "export"), "--target.name", str(tmp_path / "target")]) == 0
    assert list((tmp_path / "export").glob("*.safetensors"))
