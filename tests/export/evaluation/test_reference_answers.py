"""Shared answers of the target alone: decoded once, and again where anything they depend on differs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.export import EvaluateConfig, Evaluation, Question, evaluate
from draftsmith.export.evaluation import timed_answers
from draftsmith.export.evaluation.timed_answers import REFERENCES, References
from draftsmith.modules import Target, TargetConfig, UserError, load_target
from draftsmith.modules.files.atomic_files import write_file

SETS = {"one": [Question.single([1, 2, 3]), Question.single([4, 5]), Question.single([9, 9, 30, 7])]}
CONFIG = EvaluateConfig(max_new_tokens=8, speed_prompts=0, temperatures=(0.0, 1.0), baselines=("prompt_lookup",))


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of prompts of each call of `generate`."""
    counts: list[int] = []
    original = timed_answers.generate

    def watch(model: Any, target: Target, prompts: Sequence[Sequence[int]], **more: Any) -> list[list[int]]:
        counts.append(len(prompts))
        return original(model, target, prompts, **more)

    monkeypatch.setattr(timed_answers, "generate", watch)
    return counts


def run(target: Target, file: Path | None, config: EvaluateConfig = CONFIG) -> tuple[Evaluation, ...]:
    return evaluate(target, [], SETS, config, references=file, progress=False).evaluations


def test_a_second_run_decodes_no_reference_and_finds_the_same(
    tmp_path: Path, tiny_target_f64: Target, generated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, times = tmp_path / REFERENCES, list[Path]()
    monkeypatch.setattr(timed_answers, "write_file", lambda file, text: times.append(write_file(file, text)))
    first = run(tiny_target_f64, file)
    assert sum(generated) == len(SETS["one"])
    # Each temperature of the one bundle; the second run adds nothing.
    assert len(times) == len(CONFIG.temperatures)
    written = file.read_bytes()
    generated.clear()
    assert run(tiny_target_f64, file) == first == run(tiny_target_f64, None)
    assert sum(generated) == len(SETS["one"])  # by the run without a file
    assert file.read_bytes() == written
    assert len(times) == len(CONFIG.temperatures)


def test_references_are_made_once_for_all_batch_sizes(tiny_target_f64: Target, generated: list[int]) -> None:
    for sizes in ((1,), (1, 2, 5)):
        generated.clear()
        run(tiny_target_f64, None, replace(CONFIG, batch_sizes=sizes))
        assert sum(generated) == len(SETS["one"])


def test_a_wrong_reference_is_found_out(tmp_path: Path, tiny_target_f64: Target, generated: list[int]) -> None:
    """The target answers once more after a drafted answer differs from a kept one."""
    file = tmp_path / REFERENCES
    run(tiny_target_f64, file)
    known = References(file, tiny_target_f64, CONFIG)
    right = known.find((1, 2, 3), 0.0, 0)
    assert right is not None
    known.add((1, 2, 3), 0.0, 0, (right[0] ^ 1, *right[1:]))
    known.save()
    generated.clear()
    assert run(tiny_target_f64, file)[0].overall.lossless.identical == len(SETS["one"])
    assert generated == [1]


@pytest.mark.parametrize(("changed", "loaded"), [
    ({"max_new_tokens": 7}, {}), ({"top_k": 3}, {}), ({"top_p": 0.5}, {}), ({}, {"dtype": "float64"}),
    ({}, {"pack": 0}), ({}, {"eos_ids": (1, 77)}),
], ids=str)
def test_all_that_an_answer_depends_on_is_part_of_its_key(
    tmp_path: Path, tiny_target: Target, changed: dict[str, Any], loaded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, number format, packed layers and end tokens; of sampled answers the random stream too."""
    known = References(tmp_path / REFERENCES, tiny_target, CONFIG)
    known.add((1, 2), 1.0, 0, (5,))
    known.add((1, 2), 0.0, 0, (6,))
    known.save()
    same, target = References(tmp_path / REFERENCES, tiny_target, CONFIG), tiny_target
    assert [same.find((1, 2), *stream) for stream in ((0.0, 0), (0.0, 3), (1.0, 0), (1.0, 1))] == [
        (6,), (6,), (5,), None]
    if "eos_ids" in loaded:
        monkeypatch.setattr(target, "eos_ids", loaded["eos_ids"])
    elif loaded:
        target = load_target(TargetConfig(name="tiny-random", **loaded))
    other = References(tmp_path / REFERENCES, target, EvaluateConfig(**{"max_new_tokens": 8, **changed}))
    assert [other.find((1, 2), temperature, 0) for temperature in (0.0, 1.0)] == [None, None]


def test_two_runs_lose_nothing_of_one_another(tmp_path: Path, tiny_target: Target) -> None:
    one, two = (References(tmp_path / REFERENCES, tiny_target, CONFIG) for _ in range(2))
    one.add((1, 2), 0.0, 0, (6,))
    two.add((3,), 0.0, 1, (7,))
    one.save()
    two.save()
    both = References(tmp_path / REFERENCES, tiny_target, CONFIG)
    assert (both.find((1, 2), 0.0, 0), both.find((3,), 0.0, 1)) == ((6,), (7,))


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"prompt": "hello"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, tiny_target_f64: Target, generated: list[int],
                                                content: str) -> None:
    file = tmp_path / REFERENCES
    file.write_text(content)
    with pytest.raises(UserError, match=r"references names .*, which holds no references; choose another file, or del"):
        run(tiny_target_f64, file)
    assert file.read_text() == content
    assert not generated


@pytest.mark.parametrize(("added", "changed"), [(67, ("[67]", "[66]")), (10**12, ("", ""))])
def test_changed_answers_and_tokens_that_are_none_are_refused(tmp_path: Path, tiny_target: Target, added: int,
                                                              changed: tuple[str, str]) -> None:
    file = tmp_path / REFERENCES
    known = References(file, tiny_target, CONFIG)
    known.add((1, 2), 0.0, 0, (added,))
    known.save()
    file.write_text(file.read_text().replace(*changed))
    with pytest.raises(UserError, match=r"references names .*, which was changed since it was written; delete it"):
        References(file, tiny_target, CONFIG)
