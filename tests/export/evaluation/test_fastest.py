"""Evaluations with the policy that is predicted to be the fastest, and of the tree by itself next to it."""

import dataclasses
from pathlib import Path

import pytest
from draftsmith.export import Artifact, EvaluateConfig, Method, Question, evaluate, load_artifact, save_artifact
from draftsmith.export import save_tuning as save
from draftsmith.modules import Target, Trial, UserError
from support.artifacts import TREE, copies, heads, trial, tuning

CONFIG = EvaluateConfig(max_new_tokens=24, speed_prompts=0, policies="fastest")
SETS = {"own": [Question.single((5, 9, 30, 5, 9, 40 + place)) for place in range(4)]}


def made(folder: Path, target: Target, tried: tuple[Trial, ...] = ()) -> Artifact:
    save_artifact(folder, heads(target), target.identity, {}, TREE)
    save(folder, tuning(*tried))
    return load_artifact(folder, target)


def test_copies_are_measured_where_they_pay(tmp_path: Path, tiny_target: Target) -> None:
    artifact = made(tmp_path / "a", tiny_target, copies())
    assert artifact.fastest() == "static+lookup"
    joined, static = (Method.of(artifact, policy=policy) for policy in ("fastest", "static"))
    assert (joined.name, joined.own_nodes()) == ("medusa, static+lookup", 4)
    assert artifact.tuning is not None
    assert joined.prediction is not None
    assert (found := joined.prediction(1, 0.0)) is not None
    assert found.speedup == copies()[-1].speedup(artifact.tuning.cost)
    alone = evaluate(tiny_target, [static], SETS, CONFIG, progress=False).evaluations[0]
    both = evaluate(tiny_target, [joined], SETS, CONFIG, progress=False).evaluations[0]
    assert both.overall.accepted_length > alone.overall.accepted_length
    assert (both.nodes, both.tree_nodes, both.partners) == (11, 4, ("lookup",))
    assert (alone.nodes, alone.tree_nodes, alone.partners) == (4, 4, ())


def test_the_tree_alone_is_measured_where_copies_do_not_pay(tmp_path: Path, tiny_target: Target) -> None:
    useless = (*copies()[:2], trial("static-4+lookup-7", 1.6, 4.0))
    method = Method.of(made(tmp_path / "a", tiny_target, useless), policy="fastest")
    assert method.name == "medusa"


@pytest.mark.parametrize(("pays", "asked", "names"), [
    (True, ("fastest", "static"), ["medusa, static+lookup", "medusa"]),
    (True, ("static+lookup", "fastest"), ["medusa, static+lookup"]), (False, ("fastest", "static"), ["medusa"]),
])
def test_the_fastest_next_to_what_it_is_here_is_measured_once(
    pays: bool, asked: tuple[str, ...], names: list[str], tmp_path: Path, tiny_target: Target
) -> None:
    artifact, said = made(tmp_path / "a", tiny_target, copies() if pays else ()), list[str]()
    methods = Method.each(artifact, dataclasses.replace(CONFIG, policies=asked), say=said.append)
    assert [one.name for one in methods] == names
    assert (said == []) == (len(names) == 2)
    assert all(one.startswith(f"of the policies {' and '.join(asked)}, fastest is here the same as another one: the "
                              "two are measured once") for one in said)
    with pytest.raises(UserError, match="policies must be different from each other, got static, static"):
        EvaluateConfig(policies=("static", "static"))
