"""Acceptance heads inside an artifact: what they travel with, what is refused, and that they change no answer."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import (
    Artifact,
    EvaluateConfig,
    Method,
    Question,
    evaluate,
    load_artifact,
    save_artifact,
    save_head,
)
from draftsmith.export.evaluation.runner import Runner
from draftsmith.modules import Ensemble, SamplingSetting, Target, Topology, Union, UserError, decode, policy_named
from draftsmith.modules.decoding.requests import DecodeSettings, Request
from draftsmith.modules.parts.heads import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.policies.stopping_chains import RejectionRisk, SampledChain, StoppedChain
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from support.families import CASES, randomised
from torch import Tensor

TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))
GREEDY = SamplingSetting()
HOT = SamplingSetting(temperature=1.0, top_k=20)


def unsure(width: int = 24) -> AcceptanceHead:
    """A head whose opinion differs from state to state."""
    head = AcceptanceHead(AcceptanceHeadConfig(num_layers=2), width)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return head


def stored(setting: SamplingSetting = GREEDY, **settings: float) -> dict[str, Any]:
    """Arguments of `save_head`."""
    return {"head": unsure(), "setting": setting, "most": 5, "least": 1, "provenance": {"a": 1}, **settings}


def saved(folder: Path, target: Target, *heads: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    save_artifact(folder, randomised(CASES["draft-lm"].make(target)), target.identity, {}, TREE)
    for head in heads:
        save_head(folder, **head)
    return folder


def test_a_head_comes_back_as_it_was_with_its_rule(tmp_path: Path, tiny_target: Target) -> None:
    given = stored(HOT, threshold=0.4)
    artifact = load_artifact(saved(tmp_path / "a", tiny_target, given, stored()), tiny_target)
    assert artifact.heads.keys() == {0.0, 1.0}
    back = artifact.heads[1.0]
    assert (back.rule.setting, back.rule.threshold, back.rule.least, back.rule.most) == (HOT, 0.4, 1, 5)
    assert back.rule.provenance == {"a": 1}
    assert back.head.config == given["head"].config
    assert all(torch.equal(tensor, given["head"].state_dict()[name]) for name, tensor in back.head.state_dict().items())
    for temperature, kind in ((0.0, StoppedChain), (1.0, SampledChain)):
        policy = artifact.policy("specdec-0.3", temperature=temperature)
        assert type(policy) is kind
        assert isinstance(policy.stop, RejectionRisk)
        assert (policy.max_size, policy.stop.threshold) == (6, 0.3)
    own = artifact.policy("specdec", temperature=1.0)
    assert isinstance(own, SampledChain)
    assert isinstance(own.stop, RejectionRisk)
    assert own.stop.threshold == 0.4


def test_temperatures_that_differ_little_have_heads_of_their_own(tmp_path: Path, tiny_target: Target) -> None:
    near = [SamplingSetting(temperature=temperature) for temperature in (0.1234567, 0.1234568)]
    folder = saved(tmp_path / "a", tiny_target, *(stored(setting) for setting in (*near, SamplingSetting())))
    save_head(folder, **stored(SamplingSetting(temperature=-0.0)))
    artifact = load_artifact(folder, tiny_target)
    assert sorted(artifact.heads) == [0.0, 0.1234567, 0.1234568]
    with pytest.raises(UserError, match=r"for temperature 0.123456, .* heads for: 0, 0.1234567, 0.1234568; train"):
        artifact.policy("specdec", temperature=0.123456)


def rewritten(artifact: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object], *, hashed: bool = True
              ) -> None:
    """Change the JSON entry or the tensors of the heads, under the hash of the new tensors or that of the former."""
    file = artifact / "acceptance_heads.safetensors"
    with safe_open(file, "pt") as opened:
        entry = json.loads(opened.metadata()["heads"])
    tensors = load_file(file)
    change(entry, tensors)
    if hashed:
        entry["tensors_sha256"] = hashlib.sha256(save(tensors)).hexdigest()
    save_file(tensors, file, metadata={"heads": json.dumps(entry)})


@pytest.mark.parametrize(("changes", "message"), [
    ({"threshold": 1.5}, r"is damaged \(threshold must be above 0 and below 1, got 1.5; .*; delete that file"),
    ({"threshold": 1.0}, r"is damaged \(threshold must be above 0 and below 1, got 1.0; "),
    ({"least": 6}, r"is damaged \(least and most must satisfy 1 <= least <= most, got 6 and 5"),
    ({"least": 0}, r"is damaged \(least and most must satisfy 1 <= least <= most, got 0 and 5"),
    ({"least": "2"}, r"is damaged \(\S*least must be a whole number, got '2'\); delete that file and"),
    ({"setting": {"temperature": 0.5}}, "the head for temperature 0.5 is named 0"),
    ({"width": 10**9}, "its tensors are not those of the head that it describes for temperature 0"),
    ({"config": {"num_layers": 5}}, "its tensors are not those of the head that it describes for temperature 0"),
    ({"config": {"num_layers": 1}}, "no head has its tensor 0/blocks.1.linear.bias"),
    ({"config": {"num_layers": "2"}}, "num_layers must be a whole number from 1 to 256, got '2'"),
    ({"config": {"num_layers": 10**9}}, "num_layers must be at most 256, got 10000000"),
    ({"most": 1025}, r"is damaged \(most must be at most 1,024 tokens of a draft, got 1025; lower it\)"),
    ({"another": 1}, "another"),
])
def test_a_head_whose_description_is_wrong_is_refused(
    tmp_path: Path, tiny_target: Target, changes: dict[str, object], message: str
) -> None:
    folder = saved(tmp_path / "a", tiny_target, stored())
    rewritten(folder, lambda entry, _: entry["rules"]["0"].update(changes))
    with pytest.raises(UserError, match=message):
        load_artifact(folder, tiny_target)


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensor: tensor * torch.nan, "0/output.weight .* are not finite"),
    (lambda tensor: tensor.long(), "holds whole numbers .*, real numbers were"),
    (lambda tensor: tensor[0], "its tensors are not those of the head that it describes for temperature 0"),
])
def test_weights_that_no_head_of_this_drafter_has_are_refused(
    tmp_path: Path, tiny_target: Target, change: Callable[[Tensor], Tensor], message: str
) -> None:
    """Even under the hash that the entry names."""
    folder = saved(tmp_path / "a", tiny_target, stored())
    rewritten(folder, lambda _, tensors: tensors.update({
        "0/output.weight": change(tensors["0/output.weight"]).contiguous()}))
    with pytest.raises(UserError, match=rf"is damaged \(.*{message}.*\); delete that file and train"):
        load_artifact(folder, tiny_target)


def test_a_head_of_another_width_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target, {**stored(), "head": unsure(12)})
    drafting = load_artifact(folder, tiny_target).drafting("specdec")
    with pytest.raises(UserError, match="head reads states of width 12, the drafter's have 24; train a head for this"):
        decode(tiny_target, [Request((3, 9, 30), 0, 8)], DecodeSettings(), drafter=drafting.drafter,
               policy=drafting.policy)


def test_equal_heads_have_equal_bytes_and_a_new_artifact_has_none(tmp_path: Path, tiny_target: Target) -> None:
    files = [saved(tmp_path / name, tiny_target, *heads) / "acceptance_heads.safetensors"
             for name, heads in (("a", (stored(), stored(HOT))), ("b", (stored(HOT), stored())))]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert load_artifact(saved(tmp_path / "a", tiny_target), tiny_target).heads == {}


def test_the_head_of_another_drafter_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    first = saved(tmp_path / "a", tiny_target, stored())
    other = CASES["draft-lm"].make(tiny_target)
    save_artifact(tmp_path / "b", other, tiny_target.identity, {}, TREE)
    shutil.copy(first / "acceptance_heads.safetensors", tmp_path / "b")
    with pytest.raises(UserError, match=r"judges a drafter with the weights [0-9a-f]{12}\.\.\., this artifact's are "
                                        r"[0-9a-f]{12}\.\.\.; delete that file and train the heads again"):
        load_artifact(tmp_path / "b", tiny_target)


def test_a_damaged_head_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target, stored())
    file = folder / "acceptance_heads.safetensors"
    whole = file.read_bytes()
    for content, message in ((whole[:-1] + bytes([whole[-1] ^ 1]), "its tensors do not have the hash that it names"),
                             (whole[:100], "is damaged"), (b"", "is damaged"), (save(load_file(file)), "'heads'"),
                             (save({}, metadata={"heads": "["}), "is damaged"),
                             (save({}, metadata={"heads": "[" * 100_000}), "is damaged"),
                             (save({}, metadata={"heads": "{}"}), "weights_sha256")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"acceptance_heads.safetensors is damaged \(.*{message}.*delete that file"
                           if message != "is damaged" else r"is damaged \(.*; delete that file and train the heads"):
            load_artifact(folder, tiny_target)


def test_another_temperature_or_filter_is_refused(tmp_path: Path, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    artifact = load_artifact(saved(tmp_path / "a", target, stored(HOT)), target)
    with pytest.raises(UserError, match=r"an acceptance head for temperature 0.5, this artifact holds heads for: 1; "
                                        r"train one with draftsmith specdec --temperatures '\[0.5\]'"):
        artifact.policy("specdec-0.7", temperature=0.5)
    with pytest.raises(UserError, match="the policy specdec needs an acceptance head; train one for an artifact"):
        policy_named("specdec-0.7", TREE, artifact.drafter)
    policy = artifact.policy("specdec", temperature=1.0)
    requests = [Request((3, 9, 30), 0, 8, 1.0), Request((4, 9, 30), 1, 8, 0.0)]
    with pytest.raises(UserError, match="for temperature 1, top_k 20, but answers are sampled at temperature 1; "
                                        "train a head for that with draftsmith specdec, or choose another policy"):
        decode(target, requests[:1], DecodeSettings(), drafter=artifact.drafter, policy=policy)
    with pytest.raises(UserError, match="but answers are sampled at temperature 0; train"):
        decode(target, requests, DecodeSettings(top_k=20), drafter=artifact.drafter, policy=policy)
    with pytest.raises(UserError, match="but answers are sampled at temperature 0; train"):
        decode(target, requests[1:], DecodeSettings(), drafter=Ensemble([artifact.drafter]), policy=Union([policy], 6))
    assert decode(target, requests[:1], DecodeSettings(top_k=20), drafter=artifact.drafter, policy=policy).generations


def sizes(artifact: Artifact, requests: list[Request], settings: DecodeSettings, name: str) -> tuple[list[list[int]],
                                                                                                      set[int]]:
    """(answers, lengths of the drafts) under a policy."""
    seen: set[int] = set()
    policy = artifact.policy(name, temperature=requests[0].temperature)
    result = decode(artifact.target, requests, settings, drafter=artifact.drafter, policy=policy,
                    observer=lambda tree, accepted, rows: seen.update((tree.real_BN.sum(-1) - 1).tolist()))
    return [one.tokens for one in result.generations], seen


@pytest.mark.parametrize("family", ["draft-lm", "eagle", "eagle3", "falcon"])
def test_greedy_answers_are_the_targets_and_drafts_differ_in_length(
    tmp_path: Path, tiny_target_f64: Target, family: str
) -> None:
    target, drafter = tiny_target_f64, randomised(CASES[family].make(tiny_target_f64))
    save_artifact(tmp_path / "a", drafter, target.identity, {}, TREE)
    save_head(tmp_path / "a", unsure(24 if family == "draft-lm" else 32), setting=SamplingSetting(), least=1, most=5)
    artifact = load_artifact(tmp_path / "a", target)
    requests = [Request((3 + index, 9, 30), index, 20) for index in range(4)]
    plain = decode(target, requests, DecodeSettings())
    for batch_size in (1, 3):
        answers, lengths = sizes(artifact, requests, DecodeSettings(batch_size=batch_size), "specdec-0.6")
        assert answers == [one.tokens for one in plain.generations]
        assert len(lengths) > 2


def test_an_evaluation_takes_the_policy_by_name(tmp_path: Path, tiny_target_f64: Target) -> None:
    artifact = load_artifact(saved(tmp_path / "a", tiny_target_f64, stored()), tiny_target_f64)
    config = EvaluateConfig(max_new_tokens=8, speed_prompts=0, policies=("specdec-0.7",))
    run = evaluate(tiny_target_f64, [Method.of(artifact, policy="specdec-0.7")], {"one": [Question.single([1, 2, 3])]},
                   config, progress=False)
    assert run.methods == ("draft_lm, specdec-0.7",)
    assert run.evaluations[0].overall.lossless.identical == 1
    hot = load_artifact(saved(tmp_path / "b", tiny_target_f64, stored(HOT)), tiny_target_f64)
    assert Method.of(hot, policy="specdec", temperature=1.0).shape(1, 1.0) == (6,)
    with pytest.raises(UserError, match="needs an acceptance head for temperature 0"):
        Method.of(hot, policy="specdec")


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperatures": (1.0,)}, "for temperature 1, top_k 20, but answers are sampled at temperature 1; train a head"),
    ({"temperatures": (1.0, 0.5), "top_k": 20}, "needs an acceptance head for temperature 0.5, this artifact holds"),
])
def test_an_evaluation_of_other_answers_is_refused_before_any_answer(
    tmp_path: Path, tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    artifact = load_artifact(saved(tmp_path / "a", tiny_target_f64, stored(HOT)), tiny_target_f64)
    method = Method.of(artifact, policy="specdec", temperature=1.0)
    monkeypatch.setattr(Runner, "run", lambda _: pytest.fail("something was decoded"))
    with pytest.raises(UserError, match=message):
        evaluate(tiny_target_f64, [method], {"one": [Question.single([1, 2, 3])]},
                 EvaluateConfig(max_new_tokens=8, speed_prompts=0, **changes), progress=False)
