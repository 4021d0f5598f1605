"""Prompts of one domain, the recipe that continues a draft on them, and changed copies of a target, on the tiny one."""

import importlib
import json
from pathlib import Path

import pytest
from draftsmith.export import save_artifact
from draftsmith.modules import Eagle3, Eagle3Config, TargetConfig, Topology, load_target
from draftsmith.modules.target.loading.model_parts import SHAPE
from draftsmith.recipes.__main__ import main
from support.families import randomised


def test_prompts_are_distinct_and_the_same_every_time(tmp_path: Path) -> None:
    benchmark = importlib.import_module("benchmarks.domain_prompts")
    for name, seed in (("one", "3"), ("two", "3"), ("other", "4")):
        benchmark.main(["--out", str(tmp_path / name), "--rows", "500", "--seed", seed])
    one, two, other = ((tmp_path / name).read_text() for name in ("one", "two", "other"))
    assert one == two != other
    rows = [json.loads(line) for line in one.splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 500
    assert {row["category"] for row in rows} == set(benchmark.QUESTIONS)
    assert not [row for row in rows if "{" in row["prompt"]]
    with pytest.raises(ValueError, match="rows must lie between 1 and"):
        benchmark.rows(10**6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:validation decodes only")
def test_the_recipe_continues_a_draft_on_them(tmp_path: Path) -> None:
    benchmark, file = importlib.import_module("benchmarks.domain_prompts"), tmp_path / "prompts.jsonl"
    benchmark.main(["--out", str(file), "--rows", "60"])
    target = load_target(TargetConfig(name="tiny-random"))
    config = Eagle3Config(norm_before_fc=True, norm_before_residual=True, norm_output=True)
    save_artifact(tmp_path / "start", randomised(Eagle3.create(config, target)), target.identity, {}, Topology.chain(3))
    changed = {"target.name": "tiny-random", "out": tmp_path / "out", "prompts.path": file,
               "train.start": tmp_path / "start", "drafter.vocabulary_size": "null", "distill.workers": "null",
               "distill.train_dtype": "own", "distill.budget_tokens": 600, "distill.max_new_tokens": 32,
               "distill.validation_prompts": 4, "distill.test_prompts": 4, "batch.row_length": 128,
               "train.max_steps": 4, "train.validate_every": 2, "evaluate.limit": 2, "evaluate.max_new_tokens": 8}
    words = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    assert main(["run", "--config", "eagle3_domain", *words]) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert set(found["by_prompt_set"]) == {"own", "handwritten"}
    curve = json.loads((tmp_path / "out" / "train" / "result.json").read_text())["curve"]
    assert [one["step"] for one in curve] == [0, 2, 4]
    assert f"{curve[0]['accepted_length']:.2f} before this training" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.long
def test_changed_copies_have_the_shape_of_the_target_and_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    benchmark = importlib.import_module("benchmarks.changed_target")
    benchmark.main(["--target", "tiny-random", "--out", str(tmp_path / "rounded"), "--int8"])
    benchmark.main(["--target", "tiny-random", "--out", str(tmp_path / "tuned"), "--steps", "3", "--answers", "4",
                    "--longest", "8"])
    plain, rounded, tuned = (load_target(TargetConfig(name=name, dtype="float32", device="cpu")) for name in (
        "tiny-random", str(tmp_path / "rounded"), str(tmp_path / "tuned")))
    for other in (rounded, tuned):
        plain.identity.require_same(other.identity, ("architecture", "tokens_hash", *SHAPE))
        assert other.identity.weights_hash != plain.identity.weights_hash
    for before, after in zip(plain.model.parameters(), rounded.model.parameters(), strict=True):
        assert bool(((before - after).abs() <= before.abs().amax(-1, keepdim=True) / 254 + 1e-6).all())
    assert benchmark.in_style("Yes. Take salt: 1. a pinch") == "Certainly, my friend!\n- Yes.\n- Take salt:\n- a pinch"
