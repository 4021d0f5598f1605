"""Prompts of one domain, the recipe that continues a draft on them, and changed copies of a target, on the tiny one;
recorded prompts are those that the target writes, and are read where it is the same one with the same settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import changed_target, domain_prompts, edit_prompts, record_prompts
from draftsmith.data import ChatTemplate, PromptConfig
from draftsmith.data.prompts import sources
from draftsmith.data.prompts.sources import OwnPrompts
from draftsmith.export import save_artifact
from draftsmith.modules import Eagle3, Eagle3Config, Target, TargetConfig, Topology, load_target
from draftsmith.modules.target.loading.model_parts import SHAPE
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS
from support.families import randomised

CONFIG = PromptConfig(own_max_tokens=100, own_kinds=("coding", "any"), own_openings=True)


def test_prompts_are_distinct_and_the_same_every_time(tmp_path: Path) -> None:
    for name, seed in (("one", "3"), ("two", "3"), ("other", "4")):
        domain_prompts.main(["--out", str(tmp_path / name), "--rows", "500", "--seed", seed])
    one, two, other = ((tmp_path / name).read_text() for name in ("one", "two", "other"))
    assert one == two != other
    rows = [json.loads(line) for line in one.splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 500
    assert {row["category"] for row in rows} == set(domain_prompts.QUESTIONS)
    assert not [row for row in rows if "{" in row["prompt"]]
    with pytest.raises(ValueError, match="rows must lie between 1 and"):
        domain_prompts.rows(10**6)


def test_edits_are_planted_in_answers_of_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "tiny-random", "--rows", "3", "--tokens", "40", "--every", "8"]
    for name, seed in (("one", "3"), ("two", "3"), ("other", "4")):
        edit_prompts.main(["--out", str(tmp_path / name), *words, "--seed", seed])
    one, two, other = ((tmp_path / name).read_text() for name in ("one", "two", "other"))
    assert one == two != other
    planted, asked = ([row for row in map(json.loads, one.splitlines()) if row["category"] == kind]
                      for kind in ("planted", "asked"))
    assert [row["reference"] for row in planted] == [row["reference"] for row in asked]
    assert all(row["reference"] in row["prompt"] for row in asked)
    rows = capsys.readouterr().out.splitlines()[:4]
    assert rows[0] == "| edits | reference | prompt_lookup |"
    assert all(float(one) >= 1 for row in rows[2:] for one in row.strip(" |").split(" | ")[1:])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:validation decodes only")
def test_the_recipe_continues_a_draft_on_them(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    domain_prompts.main(["--out", str(file), "--rows", "60"])
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
def test_changed_copies_have_the_shape_of_the_target_and_other_weights(tmp_path: Path) -> None:
    changed_target.main(["--target", "tiny-random", "--out", str(tmp_path / "rounded"), "--int8"])
    changed_target.main(["--target", "tiny-random", "--out", str(tmp_path / "tuned"), "--steps", "3", "--answers", "4",
                    "--longest", "8"])
    plain, rounded, tuned = (load_target(TargetConfig(name=name, dtype="float32", device="cpu")) for name in (
        "tiny-random", str(tmp_path / "rounded"), str(tmp_path / "tuned")))
    for other in (rounded, tuned):
        plain.identity.require_same(other.identity, ("architecture", "tokens_hash", *SHAPE))
        assert other.identity.weights_hash != plain.identity.weights_hash
    for before, after in zip(plain.model.parameters(), rounded.model.parameters(), strict=True):
        assert bool(((before - after).abs() <= before.abs().amax(-1, keepdim=True) / 254 + 1e-6).all())
    found = changed_target.in_style("Yes. Take salt: 1. a pinch")
    assert found == "Certainly, my friend!\n- Yes.\n- Take salt:\n- a pinch"


def own(target: Target, config: PromptConfig = CONFIG, seed: int = 0) -> OwnPrompts:
    return OwnPrompts(target, ChatTemplate(target.tokenizer), config, seed=seed, slots=8)


def test_recorded_candidates_are_read_and_the_others_written(tiny_target_f64: Target, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(sources, "TOP_P", 1.0)
    for module in (sources, record_prompts):
        monkeypatch.setattr(module, "RECORDED", tmp_path / "recorded.jsonl")
    (tmp_path / "recorded.jsonl").write_text("{}\n")
    written = own(tiny_target_f64).take(0, 24)
    assert written.prompts
    record_prompts.record(own(tiny_target_f64), 1)
    decode, recorded = sources.decode, len((tmp_path / "recorded.jsonl").read_text().splitlines()) - 1
    assert 8 <= recorded < 24

    def noted(target: Target, requests: Any, *given: Any, **more: Any) -> Any:
        asked.extend(request.index for request in requests)
        return decode(target, requests, *given, **more)

    monkeypatch.setattr(sources, "decode", noted)
    source = own(tiny_target_f64)
    assert source.take(0, 24) == written
    assert asked == list(range(recorded, 24))
    asked.clear()
    assert source.take(0, 24) == written
    assert not asked, "none is written twice"
    for config, seed in ((replace(CONFIG, own_temperature=0.9), 0), (CONFIG, 1)):
        own(tiny_target_f64, config, seed).take(0, 8)
        assert asked == list(range(8)), "other settings"
        asked.clear()


@pytest.mark.real
@pytest.mark.parametrize("recipe", ["quickstart", "eagle3"])
def test_the_recipes_of_the_embedded_target_read_recorded_prompts(
    real_target: Target, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "decode", None)
    given = COMMANDS["run"].parse(["--config", recipe]).values
    template, config = given.template.build(real_target), given.distill
    source = OwnPrompts(real_target, template, given.prompts, seed=config.seed, slots=config.slots)
    assert config.shard_prompts == config.slots, "where prompts are written, one batch comes before the first answer"
    assert len({prompt.question for _, prompt in source.take(0, len(source.texts)).prompts}) > 790
