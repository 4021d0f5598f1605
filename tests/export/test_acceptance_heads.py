"""Acceptance heads inside an artifact: what they travel with, what is refused, and that they change no answer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import (
    Artifact,
    EvaluateConfig,
    HeadMeasurements,
    Method,
    Question,
    StoredHead,
    evaluate,
    load_artifact,
    save_artifact,
    save_head,
)
from draftsmith.export.evaluation.runner import Runner
from draftsmith.modules import (
    AcceptanceHead,
    AcceptanceHeadConfig,
    DecodeSettings,
    DraftedTokens,
    Ensemble,
    RejectionRisk,
    Request,
    SampledChain,
    SamplingSetting,
    StoppedChain,
    Target,
    Topology,
    Union,
    UserError,
    decode,
    policy_named,
)
from draftsmith.modules.files.atomic_files import file_sha256
from draftsmith.modules.tuning.confidence_calibration import ConfidenceTally
from draftsmith.modules.tuning.drafted_tokens import NAMES
from safetensors.torch import load_file, save_file
from support.artifacts import edit
from support.families import CASES, randomised
from torch import Tensor

TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))
GREEDY = SamplingSetting()
HOT = SamplingSetting(temperature=1.0, top_k=20)


def unsure(width: int = 24, tied: bool = False) -> AcceptanceHead:
    """A head whose opinion differs from state to state."""
    head = AcceptanceHead(AcceptanceHeadConfig(num_layers=2, tie_blocks=tied), width)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return head


def stored(setting: SamplingSetting = GREEDY, **settings: float) -> StoredHead:
    return StoredHead(head=unsure(), setting=setting, most=5, least=1, provenance={"a": 1}, **settings)


def figures() -> HeadMeasurements:
    tally = ConfidenceTally()
    tally.add(torch.tensor([0.2, 0.9]).log(), torch.tensor([0.5, 1.0]))
    curve = tally.curve()
    assert curve is not None
    row = DraftedTokens(expected_accepted_length=2.0, by_rule=dict.fromkeys(NAMES, 3.0) | {"product of q": None})
    return HeadMeasurements(drafts=1, length=2, calibration=curve, calibration_error_unweighted=0.25, policy=row,
                            fixed=(row, row))


def saved(folder: Path, target: Target, *heads: StoredHead) -> Path:
    torch.manual_seed(0)
    save_artifact(folder, randomised(CASES["draft-lm"].make(target)), target.identity, {}, TREE)
    for head in heads:
        save_head(folder, head)
    return folder


def test_a_head_comes_back_as_it_was_with_its_rule(tmp_path: Path, tiny_target: Target) -> None:
    given = stored(HOT, threshold=0.4)
    artifact = load_artifact(saved(tmp_path / "a", tiny_target, given, stored()), tiny_target)
    assert artifact.heads.keys() == {0.0, 1.0}
    back = artifact.heads[1.0]
    assert (back.setting, back.threshold, back.least, back.most) == (HOT, 0.4, 1, 5)
    assert back.head.config == given.head.config
    assert all(torch.equal(tensor, given.head.state_dict()[name]) for name, tensor in back.head.state_dict().items())
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
    save_head(folder, stored(SamplingSetting(temperature=-0.0)))
    artifact = load_artifact(folder, tiny_target)
    assert sorted(artifact.heads) == [0.0, 0.1234567, 0.1234568]
    assert sorted(path.name for path in (folder / "acceptance_heads").iterdir()) == ["0", "0.1234567", "0.1234568"]
    with pytest.raises(UserError, match=r"for temperature 0.123456, .* heads for: 0, 0.1234567, 0.1234568; train"):
        artifact.policy("specdec", temperature=0.123456)


def test_figures_come_back_and_are_refused_when_changed(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target, replace(stored(), measurements=figures()), stored(HOT))
    heads = load_artifact(folder, tiny_target).heads
    assert heads[0.0].measurements == figures()
    assert heads[1.0].measurements is None
    assert not (folder / "acceptance_heads" / "1" / "measurements.json").exists()
    file = folder / "acceptance_heads" / "0" / "measurements.json"
    text = file.read_text()
    file.write_text(text.replace("3.0", "2.5"))
    with pytest.raises(UserError, match=r"measurements.json does not have the hash that config.json names .*delet"):
        load_artifact(folder, tiny_target)
    file.write_text("{}")
    edit(file.parent, measurements_sha256=file_sha256(file))
    with pytest.raises(UserError, match=r"measurements.json is damaged: its content lacks drafts, .*; delete tha"):
        load_artifact(folder, tiny_target)
    for change, message in (({"by_rule": {}}, "by_rule must name fixed number, .* got nothing"),
                            ({"by_rule": dict.fromkeys(NAMES)}, "by_rule lacks the tokens of acceptance head"),
                            ({"by_rule": dict.fromkeys(NAMES, 0.0)}, "by_rule lacks .* acceptance head, at least 1"),
                            ({"by_rule": dict.fromkeys(NAMES, 1e300)}, "must lie between 0 and 1024, got 1e.300")):
        content = json.loads(text)
        file.write_text(json.dumps({**content, "policy": {**content["policy"], **change}}))
        edit(file.parent, measurements_sha256=file_sha256(file))
        with pytest.raises(UserError, match=message):
            load_artifact(folder, tiny_target)
    file.unlink()
    with pytest.raises(UserError, match=r"measurements.json does not have the hash"):
        load_artifact(folder, tiny_target)


@pytest.mark.parametrize(("changes", "message"), [
    ({"threshold": 1.5}, r"heads/0 is damaged \(threshold must be above 0 and below 1, got 1.5; .*; delete that fold"),
    ({"least": 6}, r"heads/0 is damaged \(least and most must satisfy 1 <= least <= most, got 6 and 5"),
    ({"least": "2"}, r"heads/0 is damaged \(least must be a whole number, got \"2\"\); delete that folder and"),
    ({"sampling": {"temperature": 0.5}}, "holds the head for temperature 0.5; rename it to 0.5, or delete that folder"),
    ({"head": {"num_layers": 2, "tie_blocks": False, "width": 10**9}}, "names states of width 1000000000, .* .2, 24"),
    ({"head": {"num_layers": 5, "tie_blocks": False, "width": 24}}, "names 5 blocks, model.safetensors holds 2"),
    ({"head": {"num_layers": 2, "tie_blocks": 0, "width": 24}}, "tie_blocks must be true or false, got 0"),
    ({"most": 1025}, r"heads/0 is damaged \(most must be at most 1,024 tokens of a draft, got 1025; lower it\)"),
    ({"head": {"num_layers": 10**9, "tie_blocks": False, "width": 24}}, "num_layers must be at most 256, got 10000000"),
])
def test_a_head_whose_description_is_wrong_is_refused(
    tmp_path: Path, tiny_target: Target, changes: dict[str, object], message: str
) -> None:
    folder = saved(tmp_path / "a", tiny_target, stored())
    edit(folder / "acceptance_heads" / "0", **changes)
    with pytest.raises(UserError, match=message):
        load_artifact(folder, tiny_target)


@pytest.mark.parametrize(("change", "message"), [
    (lambda head: {**head, "output.weight": head["output.weight"] * torch.nan}, "output.weight .* are not finite"),
    (lambda head: {name: tensor.long() for name, tensor in head.items()}, "holds whole numbers .*, real numbers were"),
    (lambda head: {**head, "output.weight": head["output.weight"][0]}, r"width 24, .* an output layer of \[24\]"),
])
def test_weights_that_no_head_of_this_drafter_has_are_refused(
    tmp_path: Path, tiny_target: Target, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    """Even under the hash that the description names."""
    folder = saved(tmp_path / "a", tiny_target, stored())
    place = folder / "acceptance_heads" / "0"
    weights = change(load_file(place / "model.safetensors"))
    save_file(weights, place / "model.safetensors")
    edit(place, weights_sha256=file_sha256(place / "model.safetensors"),
         head={"num_layers": 2, "tie_blocks": False, "width": weights["output.weight"].shape[-1]})
    with pytest.raises(UserError, match=rf"heads/0 is damaged \(.*{message}.*\); delete that folder and train"):
        load_artifact(folder, tiny_target)


def test_a_head_of_another_width_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target, replace(stored(), head=unsure(12)))
    drafting = load_artifact(folder, tiny_target).drafting("specdec")
    with pytest.raises(UserError, match="head reads states of width 12, the drafter's have 24; train a head for this"):
        decode(tiny_target, [Request((3, 9, 30), 0, 8)], DecodeSettings(), drafter=drafting.drafter,
               policy=drafting.policy)


def test_the_head_of_another_temperature_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target, stored(HOT))
    shutil.copytree(folder / "acceptance_heads" / "1", folder / "acceptance_heads" / "0")
    with pytest.raises(UserError, match="heads/0 holds the head for temperature 1; rename it to 1, or delete that"):
        load_artifact(folder, tiny_target)


def test_equal_heads_have_equal_bytes_and_a_new_artifact_has_none(tmp_path: Path, tiny_target: Target) -> None:
    folders = [saved(tmp_path / name, tiny_target, stored()) / "acceptance_heads" / "0" for name in ("a", "b")]
    for name in ("config.json", "model.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert load_artifact(saved(tmp_path / "a", tiny_target), tiny_target).heads == {}


def test_the_head_of_another_drafter_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    first = saved(tmp_path / "a", tiny_target, stored())
    other = CASES["draft-lm"].make(tiny_target)
    save_artifact(tmp_path / "b", other, tiny_target.identity, {}, TREE)
    shutil.copytree(first / "acceptance_heads", tmp_path / "b" / "acceptance_heads")
    with pytest.raises(UserError, match=r"judges the draft_lm drafter with the weights [0-9a-f]{12}\.\.\., this "
                                        r"artifact's are [0-9a-f]{12}\.\.\.; delete that folder and train a head for"):
        load_artifact(tmp_path / "b", tiny_target)


def test_a_damaged_head_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target, stored())
    place = folder / "acceptance_heads" / "0"
    weights = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model.safetensors does not have the hash that config.json names"):
        load_artifact(folder, tiny_target)
    (place / "model.safetensors").write_bytes(weights)
    config = json.loads((place / "config.json").read_text())
    edit(place, head={**config["head"], "num_layers": 5})
    with pytest.raises(UserError, match=r"acceptance_heads/0 is damaged .*; delete that folder and train the"):
        load_artifact(folder, tiny_target)
    edit(place, format="another")
    with pytest.raises(UserError, match=r"holds no acceptance head: config\.json has the format 'another', not"):
        load_artifact(folder, tiny_target)
    edit(place, format="draftsmith acceptance head", format_version=9)
    with pytest.raises(UserError, match="has acceptance head format version 9, this program reads 1; delete that fol"):
        load_artifact(folder, tiny_target)
    (place / "config.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*config\.json: No such file.*delete that folder"):
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
    save_head(tmp_path / "a", StoredHead(head=unsure(24 if family == "draft-lm" else 32), setting=SamplingSetting(),
                                         least=1, most=5))
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
    assert Method.of(hot, policy="specdec", temperature=1.0).nodes(1, 1.0) == 6
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


@pytest.mark.parametrize(("settings", "message"), [
    ({"threshold": 1.0}, "threshold must be above 0 and below 1, got 1"),
    ({"least": 0}, "least and most must satisfy 1 <= least <= most, got 0 and 20"),
    ({"least": 5, "most": 4}, "got 5 and 4"),
    ({"most": 10**9}, "most must be at most 1,024 tokens of a draft, got 1000000000; lower it"),
])
def test_rules_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StoredHead(head=unsure(), setting=SamplingSetting(), **settings)
