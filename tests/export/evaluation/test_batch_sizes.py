"""Evaluation with the sizes and policies of an artifact: each batch size has its own tree, and all are timed on the
same questions; the policy that is predicted to be the fastest, and the tree by itself next to it."""

import dataclasses
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.export import (
    Artifact,
    EvaluateConfig,
    Evaluation,
    Method,
    Question,
    Tuning,
    evaluate,
    load_artifact,
    save_artifact,
    save_tuning,
)
from draftsmith.export.evaluation import runner, timed_answers
from draftsmith.export.evaluation.runner import Runner
from draftsmith.export.measured_files import Prediction
from draftsmith.export.report.phrases import drafting_note, how_measured
from draftsmith.modules import CostCurve, CostTable, Medusa, MedusaConfig, Target, Topology, Trial, UserError, decode
from draftsmith.modules.decoding.requests import DecodeSettings, Request
from draftsmith.modules.target.devices.compiled_layers import Compiler
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.artifacts import TREE as SHARED_TREE
from support.artifacts import copies, heads, trial, tuning
from support.families import randomised
from support.tiers import some_long

TREE = Topology.from_paths([(0,), (1,), (0, 0), (2,), (3,), (0, 1), (1, 0)])
SIZES = {1: 8, 2: 8, 4: 4, 16: 1}  # Nodes that pay, by batch size
PROMPTS = [(5, 20 + place, 7) for place in range(19)]
SETS = {"own": [Question.single(prompt) for prompt in PROMPTS]}
TOKENS = 12


def tuned(target: Target) -> Artifact:
    """An artifact with accepted drafts: one row verifies more nodes at almost no cost, sixteen rows pay for each."""
    sizes = (1, 2, 4, 8)
    # Seconds of each further node: of 16 tokens a pass on it takes longer with each.
    cost = CostTable(curves=tuple(
        CostCurve(batch=rows, sizes=sizes, draft_seconds=(0.0, 0.001, 0.001, 0.001),
                  pass_seconds=tuple(0.1 + 0.05 * max(0, rows * size - 16) for size in sizes)) for rows in SIZES))
    drafter = randomised(Medusa.create(MedusaConfig(num_heads=2), target).to(target.dtype))
    tuning = Tuning.of(target, cost, (trial("static-2", 1.5), trial("static-4", 2.0), trial("static-8", 2.2)))
    return Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={},
                    tuning=tuning)


def accepted_length(artifact: Artifact, nodes: int) -> float:
    """Accepted length of all prompts decoded with a tree of this size."""
    requests = [Request(prompt, index, TOKENS) for index, prompt in enumerate(PROMPTS)]
    return decode(artifact.target, requests, DecodeSettings(), drafter=artifact.drafter,
                  policy=artifact.policy(f"static-{nodes}")).accepted_length


