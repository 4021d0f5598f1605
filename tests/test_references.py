"""Answers of the target alone that runs share: given once, and never where anything they depend on differs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from draftsmith.export import EvaluateConfig, Evaluation, Question, bench, evaluate
from draftsmith.export.references import REFERENCES, References
from draftsmith.modules import Target, TargetConfig, load_target

SETS = {"one": [Question.single([1, 2, 3]), Question.single([4, 5]), Question.single([9, 9, 30, 7])]}
CONFIG = EvaluateConfig(max_new_tokens=8, speed_prompts=0, temperatures=(0.0, 1.0), baselines=("prompt_lookup",))


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each call of `generate` answers."""
    counts: list[int] = []
    original = bench.generate

    def watch(model: Any, target: Target, prompts: Sequence[Sequence[int]], **more: Any) -> list[list[int]]:
        counts.append(len(prompts))
        return original(model, target, prompts, **more)

    monkeypatch.setattr(bench, "generate", watch)
    return counts


def run(target: Target, file: Path | None, config: EvaluateConfig = CONFIG) -> tuple[Evaluation, ...]:
    return evaluate(target, [], SETS, config, references=file, progress=False).evaluations


def test_a_second_run_asks_the_target_nothing_and_finds_the_same(tmp_path: Path, tiny_target_f64: Target,
                                                                 generated: list[int]) -> None:
    file = tmp_path / REFERENCES
    first = run(tiny_target_f64, file)
    assert sum(generated) == len(SETS["one"])
    written = file.read_bytes()
    generated.clear()
    assert run(tiny_target_f64, file) == first == run(tiny_target_f64, None)
    assert sum(generated) == len(SETS["one"])  # by the run without a file
    assert file.read_bytes() == written


def test_a_wrong_reference_is_found_out(tmp_path: Path, tiny_target_f64: Target, generated: list[int]) -> None:
    """Where a draft's answer parts from what was kept, the target is asked once more."""
    file = tmp_path / REFERENCES
    run(tiny_target_f64, file)
    known = References(file, tiny_target_f64, CONFIG)
    right = known.find((1, 2, 3), 0.0, 0)
    assert right is not None
    known.note((1, 2, 3), 0.0, 0, (right[0] ^ 1, *right[1:]))
    known.save()
    generated.clear()
    assert run(tiny_target_f64, file)[0].overall.lossless.identical == len(SETS["one"])
    assert generated == [1]


@pytest.mark.parametrize("changed", [
    {"max_new_tokens": 7}, {"seed": 1}, {"top_k": 3}, {"top_p": 0.5},
], ids=str)
def test_other_settings_are_answered_anew(tmp_path: Path, tiny_target_f64: Target, changed: dict[str, Any]) -> None:
    known = References(tmp_path / REFERENCES, tiny_target_f64, CONFIG)
    known.note((1, 2), 1.0, 0, (5,))
    known.note((1, 2), 0.0, 0, (6,))
    known.save()
    other = References(tmp_path / REFERENCES, tiny_target_f64, EvaluateConfig(**{"max_new_tokens": 8, **changed}))
    assert other.find((1, 2), 1.0, 0) is None
    # A greedy answer has no random stream.
    assert other.find((1, 2), 0.0, 3) == ((6,) if "seed" in changed else None)
    assert References(tmp_path / REFERENCES, tiny_target_f64, CONFIG).find((1, 2), 1.0, 1) is None


def test_another_target_has_answers_of_its_own(tmp_path: Path, tiny_target: Target) -> None:
    known = References(tmp_path / REFERENCES, tiny_target, CONFIG)
    known.note((1, 2), 0.0, 0, (6,))
    known.save()
    other = load_target(TargetConfig(name="tiny-random", dtype="float64"))
    assert References(tmp_path / REFERENCES, other, CONFIG).find((1, 2), 0.0, 0) is None


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_damaged_file_costs_time_alone(tmp_path: Path, tiny_target_f64: Target, content: str) -> None:
    file = tmp_path / REFERENCES
    file.write_text(content)
    first = run(tiny_target_f64, file)
    assert first[0].overall.lossless.identical == len(SETS["one"])
    assert len(file.read_text()) > len(content)
