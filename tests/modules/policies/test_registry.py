"""Policies by name: what they become, what is refused, and that none of them changes an answer."""

from pathlib import Path

import pytest
from draftsmith.export import EvaluateConfig, Method, Question, evaluate, save_artifact, save_tuning
from draftsmith.export import load_artifact as load
from draftsmith.export.page import as_markdown
from draftsmith.export.report.evaluation_page import evaluation_page
from draftsmith.export.report.phrases import verdicts
from draftsmith.modules import DecodeSettings, Policy, Request, StoppedChain, Target, Topology, UserError, decode
from draftsmith.modules.policies.registry import POLICIES, SPARSE, SPECDEC, parse_policy, policy_named
from draftsmith.modules.policies.trees import BeamTree, DySpecTree, Eagle2Tree, SampledTree, StaticTree
from support.artifacts import tuning
from support.families import CASES, randomised
from support.tiers import some_long

pytestmark = pytest.mark.usefixtures("on_device")

TREE = Topology((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))


@pytest.mark.parametrize(("name", "kind", "nodes"), [
    ("static", StaticTree, 6), ("static-4", StaticTree, 4), ("chain", StaticTree, 4), ("chain-2", StaticTree, 3),
    ("sampled", SampledTree, 6), ("sampled-chain-2", SampledTree, 3), ("eagle2", Eagle2Tree, 6),
    ("eagle2-9", Eagle2Tree, 9), ("dyspec-5", DySpecTree, 5), ("beam-9", BeamTree, 7), ("beam-64", BeamTree, 61),
    ("stopping-3", StoppedChain, 4),
    ("none", StaticTree, 1), ("early-exit", StoppedChain, 7), ("early-exit-3", StoppedChain, 4),
    ("sure", StoppedChain, 21), ("sure-0.5", StoppedChain, 21),
])
def test_a_name_becomes_its_policy(tiny_target: Target, name: str, kind: type[Policy], nodes: int) -> None:
    policy = policy_named(name, TREE, CASES["eagle"].make(tiny_target))
    assert type(policy) is kind
    assert policy.max_size == nodes


@pytest.mark.parametrize(("name", "message"), [
    ("tree", "there is no policy 'tree'; choose from fastest .the default., static, paid, chain"),
    ("", r"there is no policy '';.*after a plus, such as static\+lookup"),
    ("eagle-3", "there is no policy 'eagle-3'"), ("chain-", "'chain-' ends in ''; chain wants a whole number"),
    ("chain-0", "'chain-0' ends in '0'; chain wants a whole number of at"),
    ("specdec-1", "'specdec-1' ends in '1'; specdec wants a number above 0 and below 1, such as specdec-0.7"),
    ("specdec-0.7.1", "specdec wants a number above 0"), ("specdec-", "specdec wants a number above 0"),
    ("confident-1", "'confident-1' ends in '1'; confident wants a number above 0 and below 1"),
    ("sure-2", "'sure-2' ends in '2'; sure wants a number above 0 and below 1, such as sure-0.3"),
    ("none-3", "'none-3' ends in '3'; none drafts nothing: leave the number out"),
    ("eagle2-1", "eagle2 wants a whole number of at least 2"), ("static-x", "static wants a whole number"),
])
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_policy(name)
    with pytest.raises(UserError, match=message):
        EvaluateConfig(policies=("static", name))


def test_no_policy_asks_for_more_than_there_is(tiny_target: Target) -> None:
    medusa = CASES["medusa"].make(tiny_target)
    with pytest.raises(UserError, match="a tree of 7 nodes was asked for; this artifact's has 6"):
        policy_named("static-7", TREE, medusa)
    with pytest.raises(UserError, match="the tree is 30 tokens deep, but this medusa drafter answers"):
        policy_named("chain-30", TREE, medusa)
    with pytest.raises(UserError, match="the policy confident needs a drafter that judges its guesses, a block"):
        policy_named("confident", TREE, CASES["block-markov"].make(tiny_target))
    grown = policy_named("eagle2-40", TREE, medusa)
    assert isinstance(grown, Eagle2Tree)
    assert grown.depth == medusa.reach


POINTS = ("static", "chain-2", "eagle2", "stopping", "early-exit", "sure-0.05")
"""Policies whose tokens are the likeliest: the sampled answer is the plain loop's, too."""


@pytest.mark.parametrize("family", ["medusa", "eagle"])
@pytest.mark.parametrize(("name", "temperature"), some_long([
    *((name, 0.0) for name in ("static", "chain-2", *(name for name in POLICIES[2:]
                                                      if name not in (SPARSE, SPECDEC, "confident")))),
    *((name, 1.0) for name in POINTS)
], 3))
def test_no_policy_changes_an_answer(tiny_target_f64: Target, name: str, family: str, temperature: float) -> None:
    target = tiny_target_f64
    drafter, tree = randomised(CASES[family].make(target)), Topology((-1, 0, 0, 1), (0, 0, 1, 0))
    requests = [Request((3 + index, 9, 30), index, 20, temperature) for index in range(3)]
    plain = decode(target, requests, DecodeSettings())
    drafted = decode(target, requests, DecodeSettings(), drafter=drafter, policy=policy_named(name, tree, drafter))
    assert [one.tokens for one in drafted.generations] == [one.tokens for one in plain.generations]