def watched(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Answers of TOKENS tokens that evaluations draft from now on, by (rows at once, nodes)."""
    counted: Counter[tuple[int, int]] = Counter()

    def watch(target: Target, requests: list[Request], settings: DecodeSettings, *, policy: Any, **more: Any) -> Any:
        if policy is not None:
            asked = sum(request.max_new_tokens == TOKENS for request in requests)
            counted.update({(settings.batch_size, policy.max_size): asked})
        return decode(target, requests, settings, policy=policy, **more)

    monkeypatch.setattr(timed_answers, "decode", watch)
    return counted


def run(artifact: Artifact, config: EvaluateConfig, policy: str = "static") -> dict[int, Evaluation]:
    methods = [Method.of(artifact, policy=policy)]
    found = evaluate(artifact.target, methods, SETS, config, progress=False).evaluations
    return {one.batch_size: one for one in found}


@pytest.mark.parametrize("speed_prompts", some_long([0, 16], 9))
def test_each_batch_size_decodes_with_its_own_tree(tiny_target_f64: Target, speed_prompts: int) -> None:
    artifact = tuned(tiny_target_f64)
    assert {batch: artifact.size_for(batch) for batch in SIZES} == SIZES
    lengths = {nodes: accepted_length(artifact, nodes) for nodes in set(SIZES.values())}
    assert lengths[8] > lengths[4] > lengths[1] == 1.0
    config = EvaluateConfig(max_new_tokens=TOKENS, speed_prompts=speed_prompts, batch_sizes=tuple(SIZES))
    for batch, one in run(artifact, config).items():
        assert one.nodes == SIZES[batch]
        assert one.overall.accepted_length == pytest.approx(lengths[SIZES[batch]])
        assert one.prediction == artifact.prediction(f"static-{SIZES[batch]}", batch_size=batch)
        assert one.overall.lossless.identical == len(PROMPTS)


def test_a_size_that_was_asked_for_serves_every_batch(tiny_target_f64: Target) -> None:
    artifact, config = tuned(tiny_target_f64), EvaluateConfig(max_new_tokens=TOKENS, speed_prompts=0,
                                                              batch_sizes=tuple(SIZES))
    found = run(artifact, config, policy="static-2")
    assert {one.nodes for one in found.values()} == {2}
    wanted = accepted_length(artifact, 2)
    assert [one.overall.accepted_length for one in found.values()] == [pytest.approx(wanted)] * len(SIZES)
    assert found[16].prediction == artifact.prediction("static-2", batch_size=16)
    with pytest.raises(UserError, match="a tree of 9 nodes was asked for; this artifact's has 8"):
        Method.of(artifact, policy="static-9")


def test_answers_are_shared_between_batch_sizes_of_one_tree_alone(tiny_target_f64: Target,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    counted = watched(monkeypatch)
    config = EvaluateConfig(max_new_tokens=TOKENS, speed_prompts=16, batch_sizes=tuple(SIZES))
    run(tuned(tiny_target_f64), config)
    counted = +counted  # without the answers that warm up
    assert counted == {**dict.fromkeys(SIZES.items(), 16), (8, 8): 3, (8, 4): 3, (8, 1): 3}


@pytest.mark.parametrize(("speed_prompts", "sizes", "members", "timed"), [
    (8, (1, 3), 19, 6), (8, (1, 4), 19, 8), (5, (2, 4), 19, 4), (2, (3, 4), 19, 12), (8, (3, 4), 11, 0),
    (8, (1, 2, 4), 7, 4), (8, 1, 5, 5), (0, (1, 3), 19, 0),
])
def test_timed_prompts_fill_whole_batches_of_every_size(speed_prompts: int, sizes: Any, members: int,
                                                       timed: int) -> None:
    assert EvaluateConfig(speed_prompts=speed_prompts, batch_sizes=sizes).timed(members) == timed


def test_every_batch_size_times_the_same_questions(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[int]] = {}
    real = Runner._time_group

    def watch(self: Runner, group: Any, batch_size: int, *rest: Any) -> Any:
        assert len(group) == batch_size
        asked.setdefault(batch_size, []).extend(entry.number for entry in group)
        return real(self, group, batch_size, *rest)

    monkeypatch.setattr(Runner, "_time_group", watch)
    found = run(tuned(tiny_target_f64), EvaluateConfig(max_new_tokens=TOKENS, speed_prompts=8, batch_sizes=(1, 3)))
    assert asked[1] == asked[3] == [0, 3, 6, 9, 12, 15]
    assert {one.overall.prompts for one in found.values()} == {len(PROMPTS)}


@pytest.mark.parametrize("speed_prompts", [2, 8])
def test_no_call_counts_twice(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch, speed_prompts: int) -> None:
    """Row by row each pass of an answer is one call of the target, whether the answer is timed or not."""
    config = EvaluateConfig(max_new_tokens=TOKENS, speed_prompts=speed_prompts, batch_sizes=(1, 3))
    monkeypatch.setattr(runner, "UNTIMED_ROWS", 1)
    alone = run(tuned(tiny_target_f64), config)[1]
    assert alone.target_calls == alone.overall.target_passes


@pytest.mark.parametrize("graphs", [False, True])
def test_an_evaluation_says_why_graphs_were_not_replayed(tiny_target: Target, *, graphs: bool) -> None:
    config = EvaluateConfig(max_new_tokens=4, speed_prompts=0, limit=2, graphs=graphs)
    artifact = tuned(tiny_target)
    found = evaluate(artifact.target, [Method.of(artifact)], SETS, config, progress=False)
    assert found.header["graph_refusals"] == (["there is no CUDA device"] if graphs else [])
    assert ("replayed as CUDA graphs, as far as possible: there is no CUDA device" in how_measured(found)) == graphs


def test_an_evaluation_says_whether_layers_were_compiled() -> None:
    """In timed, untimed and plain decoding alike; and what was compiled answers as `generate` does."""
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny-random", pack=0)
    target.compiler = Compiler("eager")
    config = EvaluateConfig(max_new_tokens=4, speed_prompts=1, limit=2, compile=True)
    artifact = tuned(target)
    found = evaluate(artifact.target, [Method.of(artifact)], SETS, config, progress=False)
    assert found.header["compile_refusal"] == ""
    assert target.compiler.graphs > 0
    assert "; layers compiled in " in how_measured(found)
    assert found.evaluations[0].overall.lossless.identical == 2
    target.compiler.refusal = "there is no compiler"
    again = evaluate(artifact.target, [Method.of(artifact)], SETS, config, progress=False)
    assert how_measured(again).endswith("; layers not compiled: there is no compiler")
    plain = evaluate(artifact.target, [Method.of(artifact)], SETS, replace(config, compile=False), progress=False)
    assert "compiled" not in how_measured(plain)


def test_sampling_has_a_tree_of_its_own(tiny_target_f64: Target) -> None:
    artifact = tuned(tiny_target_f64)
    assert artifact.tuning is not None
    sampled = (trial("static-2", 1.2), trial("static-4", 1.3), trial("static-8", 1.3))
    artifact = replace(artifact, tuning=replace(artifact.tuning, sampled=sampled))
    assert 1 < artifact.size_for(1, 1.0) == artifact.size_for(2, 1.0) < 8
    assert artifact.size_for(16, 1.0) == 1
    config = EvaluateConfig(max_new_tokens=TOKENS, speed_prompts=0, batch_sizes=(1, 16), temperatures=(0.0, 1.0))
    found = evaluate(artifact.target, [Method.of(artifact)], SETS, config, progress=False).evaluations
    nodes = {(one.batch_size, one.temperature): one.nodes for one in found}
    assert nodes == {(1, 0.0): 8, (16, 0.0): 1, (1, 1.0): artifact.size_for(1, 1.0), (16, 1.0): 1}
    drawn = [one for one in found if one.temperature == 1.0]
    assert [one.overall.accepted_length > 1.0 for one in drawn] == [True, False]
    assert [one.prediction for one in drawn] == [artifact.prediction(temperature=1.0),
                                                 Prediction(speedup=1.0, accepted_length=1.0)]
    why = "Nothing is drafted, because on this machine no tree makes decoding faster at temperature 1."
    assert why in drafting_note(drawn[1])
    filtered = evaluate(artifact.target, [Method.of(artifact)], SETS, replace(config, top_p=0.9), progress=False)
    assert [one.prediction is None for one in filtered.evaluations] == [False, False, True, True]
    assert all(one.overall.lossless.identical == len(PROMPTS) for one in found)


# The fastest policy ---------------------------------------------------------------------------------------------------


FASTEST_ALONE = EvaluateConfig(max_new_tokens=24, speed_prompts=0, policies="fastest")
REPEATING = {"own": [Question.single((5, 9, 30, 5, 9, 40 + place)) for place in range(4)]}


def tuned_artifact(folder: Path, target: Target, tried: tuple[Trial, ...] = ()) -> Artifact:
    save_artifact(folder, heads(target), target.identity, {}, SHARED_TREE)
    save_tuning(folder, tuning(*tried))
    return load_artifact(folder, target)


def test_copies_are_measured_where_they_pay(tmp_path: Path, tiny_target: Target) -> None:
    artifact = tuned_artifact(tmp_path / "a", tiny_target, copies())
    assert artifact.fastest() == "static+lookup"
    joined, static = (Method.of(artifact, policy=policy) for policy in ("fastest", "static"))
    assert (joined.name, joined.shape(1, 0.0)[-1]) == ("medusa, static+lookup", 4)
    assert artifact.tuning is not None
    assert (found := joined.prediction(1, 0.0)) is not None
    assert found.speedup == copies()[-1].speedup(artifact.tuning.cost)
    alone = evaluate(tiny_target, [static], REPEATING, FASTEST_ALONE, progress=False).evaluations[0]
    both = evaluate(tiny_target, [joined], REPEATING, FASTEST_ALONE, progress=False).evaluations[0]
    assert both.overall.accepted_length > alone.overall.accepted_length
    assert (both.nodes, both.tree_nodes, both.partners) == (11, 4, ("lookup",))
    assert (alone.nodes, alone.tree_nodes, alone.partners) == (4, 4, ())


def test_the_tree_alone_is_measured_where_copies_do_not_pay(tmp_path: Path, tiny_target: Target) -> None:
    useless = (*copies()[:2], trial("static-4+lookup-7", 1.6, 4.0))
    method = Method.of(tuned_artifact(tmp_path / "a", tiny_target, useless), policy="fastest")
    assert method.name == "medusa"


@pytest.mark.parametrize(("pays", "asked", "names"), [
    (True, ("fastest", "static"), ["medusa, static+lookup", "medusa"]),
    (True, ("static+lookup", "fastest"), ["medusa, static+lookup"]), (False, ("fastest", "static"), ["medusa"]),
])
def test_the_fastest_next_to_what_it_is_here_is_measured_once(
    pays: bool, asked: tuple[str, ...], names: list[str], tmp_path: Path, tiny_target: Target
) -> None:
    artifact, said = tuned_artifact(tmp_path / "a", tiny_target, copies() if pays else ()), list[str]()
    methods = Method.each(artifact, dataclasses.replace(FASTEST_ALONE, policies=asked), say=said.append)
    assert [one.name for one in methods] == names
    assert (said == []) == (len(names) == 2)
    assert all(one.startswith(f"of the policies {' and '.join(asked)}, fastest is here the same as another one: the "
                              "two are measured once") for one in said)
    with pytest.raises(UserError, match="policies must be different from each other, got static, static"):
        EvaluateConfig(policies=("static", "static"))
