"""Whole runs of targets of the kinds that people serve, of quantised ones and of one that a server answers for; and a
draft that comes of few answers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.store.token_store import Row, hash_bytes
from draftsmith.modules import TargetConfig, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from draftsmith.trainers.base import LEAST_STEPS
from support.data.data_folders import many, write_prompts
from support.data.servers import StatesServer, serving
from support.target_folders import SERVED, compressed_tensors, write_quantised

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
    assert main(["run", "--config", "tiny", "--out", str(tmp_path / "run"), *target, *rounded]) == 0
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


@pytest.mark.long
@pytest.mark.slow
def test_a_target_on_disk_is_drafted_for_by_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "target", tmp_path / "run"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    prompts = write_prompts(tmp_path, many(30)).path
    with serving(StatesServer(load_target(TargetConfig(name=str(folder))), ids=(2,), folder=tmp_path)) as server:
        words = ["--config", "tiny", "--family", "eagle", "--drafter", "{}", "--out", str(out),
                 "--target.name", str(folder), "--target.placement", "disk", "--prompts", "{}",
                 "--prompts.origin", "file", "--prompts.path", str(prompts), "--batch.states", "stored",
                 "--distill.max_new_tokens", "16", "--distill.validation_prompts", "4", "--train.max_steps", "6",
                 "--train.validate_every", "3", "--train.warmup_steps", "1"]
        asked = ["--distill.engine", f"{server.address}/v1", "--distill.states_from", f"{server.address}/v1"]
        assert main(["distill", *words]) == 2
        assert "an engine must answer and give states; set distill.engine and" in capsys.readouterr().err
        assert main(["run", *words, *asked]) == 2
        assert "call draftsmith distill and draftsmith train in place of run" in capsys.readouterr().err
        assert main(["distill", *words, *asked]) == 0
        assert f"{server.address}/v1 gives them; at a few rows they are the target's own" in capsys.readouterr().out
        # Answers and states are there: nobody is asked any more.
        answered = len(server.received)
        assert main(["train", *words, *asked]) == 0
    assert len(server.received) == answered
    assert "no size of it is measured here" in capsys.readouterr().out
    found = json.loads((out / "data" / "manifest.json").read_text())
    assert {"states_from", "workers"}.isdisjoint(found["recipe"]["distill"])
    assert main(["evaluate", "--artifact", str(out / "artifact"), "--target.name", str(folder), "--limit", "2",
                 "--max_new_tokens", "8", "--speed_prompts", "0", "--out", str(tmp_path / "evaluation")]) == 0


def shortened(data: Path, kept: dict[float, int], tokens: int) -> None:
    """Keep so many held-out answers of each temperature, and of each its first tokens."""
    manifest, rows = Manifest.load(data), list[Row]()
    [record] = manifest.split("validation")
    shard = TokenShard.read(data / record.file, record.sha256)
    for temperature, answers in kept.items():
        for number in shard.answered_at(temperature)[:answers]:
            start, stop = shard.span(number)
            first = start + int(shard.supervised_T[start:stop].nonzero()[0])
            place = slice(start, min(stop, first + tokens))
            rows.append(Row(tokens=tuple(shard.tokens_T[place].tolist()), prompt=len(rows), temperature=temperature,
                            supervised=tuple(shard.supervised_T[place].tolist()), source="target"))
    few = TokenShard.from_rows(rows, range(len(rows)))
    (data / record.file).write_bytes(few.to_bytes())
    found = replace(record, sha256=hash_bytes(few.to_bytes()), rows=len(rows), by_target=len(rows), answers=len(rows),
                    prompts=len(rows), tokens=len(few.tokens_T), supervised=int(few.supervised_T.sum()))
    replace(manifest, shards=tuple(found if one == record else one for one in manifest.shards)).save(data)


@pytest.mark.parametrize(("family", "kept", "tokens"), [
    ("medusa", {0.0: 1, 1.0: 1}, 1), pytest.param("medusa", {0.0: 1}, 50, marks=pytest.mark.long),
    # It answers anew what it has changed: nothing of single tokens.
    pytest.param("medusa2", {0.0: 2, 1.0: 2}, 1, marks=pytest.mark.long)])
def test_an_artifact_with_a_tree_comes_of_few_held_out_tokens(
    tiny_run: Path, tmp_path: Path, family: str, kept: dict[float, int], tokens: int
) -> None:
    data = Path(shutil.copytree(tiny_run / "data", tmp_path / "data", ignore=lambda _, names: [
        name for name in names if "-validation" in name]))
    shortened(data, kept, tokens)
    states = [] if family == "medusa" else ["--batch.states", "computed"]
    assert main(["train", "--config", "tiny", "--family", family, "--drafter", "{}", *states, "--out",
                 str(tmp_path / "out"), "--data", str(data), "--train.max_minutes", "1e-6"]) == 0
    assert json.loads((tmp_path / "out" / "train" / "result.json").read_text())["accepted_length"] >= 1
    config = json.loads((tmp_path / "out" / "artifact" / "config.json").read_text())
    assert config["provenance"]["training"]["steps"] == LEAST_STEPS
    assert (tmp_path / "out" / "artifact" / "tuning.json").is_file()
