"""The ceiling of a tree, the parts of a pass, and training against held-out text, with faults planted in each."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate
from draftsmith.data.store.token_store import Row
from draftsmith.export import Artifact, TrainingRecord
from draftsmith.modules import Features, MeasuredStep, Target, Topology, UserError
from draftsmith.modules.tuning.tree_search import Acceptance
from draftsmith.recipes.doctor import time_checks
from draftsmith.recipes.doctor.case import Case, Finding
from draftsmith.recipes.doctor.draft_checks import Texts
from draftsmith.recipes.doctor.time_checks import Gains, expected_of_chain, read_gains
from support.artifacts import TREE, costs, heads, tuning
from support.planted_faults import answered, sample_of

COST = tuning().cost


@pytest.fixture(scope="module")
def rows(tiny_target: Target) -> list[Row]:
    return answered(tiny_target)


def case(target: Target, rows: list[Row] | None = None) -> Case:
    artifact = Artifact(drafter=heads(target), target=target, topology=TREE, identity=target.identity, provenance={},
                        tuning=tuning())
    return Case(artifact=artifact, target=target, template=ChatTemplate(target.tokenizer),
                data=None if rows is None else sample_of(rows, target))


def texts(target: Target, rows: list[Row]) -> Texts:
    encoded = [target.encode(Features.from_rows([(row.tokens, row.supervised)])) for row in rows]
    return Texts(encoded, [], {}, encoded, TREE)


def time_of(target: Target, rows: list[Row], **changes: Any) -> dict[str, Finding]:
    found = time_checks._time(case(target), texts(target, rows[:4]), Gains(replace(COST, **changes), 4, None))
    return {one.name: one for one in found}


def test_the_ceiling_is_that_of_an_oracle(tiny_target: Target, rows: list[Row]) -> None:
    """A tree of depth 2 emits three tokens a pass at most; what is left at the end of an answer emits fewer."""
    found = time_of(tiny_target, rows)
    passes, tokens = 0, 0
    for row in rows[:4]:
        # The first token comes from the prompt's pass.
        left = sum(row.supervised) - 1
        passes, tokens = passes + -(-left // 3), tokens + left
    assert TREE.prefix(4).depth == 2
    assert f"{tokens / passes:.2f} if every guess were right" in found["ceiling"].figure
    # A perfect draft may be as deep as the whole tree: four tokens a pass.
    lefts = [sum(row.supervised) - 1 for row in rows[:4]]
    whole = sum(lefts) / sum(-(-left // 4) for left in lefts)
    assert f", and {COST.predict(whole, 4):.2f} of 3 guesses that are all right" in found["ceiling"].figure
    assert not found["ceiling"].remedy
    shares = [COST.pass_seconds(1), COST.pass_seconds(4) - COST.pass_seconds(1), COST.draft_seconds(4)]
    step = sum(shares)
    assert found["time of a pass"].figure == (
        f"{1000 * step:.1f} ms with 4 nodes: {shares[0] / step:.0%} a pass of one token, {shares[1] / step:.0%} "
        f"checking the other nodes, {shares[2] / step:.0%} drafting")


def test_the_ceiling_is_that_of_the_best_number_of_guesses(tiny_target: Target, rows: list[Row]) -> None:
    """A poor draft has large trees that do not pay: where a short perfect draft would, the ceiling says so."""
    cost = costs(node=0.05)
    one = case(tiny_target)
    deep = replace(one, artifact=replace(one.artifact, topology=Topology.from_paths([(0,) * n for n in range(1, 8)])))
    found = next(time_checks._time(deep, texts(tiny_target, rows[:4]), Gains(cost, 8, None)))
    assert cost.predict(3.0, 8) < time_checks.LEAST_PERFECT
    assert not found.remedy, found


def test_dear_passes_and_dear_drafts_are_found(tiny_target: Target, rows: list[Row]) -> None:
    slow = time_of(tiny_target, rows, curves=costs(node=0.5).curves)
    assert "even a perfect draft" in slow["ceiling"].verdict
    drafting = time_of(tiny_target, rows, curves=costs(draft=0.2).curves)
    assert "drafting takes longer" in drafting["time of a pass"].verdict


def test_a_tree_that_ends_too_early_is_found(tiny_target: Target, rows: list[Row],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    nearly = Acceptance(accepted_length=2.8, by_position=(0.95, 0.85), tokens=28, passes=10)
    monkeypatch.setattr(time_checks, "accepted", lambda *_: nearly)
    assert "ends too early" in time_of(tiny_target, rows)["ceiling"].verdict


def test_text_that_is_learned_by_heart_is_found(tiny_target: Target, rows: list[Row],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    one, held = case(tiny_target, rows), texts(tiny_target, rows[:4])
    assert not time_checks._training(one, held, Gains(COST, 4, None)).remedy
    lengths = iter([2.4, 1.5])
    monkeypatch.setattr(time_checks, "expected_of_chain", lambda *_: next(lengths))
    found = time_checks._training(one, held, Gains(COST, 4, None))
    assert found.figure.startswith("2.40 tokens per pass expected of a chain on training text, 1.50 on held-out text")
    # Of a gap of 0.9 twice the data close 29 %.
    assert "twice the data would bring about 1.76" in found.figure
    assert "distill.budget_tokens" in found.remedy


@pytest.mark.parametrize(("outcome", "remedy"), [
    ("Still rising at the end: more steps will help.", "train.max_steps"), ("Short of data: more will help.",
                                                                           "distill.budget_tokens"), ("Level.", "")])
@pytest.mark.parametrize("learned", [1.5, 2.4])
def test_the_curve_s_slope_is_that_of_its_second_half(
    tiny_target: Target, rows: list[Row], outcome: str, remedy: str, learned: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also next to a finding on the text that was learned by heart; the outcome is said once."""
    lengths = iter([learned, 1.5])
    monkeypatch.setattr(time_checks, "expected_of_chain", lambda *_: next(lengths))
    curve = tuple(MeasuredStep(step=step, accepted_length=length, labels=10 * step)
                  for step, length in ((0, 1.0), (10, 1.2), (20, 1.5), (40, 1.7)))
    record = TrainingRecord(time="", outcome=outcome, best_step=40, curve=curve)
    found = time_checks._training(case(tiny_target, rows), texts(tiny_target, rows[:4]),
                                  Gains(COST, 4, record))
    assert "by the slope since its half, 1.90 decoded, where it is 1.70" in found.figure
    assert found.verdict.count(outcome) == 1
    assert remedy in found.remedy
    assert bool(found.remedy) is (bool(remedy) or learned > 1.5)


def test_the_expected_length_is_that_of_a_chain(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    table_PK = torch.tensor([[0, 0], [0, 5], [0, 0], [3, 5]])
    monkeypatch.setattr(time_checks, "ranked_text", lambda *_: SimpleNamespace(ranks_PK=table_PK))
    assert expected_of_chain(case(tiny_target), []) == pytest.approx(1 + 3 / 4 + 3 / 4 * 2 / 4)


def test_gains_of_an_artifact_without_timing_are_measured(tiny_target: Target, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(tiny_target)
    assert read_gains(one, tmp_path / "none").size == 4
    monkeypatch.setattr(time_checks, "measure_cost", lambda _target, _drafter, topology, **_: replace(
        COST, curves=(replace(COST.curves[0], sizes=(1, 2, 4, topology.size)),)))
    bare = replace(one, artifact=replace(one.artifact, tuning=None))
    assert read_gains(bare, tmp_path / "none").size == TREE.size == Topology.from_paths(
        [(0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0), (1, 0)]).size
    (tmp_path / "evaluation.json").write_text('{"training": {"time": 3}}')
    with pytest.raises(UserError, match=r"evaluation\.json"):
        read_gains(one, tmp_path / "evaluation.json")
