"""Planted faults of a draft are found; a healthy draft of every family has no findings. And what is gained: the ceiling
of a tree, the parts of a pass, training against held-out text, with faults planted in each."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, Manifest
from draftsmith.data.store.token_store import Row
from draftsmith.export import Artifact, TrainingRecord, load_artifact
from draftsmith.modules import Drafter, Features, MeasuredStep, Target, Topology, UserError
from draftsmith.modules.tuning.tree_search import Acceptance, RankedText
from draftsmith.recipes.commands.doctor import diagnose
from draftsmith.recipes.doctor import draft_checks
from draftsmith.recipes.doctor.case import Case, DataSample, Finding, findings_of, unchecked
from draftsmith.recipes.doctor.draft_checks import Gains, Texts, expected_of_chain, read_gains
from support.artifacts import TREE, costs, heads, tuning
from support.cases import cycle_rows
from support.data.planted_faults import answered, sample_of
from support.families import CASES, cases_of, randomised
from support.tiers import DRAFTING, others_long


def prompts(template: ChatTemplate) -> list[list[int]]:
    return [template.prompt([{"role": "user", "content": f"{n} or {n * n}?"}]) for n in range(8)]


@cache
def rows_of(name: str) -> tuple[Target, tuple[Row, ...]]:
    """The target of a family's case, and its answers."""
    target = CASES[name].teacher()
    return target, tuple(answered(target))


def tree(drafter: Drafter) -> Topology:
    """A tree that is no deeper than a drafter's guesses."""
    paths = [path for path in [(0,), (1,), (0, 0), (0, 0, 0)] if len(path) <= (drafter.reach or 3)]
    return Topology.from_paths(paths)


@pytest.mark.long
@pytest.mark.parametrize("name", others_long(DRAFTING, ()))
def test_a_healthy_draft_of_every_family_has_no_findings(name: str) -> None:
    target, rows = rows_of(name if CASES[name].teacher is not CASES["medusa"].teacher else "medusa")
    adapter = CASES[name].change(target)
    verifier = target if adapter is None else target.adapted(adapter)
    drafter = randomised(CASES[name].make(verifier))
    artifact = Artifact(drafter=drafter, target=verifier, topology=tree(drafter), identity=target.identity,
                        provenance={}, adapter=adapter, tuning=tuning())
    template = ChatTemplate(target.tokenizer)
    case = Case(artifact=artifact, target=target, template=template, data=sample_of(rows, target))
    found = diagnose(case, prompts(template), Path("none"))
    # The reduced vocabularies of the cases hold a quarter of the tokens of random answers.
    assert [one.name for one in found.faults] == [
        "truncated answers", *["draft vocabulary"] * (drafter.token_ids_Q is not None)]
    # With nothing but the artifact and the target too.
    alone = diagnose(replace(case, data=None, no_data=unchecked("data", "none")), prompts(template), Path("none"))
    assert alone.faults == []
    assert alone.sample == ()


@pytest.fixture(scope="module")
def trained(tiny_run: Path, tiny_target: Target) -> Case:
    """The artifact of the tiny run with its data."""
    artifact = load_artifact(tiny_run / "artifact", tiny_target)
    data = DataSample.read(tiny_run / "data", Manifest.load(tiny_run / "data"))
    return Case(artifact=artifact, target=tiny_target, template=ChatTemplate(tiny_target.tokenizer), data=data)


@pytest.fixture(scope="module")
def texts(trained: Case) -> Texts:
    return draft_checks.read_texts(trained, prompts(trained.template)[:2])


def named(case: Case, name: str, drafter: Drafter | None = None, texts: Texts | None = None) -> Finding:
    """One finding of the checks of a draft."""
    case = replace(case, artifact=replace(case.artifact, drafter=drafter or case.artifact.drafter))
    if texts is None:
        texts = draft_checks.read_texts(replace(case, data=None), prompts(case.template)[:4])
    # Later checks are not made.
    return next(one for one in findings_of(draft_checks.DRAFT_CHECKS, case, texts) if one.name == name)