def test_a_tree_is_drawn_in_whatever_order_it_was_found(tiny_target: Target) -> None:
    """A search may find the fifth guess of a node before its second."""
    found = Topology((-1, 0, 0, 1, 0), (0, 0, 4, 1, 1))
    policy = policy_named("sampled", found, CASES["eagle"].make(tiny_target))
    assert isinstance(policy, SampledTree)
    assert policy.topology == Topology((-1, 0, 0, 1, 0), (0, 0, 1, 0, 2))


def test_a_bare_name_takes_the_size_tuned_here(tmp_path: Path, tiny_target: Target) -> None:
    save_artifact(tmp_path / "a", CASES["eagle"].make(tiny_target), tiny_target.identity, {}, TREE)
    save_tuning(tmp_path / "a", tuning())
    artifact = load(tmp_path / "a", tiny_target)
    sizes = {name: artifact.policy(name).max_size for name in ("static", "sampled", "eagle2", "dyspec", "chain")}
    assert sizes == {"static": 4, "sampled": 4, "eagle2": 4, "dyspec": 4, "chain": 1 + TREE.prefix(4).depth}
    assert artifact.policy("eagle2-6").max_size == 6


def test_sampled_drafts_are_not_held_against_the_plain_tokens(tmp_path: Path, tiny_target_f64: Target) -> None:
    drafter = randomised(CASES["eagle"].make(tiny_target_f64))
    save_artifact(tmp_path / "a", drafter, tiny_target_f64.identity, {}, TREE)
    artifact = load(tmp_path / "a", tiny_target_f64)
    config = EvaluateConfig(max_new_tokens=8, speed_prompts=0, temperatures=(0.0, 1.0))
    methods = [Method.of(artifact, policy=policy) for policy in ("static", "sampled", "dyspec")]
    run = evaluate(tiny_target_f64, methods, {"one": [Question.single([1, 2, 3])]}, config, progress=False)
    compared = {(one.name, one.temperature): one.overall.lossless.prompts for one in run.evaluations}
    assert compared == {**{(method.name, 0.0): 1 for method in methods}, ("eagle", 1.0): 1, ("eagle, sampled", 1.0): 0,
                        ("eagle, dyspec", 1.0): 0}
    assert all(one.overall.lossless.different == 0 for one in run.evaluations)
    said = " ".join(verdicts(run))
    assert "fault" not in said
    for name in ("sampled", "dyspec"):
        assert f"eagle, {name}: drafts were sampled, so answers at temperature 1 are other words from the same" in said


def test_an_evaluation_measures_every_policy(tmp_path: Path, tiny_target_f64: Target) -> None:
    drafter = randomised(CASES["eagle"].make(tiny_target_f64))
    save_artifact(tmp_path / "a", drafter, tiny_target_f64.identity, {}, TREE)
    artifact, config = load(tmp_path / "a", tiny_target_f64), EvaluateConfig(max_new_tokens=8, speed_prompts=0,
                                                                             policies=("static", "chain-3", "eagle2-5"))
    methods = [Method.of(artifact, policy=policy) for policy in config.policies]
    sets = {"one": [Question.single([1, 2, 3]), Question.single([4, 5])]}
    run = evaluate(tiny_target_f64, methods, sets, config, progress=False)
    assert run.methods == ("eagle", "eagle, chain-3", "eagle, eagle2-5")
    assert [one.nodes for one in run.evaluations] == [6, 4, 5]
    assert all(one.overall.lossless.identical == 2 for one in run.evaluations)
    assert artifact.prediction("chain-3") is None


def test_the_share_of_each_drafter_is_counted_by_kind_of_prompt(tmp_path: Path, tiny_target_f64: Target) -> None:
    drafter = randomised(CASES["eagle"].make(tiny_target_f64))
    save_artifact(tmp_path / "a", drafter, tiny_target_f64.identity, {}, TREE)
    config = EvaluateConfig(max_new_tokens=24, speed_prompts=2, policies=("static", "static+lookup"))
    methods = [Method.of(load(tmp_path / "a", tiny_target_f64), policy=policy) for policy in config.policies]
    assert [method.parts for method in methods] == [("eagle",), ("lookup", "eagle")]
    kinds = {"copied": [5, 9, 30] * 4, "new": [40, 41, 42]}
    sets = {"one": [Question.single(tokens, kind) for kind, tokens in kinds.items() for _ in range(2)]}
    run = evaluate(tiny_target_f64, methods, sets, config, progress=False)
    alone, both = run.evaluations
    assert alone.overall.guessed_by == {}
    assert both.nodes == alone.nodes + 7
    assert both.overall.lossless.identical == 4
    for measures in (both.overall, *both.by_category.values()):
        # A pass adds its guesses and a token of the target's, unless the answer ends among the guesses.
        least = measures.new_tokens - measures.prompts - measures.target_passes
        assert least <= sum(measures.guessed_by.values()) <= least + measures.prompts
    assert both.by_category["copied"].guessed_by["lookup"] > both.by_category["new"].guessed_by["lookup"]
    text = as_markdown(evaluation_page(run, None))
    assert "| accepted guesses | from lookup | from eagle |" in text
    assert text.count("Several drafters guess together") == 1
