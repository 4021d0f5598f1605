"""Recorded prompts are those that the target writes, and are read where it is the same one with the same settings."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, PromptConfig
from draftsmith.data.prompts import self_prompting
from draftsmith.data.prompts.self_prompting import OwnPrompts
from draftsmith.modules import Target
from draftsmith.recipes.commands.pipeline import COMMANDS

CONFIG = PromptConfig(own_max_tokens=100, own_kinds=("coding", "any"), own_openings=True)


def own(target: Target, config: PromptConfig = CONFIG, seed: int = 0) -> OwnPrompts:
    return OwnPrompts(target, ChatTemplate(target.tokenizer), config, seed=seed, slots=8)


def test_recorded_candidates_are_read_and_the_others_written(tiny_target_f64: Target, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, asked = importlib.import_module("benchmarks.record_prompts"), list[int]()
    monkeypatch.setattr(self_prompting, "TOP_P", 1.0)
    for module in (self_prompting, benchmark):
        monkeypatch.setattr(module, "RECORDED", tmp_path / "recorded.jsonl")
    (tmp_path / "recorded.jsonl").write_text("{}\n")
    written = own(tiny_target_f64).take(0, 24)
    assert written.prompts
    benchmark.record(own(tiny_target_f64), 1)
    decode, recorded = self_prompting.decode, len((tmp_path / "recorded.jsonl").read_text().splitlines()) - 1
    assert 8 <= recorded < 24

    def noted(target: Target, requests: Any, *given: Any, **more: Any) -> Any:
        asked.extend(request.index for request in requests)
        return decode(target, requests, *given, **more)

    monkeypatch.setattr(self_prompting, "decode", noted)
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
    monkeypatch.setattr(self_prompting, "decode", None)
    given = COMMANDS["run"].parse(["--config", recipe]).values
    template, config = given.template.build(real_target), given.distill
    source = OwnPrompts(real_target, template, given.prompts, seed=config.seed, slots=config.slots)
    assert config.shard_prompts == config.slots, "where prompts are written, one batch comes before the first answer"
    assert len({prompt.question for _, prompt in source.take(0, len(source.texts)).prompts}) > 790