def test_a_draft_that_decodes_otherwise_is_found(trained: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load_artifact_again(trained)
    observe = drafter.observe

    def wrong(state: Any, rows_R: Any, observation: Any) -> None:
        """Each state with the other sign."""
        observe(state, rows_R, replace(observation, final_BND=-observation.final_BND))

    assert not named(trained, "decoding against training", drafter).remedy
    monkeypatch.setattr(drafter, "observe", wrong)
    found = named(trained, "decoding against training", drafter)
    assert "accepted less than the training forward says" in found.verdict


def load_artifact_again(case: Case) -> Drafter:
    """A copy of the case's drafter, bound to its target."""
    drafter = type(case.artifact.drafter).rebuild(case.artifact.drafter.describe(), case.target.identity)
    drafter.load_state_dict(case.artifact.drafter.state_dict())
    drafter.bind(case.target)
    return drafter.eval()


def test_other_states_of_the_training_forward_are_found(trained: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = type(trained.target).encode

    def shifted(self: Target, features: Features, taps: Sequence[int] = ()) -> Features:
        found = encode(self, features, taps)
        return replace(found, final_BLD=found.final().roll(1, 1))

    monkeypatch.setattr(type(trained.target), "encode", shifted)
    assert "other states final" in named(trained, "positions and taps").verdict


def test_a_draft_that_was_changed_after_its_training_is_found(trained: Case, texts: Texts) -> None:
    found = named(trained, "draft as it was trained", texts=texts)
    assert not found.remedy
    assert found.figure
    changed = load_artifact_again(trained)
    for parameter in changed.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert "worse than it did" in named(trained, "draft as it was trained", changed, texts).verdict


def test_a_draft_for_the_unquantised_target_is_found(trained: Case, texts: Texts) -> None:
    identity = replace(trained.target.identity, quantization="int8", weights_hash="other")
    case = replace(trained, artifact=replace(trained.artifact, identity=identity))
    found = named(case, "target of the draft", texts=texts)
    assert found.figure == "tiny-random in int8; here tiny-random"
    assert "quantised otherwise" in found.verdict


def test_another_rotary_base_than_the_recipe_s_is_found(tiny_target: Target) -> None:
    drafter = cases_of("eagle3")["eagle3-shared"].make(tiny_target)
    drafter.block = replace(drafter.block, rope_base=500.0)  # type: ignore[operator]
    for recipe, remedy in (({"rope_base": None}, True), ({"rope_base": 500.0}, False)):
        artifact = Artifact(drafter=drafter, target=tiny_target, topology=TREE, identity=tiny_target.identity,
                            provenance={"recipe": {"drafter": recipe}})
        case = Case(artifact=artifact, target=tiny_target, template=ChatTemplate(tiny_target.tokenizer))
        texts = Texts([], [], {}, [tiny_target.encode(cycle_rows(1), (1,))], TREE)
        assert bool(draft_checks._rotary(case, texts).remedy) is remedy


@pytest.mark.parametrize(("lengths", "better"), [((1.5, 1.9), True), ((1.5, 1.55), False), ((1.02, 1.08), False)])
def test_other_layers_must_be_clearly_better(lengths: tuple[float, float], better: bool) -> None:
    found = draft_checks._better("taps", lengths[0], {"layers [1]": lengths[1]}, "set drafter.taps")
    assert bool(found.remedy) is better


@pytest.mark.long
def test_wrong_taps_of_a_trained_draft_are_found() -> None:
    """A draft that has learned to read one layer reads another: the check names the right one."""
    case = CASES["eagle3-shared"]
    target = case.teacher()
    module = case.module(target)
    module.configure_model()
    optimizer = torch.optim.AdamW(module.drafter.parameters(), lr=case.lr)
    rows = [(row.tokens, row.supervised) for row in answered(target)[:16]]
    for _ in range(2 * case.steps):
        optimizer.zero_grad()
        module.loss(Features.from_rows(rows)).total.backward()
        torch.nn.utils.clip_grad_norm_(module.drafter.parameters(), 1.0)
        optimizer.step()
    drafter = module.drafter.eval()
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(2), identity=target.identity,
                        provenance={})
    one = Case(artifact=artifact, target=target, template=ChatTemplate(target.tokenizer))

    def found() -> Finding:
        text = [target.encode(Features.from_rows([row]), drafter.taps) for row in rows]
        return draft_checks._taps(one, Texts([], [], {}, text, Topology.chain(2)))

    assert not found().remedy
    drafter.taps = (0,)
    assert "trained with layers [1]" in found().verdict


@pytest.mark.long
def test_drafts_that_fail_after_long_contexts_are_found(trained: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts([], [], {}, [], TREE)
    assert not draft_checks._contexts(trained, texts).remedy
    nodes = iter([1, 0])
    monkeypatch.setattr(RankedText, "depths", lambda text, _tree: torch.full_like(text.left_P, next(nodes)))
    found = draft_checks._contexts(trained, texts)
    assert found.figure.startswith("1.00 guesses accepted in a row after 64 tokens of context, 0.00 after 256")
    assert "fail after longer contexts" in found.verdict


# What is gained -------------------------------------------------------------------------------------------------------

COST = tuning().cost


@pytest.fixture(scope="module")
def rows(tiny_target: Target) -> list[Row]:
    return answered(tiny_target)


def case_of(target: Target, rows: list[Row] | None = None) -> Case:
    artifact = Artifact(drafter=heads(target), target=target, topology=TREE, identity=target.identity, provenance={},
                        tuning=tuning())
    return Case(artifact=artifact, target=target, template=ChatTemplate(target.tokenizer),
                data=None if rows is None else sample_of(rows, target))


def texts_of(target: Target, rows: list[Row]) -> Texts:
    encoded = [target.encode(Features.from_rows([(row.tokens, row.supervised)])) for row in rows]
    return Texts(encoded, [], {}, encoded, TREE)


def time_of(target: Target, rows: list[Row], **changes: Any) -> dict[str, Finding]:
    found = draft_checks._time(case_of(target), texts_of(target, rows[:4]), Gains(replace(COST, **changes), 4, None))
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
    one = case_of(tiny_target)
    deep = replace(one, artifact=replace(one.artifact, topology=Topology.from_paths([(0,) * n for n in range(1, 8)])))
    found = next(draft_checks._time(deep, texts_of(tiny_target, rows[:4]), Gains(cost, 8, None)))
    assert cost.predict(3.0, 8) < draft_checks.LEAST_PERFECT
    assert not found.remedy, found


def test_dear_passes_and_dear_drafts_are_found(tiny_target: Target, rows: list[Row]) -> None:
    slow = time_of(tiny_target, rows, curves=costs(node=0.5).curves)
    assert "even a perfect draft" in slow["ceiling"].verdict
    drafting = time_of(tiny_target, rows, curves=costs(draft=0.2).curves)
    assert "drafting takes longer" in drafting["time of a pass"].verdict


def test_a_tree_that_ends_too_early_is_found(tiny_target: Target, rows: list[Row],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    nearly = Acceptance(accepted_length=2.8, by_position=(0.95, 0.85), tokens=28, passes=10)
    monkeypatch.setattr(draft_checks, "accepted", lambda *_: nearly)
    assert "ends too early" in time_of(tiny_target, rows)["ceiling"].verdict


def test_text_that_is_learned_by_heart_is_found(tiny_target: Target, rows: list[Row],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    one, held = case_of(tiny_target, rows), texts_of(tiny_target, rows[:4])
    assert not draft_checks._training(one, held, Gains(COST, 4, None)).remedy
    lengths = iter([2.4, 1.5])
    monkeypatch.setattr(draft_checks, "expected_of_chain", lambda *_: next(lengths))
    found = draft_checks._training(one, held, Gains(COST, 4, None))
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
    monkeypatch.setattr(draft_checks, "expected_of_chain", lambda *_: next(lengths))
    curve = tuple(MeasuredStep(step=step, accepted_length=length, labels=10 * step)
                  for step, length in ((0, 1.0), (10, 1.2), (20, 1.5), (40, 1.7)))
    record = TrainingRecord(time="", outcome=outcome, best_step=40, curve=curve)
    found = draft_checks._training(case_of(tiny_target, rows), texts_of(tiny_target, rows[:4]),
                                  Gains(COST, 4, record))
    assert "by the slope since its half, 1.90 decoded, where it is 1.70" in found.figure
    assert found.verdict.count(outcome) == 1
    assert remedy in found.remedy
    assert bool(found.remedy) is (bool(remedy) or learned > 1.5)


def test_the_expected_length_is_that_of_a_chain(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    table_PK = torch.tensor([[0, 0], [0, 5], [0, 0], [3, 5]])
    monkeypatch.setattr(draft_checks, "ranked_text", lambda *_: SimpleNamespace(ranks_PK=table_PK))
    assert expected_of_chain(case_of(tiny_target), []) == pytest.approx(1 + 3 / 4 + 3 / 4 * 2 / 4)


def test_gains_of_an_artifact_without_timing_are_measured(tiny_target: Target, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    one = case_of(tiny_target)
    assert read_gains(one, tmp_path / "none").size == 4
    monkeypatch.setattr(draft_checks, "measure_cost", lambda _target, _drafter, topology, **_: replace(
        COST, curves=(replace(COST.curves[0], sizes=(1, 2, 4, topology.size)),)))
    bare = replace(one, artifact=replace(one.artifact, tuning=None))
    assert read_gains(bare, tmp_path / "none").size == TREE.size == Topology.from_paths(
        [(0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0), (1, 0)]).size
    (tmp_path / "evaluation.json").write_text('{"training": {"time": 3}}')
    with pytest.raises(UserError, match=r"evaluation\.json"):
        read_gains(one, tmp_path / "evaluation.json")
