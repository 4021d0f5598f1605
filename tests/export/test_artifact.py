"""Artifacts: files of the folder, loading what was saved, and refusals."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import (
    Artifact,
    Tuning,
    artifact,
    load_artifact,
    read_description,
    save_artifact,
    save_tuning,
    stored_drafter,
)
from draftsmith.modules import (
    Chain,
    DraftLM,
    DraftLMConfig,
    Policy,
    StaticTree,
    Target,
    Topology,
    Trial,
    UserError,
    decode,
)
from draftsmith.modules.decoding.requests import DecodeSettings, Request
from draftsmith.modules.families.medusa.drafter import Medusa
from draftsmith.modules.families.prompt_tokens.drafter import PromptTokens, PromptTokensConfig
from draftsmith.modules.policies.ensemble import Ensemble, Union
from draftsmith.modules.policies.lookahead_trees import LookaheadTrees
from draftsmith.modules.policies.paid import PaidTree
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from safetensors import safe_open
from support.answers import native_greedy, requests_for
from support.artifacts import TREE, copies, costs, edit, heads, trial, tuning
from support.families import CASES
from support.targets import random_model, random_target

PROVENANCE = {"recipe": {"max_steps": 3, "prompts": "/home/somebody/prompts.jsonl"}, "data_manifest": "0a1b2c",
              "acceptance": {"accepted_length": 1.75, "by_position": [0.5, 0.25], "tokens": 1000}}


def save(folder: Path, target: Target, drafter: Medusa | None = None) -> Path:
    return save_artifact(folder, drafter or heads(target), target.identity, PROVENANCE, TREE)


def measured(folder: Path, target: Target, found: Tuning) -> Artifact:
    """A saved artifact with the measurements of a machine."""
    save_tuning(save(folder, target), found)
    return load_artifact(folder, target)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("settings", [
    {}, {"num_layers": 2}, {"output": "copy"}, {"vocabulary_size": 20}, {"output": "copy", "vocabulary_size": 20},
    {"output": "one_copy", "vocabulary_size": 20},
])
def test_a_loaded_artifact_drafts_the_same(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter = heads(tiny_target, **settings)
    loaded = load_artifact(save(tmp_path / "a", tiny_target, drafter), tiny_target)
    assert loaded.topology == TREE
    assert loaded.identity == tiny_target.identity
    assert not loaded.drafter.training
    assert loaded.provenance["versions"]["draftsmith"]
    state = loaded.drafter.state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    requests = [Request((5, 9, 30), 0, 24)]
    before, after = (decode(tiny_target, requests, DecodeSettings(), drafter=one, policy=loaded.policy())
                     for one in (drafter, loaded.drafter))
    assert before.generations[0].tokens == after.generations[0].tokens
    assert before.generations[0].emitted == after.generations[0].emitted


def test_equal_runs_write_equal_bytes_without_absolute_paths(tmp_path: Path, tiny_target: Target) -> None:
    first, second = (save(tmp_path / name, tiny_target) for name in ("first", "deeper/second"))
    assert set(digests(first)) == {".draftsmith.json", "config.json", "model.safetensors", "README.md",
                                   "acceptance.json"}
    assert digests(first) == digests(second)
    for path in first.iterdir():
        assert b"/home/" not in path.read_bytes()
        assert str(tmp_path).encode() not in path.read_bytes()
    assert read_description(first)["provenance"]["recipe"]["prompts"] == "prompts.jsonl"
    other = digests(save(tmp_path / "other", tiny_target, heads(tiny_target, seed=2)))
    assert other["model.safetensors"] != digests(first)["model.safetensors"]


def test_borrowed_weights_are_not_saved(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target)
    with safe_open(save(tmp_path / "a", tiny_target, drafter) / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (no plain mapping)
    assert stored == sum(parameter.numel() for parameter in drafter.parameters())
    assert stored == 3 * (32 * 32 + 32)


@pytest.mark.parametrize(("change", "message"), [
    ({"weights_hash": "0" * 32}, "weights_hash .* load the target it was made for"),
    ({"vocab_size": 7}, "vocab_size 7, but the target here"),
    ({"hidden_size": 64}, "hidden_size 64"),
])
def test_another_target_is_refused(tmp_path: Path, tiny_target: Target, change: dict[str, object],
                                   message: str) -> None:
    identity = dataclasses.replace(tiny_target.identity, **change)  # type: ignore[arg-type]
    save_artifact(tmp_path / "a", heads(tiny_target), identity, {}, TREE)
    with pytest.raises(UserError, match=message):
        load_artifact(tmp_path / "a", tiny_target)


def test_other_weights_are_refused_and_double_precision_is_accepted(tmp_path: Path, tiny_target: Target,
                                                                    tiny_target_f64: Target) -> None:
    save(tmp_path / "a", tiny_target)
    with pytest.raises(UserError, match="weights_hash"):
        load_artifact(tmp_path / "a", Target(tiny_model(seed=1), tiny_tokenizer(), name="other"))
    loaded = load_artifact(tmp_path / "a", tiny_target_f64)
    assert {parameter.dtype for parameter in loaded.drafter.parameters()} == {torch.float64}


def test_a_draft_language_model_serves_every_target_of_its_vocabulary(tmp_path: Path, tiny_target: Target) -> None:
    """One artifact, targets of other widths and depths; what was measured with its own says nothing of them."""
    drafter = DraftLM.create(DraftLMConfig(num_layers=1, hidden_size=16), tiny_target)
    save_artifact(tmp_path / "a", drafter, tiny_target.identity, {"expected_accepted_length": [1.5]}, TREE)
    save_tuning(tmp_path / "a", Tuning.of(tiny_target, costs(), used_nodes=2))
    assert load_artifact(tmp_path / "a", tiny_target).tree_size == 2
    other = random_target(5)
    for target in (other, Target(random_model("Qwen2", num_hidden_layers=1), tiny_tokenizer(), name="wide")):
        artifact = load_artifact(tmp_path / "a", target)
        assert (artifact.shared, artifact.tuning, artifact.tree_size) == (True, None, TREE.size)
        assert (artifact.identity.name, artifact.provenance.get("expected_accepted_length")) == ("tiny-random", None)
        requests = requests_for(target, 2, 12)
        found = decode(target, requests, DecodeSettings(ignore_eos=True), drafter=artifact.drafter, policy=Chain(2))
        assert [one.tokens for one in found.generations] == [
            native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
    # Other words of the ids; with equal weights or for a training that goes on they may differ.
    edit(tmp_path / "a", target={**vars(tiny_target.identity), "tokens_hash": "f" * 32})
    assert not load_artifact(tmp_path / "a", tiny_target).shared
    with pytest.raises(UserError, match=r"tokens_hash f+, but the target here, random, has .*; a draft language model "
                                        "drafts for every target of its own tokenizer and vocabulary: choose such"):
        load_artifact(tmp_path / "a", other)
    assert load_artifact(tmp_path / "a", other, retarget=True).shared
    # One that reads states is bound to the target that gave them.
    reads = DraftLM.create(DraftLMConfig(num_layers=1, depths=2, taps=()), tiny_target)
    save_artifact(tmp_path / "b", reads, tiny_target.identity, {}, TREE)
    with pytest.raises(UserError, match="num_layers 2, but the target here, random, has 5"):
        load_artifact(tmp_path / "b", other)


def test_damage_is_named(tmp_path: Path, tiny_target: Target) -> None:
    folder = save(tmp_path / "a", tiny_target)
    config, weights = ((folder / name).read_bytes() for name in ("config.json", "model.safetensors"))
    parsed = json.loads(config)
    for name, content, said in (
        ("config.json", json.dumps(parsed | {"format_version": 99}), "format version 99, this program reads 1"),
        ("config.json", json.dumps({key: value for key, value in parsed.items() if key != "tree"}),
         r"config\.json is damaged: its content lacks tree; copy or train"),
        ("config.json", "{", "cannot be read as JSON"), ("config.json", None, "holds no artifact"),
        ("model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]), r"model\.safetensors does not have the hash"),
        ("model.safetensors", None, r"model\.safetensors is missing"),
    ):
        for whole, held in (("config.json", config), ("model.safetensors", weights)):
            (folder / whole).write_bytes(held)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(UserError, match=said):
            load_artifact(folder, tiny_target)
    drafter = heads(tiny_target, vocabulary_size=20)
    drafter.token_ids[3] = drafter.token_ids[4]
    with pytest.raises(UserError, match="token 7 occurs 2 times in the draft vocabulary"):
        load_artifact(save(tmp_path / "twice", tiny_target, drafter), tiny_target)


def test_a_setting_that_is_fixed_now_may_stand_in_an_older_artifact(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stored_drafter.FORMER, "medusa", {"residual": True, "exits": []})
    folder = save(tmp_path / "a", tiny_target)
    described = read_description(folder)["drafter"]
    edit(folder, drafter={**described, "residual": True, "exits": []})
    assert load_artifact(folder, tiny_target).drafter.describe() == described
    edit(folder, drafter={**described, "residual": False})
    with pytest.raises(UserError, match=r"config.json has residual false, and medusa drafters are now decoded with "
                                        r"true alone; use the version of draftsmith that wrote it, or train again$"):
        load_artifact(folder, tiny_target)


def test_no_pickle_is_read(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "a", tiny_target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_args, **_kwargs: pytest.fail("a pickle was read"))
    with pytest.raises(UserError, match="missing"):
        load_artifact(folder, tiny_target)


def test_a_foreign_class_runs_only_when_trusted(tmp_path: Path, tiny_target: Target,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_module.py").write_text(
        "from draftsmith.modules.families.medusa.drafter import Medusa\n\n\n"
        "class Mine(Medusa):\n    family = 'mine'\n\nWORD = 'none'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = save(tmp_path / "a", tiny_target)
    edit(folder, family="mine", **{"class": "somebodys_module.Mine"})
    with pytest.raises(UserError, match=r"family 'mine' is not one of .*medusa.*trust=True"):
        load_artifact(folder, tiny_target)
    assert load_artifact(folder, tiny_target, trust=True).drafter.family == "mine"
    edit(folder, **{"class": "somebodys_module.WORD"})
    with pytest.raises(UserError, match="is not a draftsmith Drafter"):
        load_artifact(folder, tiny_target, trust=True)
    edit(folder, **{"class": "somebodys_module.Gone"})
    with pytest.raises(UserError, match="cannot be imported"):
        load_artifact(folder, tiny_target, trust=True)


def test_an_artifact_is_replaced_as_a_whole_and_other_files_never(tmp_path: Path, tiny_target: Target) -> None:
    folder = save(tmp_path / "a", tiny_target)
    save_tuning(folder, tuning())
    save(folder, tiny_target, heads(tiny_target, seed=5))
    assert not (folder / "tuning.json").exists()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds other files \(thesis\.txt\)"):
        save(folder, tiny_target)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_failed_save_leaves_nothing_and_keeps_the_former(tmp_path: Path, tiny_target: Target,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "a", tiny_target)
    before = digests(folder)

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device; make room"):
        save(folder, tiny_target, heads(tiny_target, seed=5))
    assert digests(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, tiny_target: Target) -> None:
    drafter = heads(tiny_target)
    with torch.no_grad():
        next(drafter.parameters())[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"heads\.0\.0\.linear\.weight holds values that are not finite"):
        save(tmp_path / "a", tiny_target, drafter)
    assert not list(tmp_path.iterdir())


def shape(policy: Policy) -> Topology:
    assert isinstance(policy, StaticTree)
    return policy.topology


def test_tuning_comes_back_and_sets_the_tree(tmp_path: Path, tiny_target: Target) -> None:
    folder = save(tmp_path / "a", tiny_target)
    whole = load_artifact(folder, tiny_target)
    assert whole.tuning is None
    assert shape(whole.policy()) == TREE
    save_tuning(folder, tuning())
    tuned = load_artifact(folder, tiny_target)
    assert tuned.tuning == tuning()
    assert shape(tuned.policy()) == TREE.prefix(4)
    assert shape(tuned.policy("static-6")) == TREE.prefix(6)
    with pytest.raises(UserError, match="a tree of 9 nodes was asked for; this artifact's has 8"):
        tuned.policy("static-9")
    # A size beyond the tree takes the whole one.
    assert measured(tmp_path / "large", tiny_target, tuning(used_nodes=64)).tree_size == TREE.size


def predicted(artifact: Artifact, *name: str, **rows: float) -> float:
    """The predicted speed-up."""
    found = artifact.prediction(*name, **rows)  # type: ignore[arg-type]
    assert found is not None
    return found.speedup


def drawn(*trials: Trial, **changes: Any) -> Tuning:
    """The tuning of all tests with what was tried for sampled rows."""
    return tuning(trial("static-2", 1.7), trial("static-4", 2.9), sampled=trials, **changes)


SAMPLED = (trial("static-2", 1.6), trial("static-4", 1.62))  # A tree of two nodes is the fastest for sampled rows


def test_a_sampling_target_has_a_tree_of_its_own_size(tmp_path: Path, tiny_target: Target) -> None:
    artifact = measured(tmp_path / "a", tiny_target, drawn(*SAMPLED))
    assert artifact.tuning == drawn(*SAMPLED)
    assert artifact.tuning.fastest(1, 1.0) == "static"
    assert [artifact.size_for(1, degree) for degree in (0.0, 0.4, 1.0)] == [4, 2, 2]
    assert shape(artifact.policy(temperature=0.7)) == TREE.prefix(2)
    assert shape(artifact.policy("static-6", temperature=0.7)) == TREE.prefix(6)
    cost = artifact.tuning.cost
    assert predicted(artifact) == cost.predict(2.9, 4, 1)
    assert predicted(artifact, temperature=1.0) == cost.predict(1.6, 2, 1)
    assert predicted(artifact, "static-4", temperature=1.0) == cost.predict(1.62, 4, 1)
    assert artifact.prediction("static-3", temperature=1.0) is artifact.prediction(temperature=0.7) is None
    named = dataclasses.replace(artifact, tuning=dataclasses.replace(artifact.tuning, used_nodes=4))
    assert named.size_for(1, 1.0) == 4


SLOWER = (trial("static-2", 1.01), trial("static-4", 1.03), trial("static-2+lookup-7", 1.01))


@pytest.mark.parametrize(("trials", "temperature"), [(SLOWER, 1.0), (SLOWER, 0.3), (SAMPLED, 1.5), ((), 1.0)])
def test_sampled_rows_are_decoded_plainly_where_no_tree_is_known_to_pay(
    tmp_path: Path, tiny_target: Target, trials: tuple[Trial, ...], temperature: float
) -> None:
    """No tree pays at temperature 1; above it nothing is known, and nothing without drawn answers."""
    artifact = measured(tmp_path / "a", tiny_target, tuning(*copies(), sampled=trials))
    for name in ("static", "static+lookup", "chain", "sampled", "eagle2", "stopping"):
        assert artifact.policy(name).max_size > 1
        assert artifact.policy(name, temperature=temperature).max_size == 1
        assert artifact.drafting(name, temperature=temperature).policy.max_size == 1
    assert artifact.policy("chain-3", temperature=temperature).max_size == 4
    assert artifact.policy("static+lookup-3", temperature=temperature).max_size == 4
    assert artifact.fastest(temperature=temperature) == "none"
    if temperature == 1.0 and trials:
        assert predicted(artifact, temperature=1.0) == 1.0
        assert predicted(artifact, "static+lookup", temperature=1.0) == 1.0


def test_a_tree_that_pays_begins_with_held_out_chances_and_measured_seconds(tmp_path: Path,
                                                                            tiny_target: Target) -> None:
    """Whatever size is predicted for these rows; a size that is asked for bounds it. Answers stay."""
    expected, tree = [1.0, 1.6, 1.9, 2.1], Topology((-1, 0, 0, 1), (0, 0, 1, 0))
    folder = save_artifact(tmp_path / "a", CASES["eagle"].make(tiny_target), tiny_target.identity,
                           {"expected_accepted_length": expected}, tree)
    found = tuning(*SLOWER)
    save_tuning(folder, found)
    loaded = load_artifact(folder, tiny_target)
    policy = loaded.policy("paid", batch_size=4, temperature=1.0)
    assert isinstance(policy, PaidTree)
    assert policy.chances == pytest.approx((1.0, 0.6, 0.3, 0.2))
    assert policy.sizes == (1, 2, 4)
    assert policy.seconds(2, 4) == found.cost.step_seconds(2, 4)
    sizes = {name: one.policy(name).max_size for one, name in (
        (loaded, "paid-2"), (dataclasses.replace(loaded, tuning=dataclasses.replace(found, used_nodes=3)), "paid"),
        (loaded, "paid+lookup-5"))}
    assert sizes == {"paid-2": 2, "paid": 3, "paid+lookup-5": 9}
    unknown = dataclasses.replace(loaded, tuning=None, provenance={}).policy("paid")
    assert isinstance(unknown, PaidTree)
    assert unknown.table is None
    asked = [Request((5, 9, 30 + row), row, 24, float(row % 2)) for row in range(3)]
    plain = [one.tokens for one in decode(tiny_target, asked, DecodeSettings(batch_size=3)).generations]
    for name in ("paid", "paid+lookup"):
        drafter, grown = loaded.drafting(name, batch_size=3, temperature=1.0)
        drafted = decode(tiny_target, asked, DecodeSettings(batch_size=3), drafter=drafter, policy=grown).generations
        assert [one.tokens for one in drafted] == plain


def dear(found: Tuning) -> Tuning:
    """The same where every further node of a pass takes a second."""
    return dataclasses.replace(found, cost=costs(node=1.0))


def test_copies_next_to_the_tree_of_sampled_rows_are_those_that_pay_there(tmp_path: Path, tiny_target: Target) -> None:
    """Without copies nothing pays, with them something does, next to a tree of the root alone."""
    found = tuning(*copies(), sampled=(*SLOWER, trial("static-1+lookup-7", 1.9, 3.0)))
    assert found.fastest(1, 1.0) == "static+lookup"
    artifact = measured(tmp_path / "a", tiny_target, found)
    assert artifact.size_for(1, 1.0) == 1
    drafter, union = artifact.drafting("static+lookup", temperature=1.0)
    assert isinstance(union, Union)
    assert [policy.max_size for policy in union.policies] == [8, 1]
    assert union.max_size == 8
    # Passes of three nodes in the mean, and copying.
    assert predicted(artifact, "static+lookup", temperature=1.0) == pytest.approx(1.9 * 0.1 / (0.12 + 0.001))
    requests = [Request((5, 9, 30, 5, 9, 30, 5), 0, 24, 1.0)]
    plain, drafted = (decode(tiny_target, requests, DecodeSettings(), **how).generations[0].tokens
                      for how in ({}, {"drafter": drafter, "policy": union}))
    assert plain == drafted
    # A union that is predicted to be slower is not used either.
    slow = dataclasses.replace(artifact, tuning=dear(found))
    assert shape(slow.policy("static+lookup", temperature=1.0)) == Topology.chain(0)


def test_trees_by_number_of_guesses_have_the_size_that_pays(tmp_path: Path, tiny_target: Target) -> None:
    drafter = PromptTokens.create(PromptTokensConfig(num_tokens=2), tiny_target)
    drafter.count_ranks(torch.tensor([[0, 0], [0, 1], [1, 10], [10, 10]]))
    folder = save_artifact(tmp_path / "a", drafter, tiny_target.identity, {}, Topology.chain(2))
    untuned = load_artifact(folder, tiny_target)
    assert untuned.drafter.rank_chances == drafter.rank_chances
    assert sizes(untuned.policy("sparse")) == sizes(untuned.policy("sparse-9"))
    for lengths, size in (((1.3, 1.8), 8), ((1.7, 1.8), 4), ((1.01, 1.02), None)):
        tried = [dataclasses.replace(trial(f"sparse-{nodes}", length), virtual=2)
                 for nodes, length in zip((4, 8), lengths, strict=True)]
        save_tuning(folder, tuning(*tried, sampled=tried))
        tuned = load_artifact(folder, tiny_target)
        for degree in (0.0, 1.0):
            policy = tuned.policy("sparse", temperature=degree)
            assert sizes(policy) == sizes(tuned.policy(f"sparse-{size}")) if size else policy.max_size == 1
        assert tuned.policy("sparse", temperature=1.5).max_size == 1


def sizes(policy: Policy) -> list[int]:
    assert isinstance(policy, LookaheadTrees)
    return [tree.size for tree in policy.trees]


def test_static_with_lookup_has_the_sizes_that_replays_chose(tmp_path: Path, tiny_target: Target) -> None:
    found = tuning(*copies())
    artifact = measured(tmp_path / "a", tiny_target, found)
    assert dataclasses.replace(artifact, tuning=None).drafting("static+lookup").policy.max_size == TREE.size + 7
    assert artifact.tuning == found
    assert artifact.tuning.fastest() == "static+lookup"
    assert artifact.drafting("static").drafter is artifact.drafter
    assert shape(artifact.drafting("static").policy) == TREE.prefix(4)
    assert isinstance(artifact.drafting("static+lookup").drafter, Ensemble)
    drafter, union = artifact.drafting()
    assert isinstance(drafter, Ensemble)
    assert drafter.parts[1] is artifact.drafter
    assert isinstance(union, Union)
    assert union.max_size == 4 + 7
    assert [shape(policy).size for policy in union.policies] == [8, 4]
    assert artifact.policy("static-4+lookup").max_size == artifact.policy("static+lookup-7").max_size == 4 + 7
    assert artifact.policy("chain-2+lookup").max_size == 3 + 7
    # Five nodes in the mean, those of four drafted ones, and copying.
    assert predicted(artifact, "static+lookup") == pytest.approx(2.9 * 0.1 / (0.14 + 0.01 + 0.001))
    # Many rows at once pay for each node.
    assert [artifact.fastest(batch_size=size) for size in (1, 64)] == ["static+lookup", "none"]
    assert predicted(artifact, "static+lookup", batch_size=64) == 1.0
    # Sampled rows for which nothing was measured are not drafted at all.
    assert (artifact.fastest(temperature=1.0), artifact.drafting(temperature=1.0).policy.max_size) == ("none", 1)
    assert predicted(artifact, "static-4+lookup-7") == predicted(artifact, "static+lookup")
    assert artifact.prediction("static-4+lookup") is artifact.prediction("chain+lookup") is None


def test_where_no_tree_pays_nothing_is_drafted_and_called_the_fastest(tmp_path: Path, tiny_target: Target) -> None:
    """The default is never slower than plain decoding of the answers that chose it."""
    found = dear(Tuning.of(tiny_target, costs(), copies()))
    assert (found.fastest(), found.linear_layers) == ("none", tiny_target.linears.packing)
    artifact = measured(tmp_path / "a", tiny_target, found)
    assert artifact.tuning == found
    assert artifact.drafting().policy.max_size == artifact.drafting("none").policy.max_size == 1
    assert predicted(artifact, "none") == 1.0
    assert artifact.drafting("static-4").policy.max_size == 4
    # But for a machine that was busy while its passes were timed, and a draft that gains tokens.
    busy = dataclasses.replace(found, cost=dataclasses.replace(found.cost, excess=0.5))
    assert busy.fastest() != "none"
    assert dataclasses.replace(busy, greedy=SLOWER).fastest() == "none"


def test_no_tree_is_judged_by_the_seconds_of_far_smaller_ones() -> None:
    """The largest passes timed have eight nodes, and the last slope may be noise."""
    found = tuning(trial("static-4", 1.6), trial("static-16", 1.7), trial("static-32", 9.0),
                   trial("static-16+lookup-7", 9.0))
    found = dataclasses.replace(found, cost=costs(node=0.0, many=0.0))
    assert [found.size_for(batch) for batch in (1, 16)] == [16, 16]
    assert found.fastest() == "static"
    # What the recipe asks for is not asked of the seconds.
    assert dataclasses.replace(found, used_nodes=32).best("static") == found.greedy[2]


def test_the_answers_that_choose_decide_and_the_others_are_told() -> None:
    """The half that reports says otherwise: its figure is shown as it is, and the choice stays."""
    assert tuning(*copies()[:2], trial("static-4+lookup-7", 1.6, 4.0)).fastest() == "static", "lookup brings nothing"
    found = tuning(trial("static-2", 1.9, reported=1.5), trial("static-4", 1.8, reported=2.5))
    assert (found.size_for(), found.fastest()) == (2, "static")
    told = found.prediction("static")
    assert told is not None
    assert (told.accepted_length, told.speedup) == (1.5, found.cost.predict(1.5, 2))


def test_damaged_tuning_is_named(tmp_path: Path, tiny_target: Target) -> None:
    folder = save(tmp_path / "a", tiny_target)
    (folder / "tuning.json").write_text('{"greedy": []}')
    with pytest.raises(UserError, match=r"tuning\.json is damaged: its content lacks device, dtype, cost; delete it"):
        load_artifact(folder, tiny_target)
    content = json.loads(save_tuning(folder, tuning()).read_text())
    counted = {"accepted_length": 2.0, "nodes": 4.0}
    for changes, said in (
        ({"sampled": [{"policy": "static-4", "chosen": counted | {"accepted_length": -2.0}}]},
         "accepted_length and nodes of a trial must lie between 1 and 1024, got -2 and 4"),
        ({"greedy": [{"policy": "static", "chosen": counted}]}, "must name its nodes, got 'static'"),
        ({"used_nodes": 0}, "used_nodes must lie between 1 and 1024, got 0"),
        ({"cost": {"curves": []}}, "a cost table needs a curve, and .* got 0 and 0"),
        # As the version before wrote it.
        ({"expected_accepted_length": [1.0, 1.2]}, "the unknown expected_accepted_length"),
    ):
        (folder / "tuning.json").write_text(json.dumps({**content, **changes}))
        with pytest.raises(UserError, match=f"damaged: .*{said}; delete it"):
            load_artifact(folder, tiny_target)


def test_the_model_card_names_drafter_target_and_acceptance(tmp_path: Path, tiny_target: Target) -> None:
    card = (save(tmp_path / "a", tiny_target) / "README.md").read_text()
    for words in ("Medusa drafter for tiny-random", "3,168 parameters", "8 nodes", "1.75 tokens per target pass",
                  "50%, 25% of passes", "manifest `0a1b2c`", tiny_target.identity.weights_hash):
        assert words in card


@pytest.mark.parametrize(("given", "kept"), [
    ("/home/me/data/x.jsonl", "x.jsonl"), ("C:\\data\\x.jsonl", "x.jsonl"), ("someone/a-model", "someone/a-model"),
    ("/think", "/think"), ("runs/x", "runs/x"), (Path("/a/b"), "b"), ({"a": ("/x/y", 3)}, {"a": ["y", 3]}),
])
def test_portable(given: object, kept: object) -> None:
    assert artifact.portable(given) == kept


def test_each_batch_has_its_own_tree_unless_the_recipe_named_one(tmp_path: Path, tiny_target: Target) -> None:
    folder = save(tmp_path / "a", tiny_target)
    found = (trial("static-2", 1.5), trial("static-4", 2.0), trial("static-8", 2.2))
    for used, wanted in ((None, {1: 8, 16: 1}), (8, {1: 8, 4: 8, 16: 8})):
        save_tuning(folder, Tuning.of(tiny_target, costs(node=0.001, draft=0.001, many=0.05), found, used_nodes=used))
        loaded = load_artifact(folder, tiny_target)
        assert {batch: shape(loaded.policy(batch_size=batch)).size for batch in wanted} == wanted
    assert shape(loaded.policy("static-2", batch_size=16)).size == 2
