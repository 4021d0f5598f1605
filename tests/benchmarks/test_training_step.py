"""The benchmark of training steps: the textbook has the gradient of the packed step, and every part is there."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import training_step
from benchmarks.parts.shapes import RECIPES, shaped_module, shaped_recipe, shaped_target
from benchmarks.training_step import Bench, Clock, Taken, Way, measure
from draftsmith.modules import Target
from support.tiers import others_long


@pytest.fixture(scope="module")
def target() -> Target:
    return shaped_target("tiny")


def bench(target: Target, recipe: str, *words: str) -> Bench:
    return Bench(target, shaped_module(shaped_recipe(recipe, "tiny", *words), target, "tiny"), 64, 2)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("medusa", ()), ("eagle", ("--drafter.noise", "0")), ("eagle3", ("--drafter.steps", "2")), ("fastdraft", ())])
def test_the_textbook_has_the_same_gradient(target: Target, recipe: str, words: tuple[str, ...]) -> None:
    made = bench(target, recipe, *words)
    pieces, clock, found = made.conversations(1), Clock(target.device), []
    assert len(pieces) > 2
    for plain in (False, True):
        count = made.gradient(Way(plain, "32-true"), made.batch(pieces, plain).to("cpu"), clock)
        found.append([count, *(weight.grad for weight in made.trained if weight.grad is not None)])
        made.optimizer.zero_grad()
    assert float(found[0][0]) > 10
    assert len(found[0]) == len(found[1]) > 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", others_long(RECIPES, RECIPES[:2]))
def test_every_recipe_makes_steps(target: Target, recipe: str) -> None:
    words = ("--drafter.steps", "2") if recipe == "eagle3" else ()
    ways = [Way(False, "32-true"), Way(True, "32-true")] if recipe == "medusa" else [Way(False, "32-true")]
    ways += [Way(False, "32-true", checkpointing=True)] if recipe in ("eagle3", "fastdraft") else []
    found = measure(bench(target, recipe, *words), ways, steps=1)
    every = [taken for taken in found.values() if isinstance(taken, Taken)]
    assert len(every) == len(ways)
    for taken in every:
        figures = taken.to_dict()
        assert figures["tokens_per_second"] > 0
        assert taken.peak_bytes > 1000
        assert sum(figures[f"{part} share"] for part in training_step.PARTS) == pytest.approx(1.0)
        assert all(figures[f"{part} share"] > 0 for part in training_step.PARTS if part != "target")
    if recipe in ("eagle3", "fastdraft"):
        assert every[1].peak_bytes < every[0].peak_bytes
    if recipe == "medusa":
        assert every[0].tokens == every[1].tokens


def test_a_part_inside_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=0.0)
    clock = Clock(torch.device("cpu"))
    monkeypatch.setattr(clock, "_now", lambda: now.seconds)

    def work(seconds: float) -> None:
        now.seconds += seconds

    with clock.part("drafter"):
        work(1)
        clock.timed("target", work)(2)
        with clock.part("vocabulary loss"):
            work(4)
        work(8)
    assert clock.seconds == {"target": 2, "vocabulary loss": 4, "drafter": 9, "optimizer": 0, "data": 0}


def test_the_operations_of_a_step_are_counted() -> None:
    """A product of 3 x 4 and 4 x 5 takes 2 * 3 * 4 * 5 operations, and its gradients as many each, also by
    `torch.autograd.grad`, as losses in chunks take them."""
    layer, states = torch.nn.Linear(4, 5), torch.ones(3, 4, requires_grad=True)
    with training_step.CountedOperations() as counter:
        torch.autograd.grad(layer(states).sum(), [states, *layer.parameters()])
    assert counter.count == 3 * 120


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("x", 0)])
def test_the_share_of_a_card_is_of_its_data_sheet(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    taken = Taken({key: [1.0] for key in training_step.PARTS}, [10**6], flops_per_token=1e9, card=training_step.card())
    assert taken.to_dict()["card share"] == pytest.approx(2e14 / peak if peak else 0.0)
    assert f"| {20 if peak > 900e12 else 26 if peak else 'unknown'} |" in training_step.table({"a": {"b": taken}})[-1]


def test_a_way_without_memory_says_so(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(target, "medusa")

    def step(way: Way, _batches: Any) -> dict[str, float]:
        if way.plain:
            raise torch.OutOfMemoryError
        return dict.fromkeys(training_step.PARTS, 1.0)

    monkeypatch.setattr(made, "step", step)
    monkeypatch.setattr(training_step, "CountedStorages", lambda: nullcontext(SimpleNamespace(peak=7)))
    found = measure(made, [Way(False, "32-true"), Way(True, "32-true")], steps=2)
    assert found["textbook, 32-true"] == "out of memory"
    lines = training_step.table({"medusa": found})
    assert lines[-1].startswith("| medusa | textbook, 32-true | out of memory |")
    assert len({line.count("|") for line in lines}) == 1
    assert "| 20 | 20 | 20 | 20 | 20.0 |" in lines[-2]


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training_step.main(["--steps", "0"])
    assert "must be at least 1 and --row-length at least 32, got 0, 4 and 512" in capsys.readouterr().err
