"""`draftsmith push`: what it uploads, its card, and what it refuses; a stand-in takes the place of the Hub."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.export import (
    EvaluateConfig,
    Method,
    Question,
    evaluate,
    export_artifact,
    load_artifact,
    read_description,
    save_artifact,
)
from draftsmith.modules import Eagle, EagleConfig, Target, UserError
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.publishing import PushArguments, listing, planned, upload
from support.artifacts import TREE, heads

RECIPE = {"distill": {"answered_by": "target"},
          "prompts": {"origin": "dataset", "name": "owner/questions", "path": None}}


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Target) -> Path:
    save_artifact(tmp_path / "artifact", heads(tiny_target), replace(tiny_target.identity, name="owner/model"),
                  {"recipe": RECIPE, "data_manifest": "1234"}, TREE)
    return tmp_path / "artifact"


def given(folder: Path, **settings: Any) -> PushArguments:
    return PushArguments(**{"folder": folder, "repository": "owner/draft", "licence": "apache-2.0", **settings})


def evaluation(file: Path, weights: str, **changes: Any) -> Path:
    """evaluation.json of an artifact with these weights, with the fields that the card shows."""
    measured = {"prompts": 6, "accepted_length": 2.0}
    file.write_text(json.dumps({
        "method": "medusa, static", "family": "medusa", "target": "owner/model", "temperature": 0.0, "batch_size": 1,
        "speedup": 1.5, "nodes": 6, "contended": False, **measured,
        "header": {"dtype": "float32", "machine": {"processor": "a CPU"}, "artifacts": {"medusa, static": weights}},
        "by_category": {"math": {"prompts": 4, "accepted_length": 2.5},
                        "writing": {"prompts": 2, "accepted_length": 1.0}},
        **changes}))
    return file


def weights_of(folder: Path) -> str:
    """The hash by which exports and evaluations name an artifact."""
    return str(read_description(folder)["weights_sha256"])


class StandIn:
    """A Hub that notes what it is asked for."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.made, self.files = failure, {}, {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.failure is not None:
            raise self.failure
        self.made = {"repo_id": repo_id, "private": private, "exist_ok": exist_ok}

    def create_commit(self, repo_id: str, operations: list[Any], *, commit_message: str) -> Any:
        self.files = {one.path_in_repo: one.path_or_fileobj for one in operations}
        return type("Commit", (), {"commit_url": f"https://hub/{repo_id}"})


def validated(card: Any, **_settings: Any) -> None:
    """The Hub's word on a card."""
    if card.data.license == "unheard-of":
        raise ValueError("\"license\" must be one of [apache-2.0, mit]")


def fields(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_an_artifact_with_its_card(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tuning.json").write_text("{}")
    arguments = given(folder, evaluation=evaluation(tmp_path / "evaluation.json", weights_of(folder)), private=False)
    files = planned(arguments)
    # What is true on this machine alone stays here.
    assert list(files) == ["README.md", "acceptance.json", "config.json", "model.safetensors"]
    hub = StandIn()
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", validated)
    assert upload(hub, arguments, files) == "https://hub/owner/draft"
    assert hub.made == {"repo_id": "owner/draft", "private": False, "exist_ok": True}
    assert hub.files["model.safetensors"] == str(folder / "model.safetensors")
    card = hub.files["README.md"].decode()
    assert fields(card) == {"license": "apache-2.0", "library_name": "draftsmith",
                            "tags": ["speculative-decoding", "medusa"], "base_model": "owner/model"}
    assert (folder / "README.md").read_text().rstrip("\n") in card
    assert "| all | 6 | 2.00 |\n| math | 4 | 2.50 |\n| writing | 2 | 1.00 |" in card
    assert "1.50 times as fast as without drafts" in card
    assert "Prompts: dataset, name owner/questions. Answers written by: target. Manifest `1234`." in card
    recipe = card.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe) == RECIPE


def test_an_export_takes_its_card_from_the_artifact(folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    artifact = load_artifact(folder, tiny_target)
    out = export_artifact(artifact, tiny_target, "medusa", tmp_path / "out")
    with pytest.raises(UserError, match="is an export, which does not say how it was trained; give its artifact"):
        planned(given(out))
    files = planned(given(out, artifact=folder))
    assert list(files) == ["README.md", "acceptance.json", "config.json", "medusa_lm_head.safetensors", "origin.json"]
    card = bytes(files["README.md"]).decode()
    assert "text-generation-launcher" in card
    assert "## Training data" in card


def test_what_would_be_uploaded_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = (folder / "model.safetensors").stat().st_size
    files = planned(given(folder))
    assert f"{size:>15,}  model.safetensors" in listing(files, "owner/draft")
    assert main(["push", "--folder", str(folder), "--repository", "owner/draft", "--licence", "mit"]) == 0
    said = capsys.readouterr()
    assert "owner/draft: 4 files" in said.out + said.err
    assert "nothing was uploaded; add --dry_run false to upload" in said.out + said.err
    # The card as it would be uploaded, field by field.
    assert bytes(files["README.md"]).decode().replace("apache-2.0", "mit", 1) in said.out


def test_only_the_word_of_the_user_uploads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = StandIn()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", validated)
    words = ["push", "--folder", str(folder), "--repository", "owner/draft", "--licence", "mit"]
    assert main(words) == 0
    assert not hub.made
    assert main([*words, "--dry_run", "false"]) == 0
    assert hub.made["private"] is True
    said = capsys.readouterr()
    assert "uploaded: https://hub/owner/draft" in said.out + said.err


def strange(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def changed(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")


def unmarked(folder: Path) -> None:
    (folder / ".draftsmith.json").unlink()


@pytest.mark.parametrize(("change", "reason"), [
    (strange, r"holds other or changed files \(notes.txt\)"),
    (changed, r"holds other or changed files \(config.json\)"),
    (unmarked, "is no artifact or export of draftsmith"),
])
def test_a_folder_with_anything_else_is_refused(folder: Path, change: Callable[[Path], None], reason: str) -> None:
    change(folder)
    with pytest.raises(UserError, match=reason):
        planned(given(folder))


def test_the_evaluation_of_another_artifact_is_refused(folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    file = tmp_path / "evaluation.json"
    # Other weights of the same family and target, as of another target: its artifact has other weights.
    for weights, said in (("1234567890abcdef", "of an artifact with the weights 1234567890ab..., this one has"),
                          ("", "an evaluation that does not name its artifact, this one has the weights")):
        with pytest.raises(UserError, match=re.escape(said)):
            planned(given(folder, evaluation=evaluation(file, weights)))
    file.write_text('{"family": "medusa"}')
    with pytest.raises(UserError, match="is no evaluation of draftsmith; give the evaluation"):
        planned(given(folder, evaluation=file))


def test_measurements_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    file = evaluation(tmp_path / "evaluation.json", weights_of(folder))
    file.write_text(json.dumps({**json.loads(file.read_text()), "target": "other"}))
    with pytest.raises(UserError, match="is an evaluation with the target other, this artifact is for owner/model"):
        planned(given(folder, evaluation=file))
    (folder / "acceptance.json").write_text(json.dumps({"family": "eagle", "target": "other", "weights_sha256": "1"}))
    with pytest.raises(UserError, match=r"acceptance.json counts another draft \(eagle for other\); delete it"):
        planned(given(folder))


def test_a_speed_of_a_busy_machine_says_so(folder: Path, tmp_path: Path) -> None:
    for contended in (False, True):
        found = evaluation(tmp_path / "evaluation.json", weights_of(folder), contended=contended)
        card = bytes(planned(given(folder, evaluation=found))["README.md"]).decode()
        assert ("1.50 times as fast as without drafts (other programs used the machine meanwhile, so that this speed "
                "is not reliable)." in card) == contended


def test_an_evaluation_names_its_artifact(folder: Path, tiny_target: Target) -> None:
    artifact = load_artifact(folder, tiny_target)
    run = evaluate(tiny_target, [Method.of(artifact)], {"own": [Question(prompt=lambda _: [5, 9, 11])]},
                   EvaluateConfig(max_new_tokens=4, speed_prompts=0), progress=False)
    found = json.loads(json.dumps(run.to_dict()))
    assert found["header"]["artifacts"] == {found["method"]: weights_of(folder)}


def test_the_export_of_another_artifact_is_refused(folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    out = export_artifact(load_artifact(folder, tiny_target), tiny_target, "medusa", tmp_path / "out")
    other = save_artifact(tmp_path / "other", Eagle.create(EagleConfig(), tiny_target), tiny_target.identity, {}, TREE)
    with pytest.raises(UserError, match=r"is of another artifact .medusa for owner/model. than .*other "
                                        r".eagle for tiny-random.; give its own with --artifact DIR"):
        planned(given(out, artifact=other))
    # Other heads of the same shape for the same target.
    twin = heads(tiny_target)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    save_artifact(tmp_path / "twin", twin, replace(tiny_target.identity, name="owner/model"), {}, TREE)
    with pytest.raises(UserError, match="is of another artifact"):
        planned(given(out, artifact=tmp_path / "twin"))
    with pytest.raises(UserError, match="twin is of another artifact"):
        planned(given(tmp_path / "twin", artifact=folder))
    assert planned(given(folder, artifact=folder))
    # An export of an earlier version names none.
    (out / "origin.json").unlink()
    with pytest.raises(UserError, match="does not say of which artifact it is; write the export again"):
        planned(given(out, artifact=folder))


@pytest.mark.parametrize(("settings", "message"), [
    ({"repository": "draft"}, r"repository must be OWNER/NAME, got 'draft'; give both parts"),
    ({"repository": "a/b/c"}, r"got 'a/b/c': Repo id must be in the form 'repo_name' or 'namespace/repo_name'.*choose"),
    ({"repository": "me/-draft"}, r"got 'me/-draft': Repo id must use alphanumeric chars.*; choose another name"),
    ({"repository": "me/a--b"}, r"got 'me/a--b': Cannot have -- or \.\. in repo_id; choose another name"),
    ({"repository": "me/draft.git"}, r"got 'me/draft.git': Repo_id cannot end by '.git'; choose another name"),
    ({"licence": ""}, r"licence must be a name as the Hub writes it, such as apache-2.0, .* got ''; choose one of"),
    ({"licence": "mit\n"}, r"licence must be .*, got 'mit\\n'; choose one of https://huggingface.co/docs"),
    ({"licence": "Apache 2.0"}, r"licence must be .*, got 'Apache 2.0'; choose one of https://huggingface.co/docs"),
])
def test_names_that_the_hub_does_not_take_are_refused(folder: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        given(folder, **settings)


def test_the_hub_itself_knows_the_licences(folder: Path) -> None:
    assert given(folder, licence="openrail++").licence == "openrail++"


def test_a_card_that_the_hub_refuses_uploads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", validated)
    hub, arguments = StandIn(), given(folder, licence="unheard-of")
    with pytest.raises(UserError, match=r'the Hub refuses the card ."license" must be one of .*nothing was uploaded'):
        upload(hub, arguments, planned(arguments))
    assert not hub.made


def test_a_target_in_a_folder_has_no_name_on_the_hub(tmp_path: Path, tiny_target: Target) -> None:
    for name in ("./models/mine", "tiny-random"):
        identity = replace(tiny_target.identity, name=name)
        save_artifact(tmp_path / "artifact", heads(tiny_target), identity, {}, TREE)
        card = bytes(planned(given(tmp_path / "artifact"))["README.md"]).decode()
        assert "base_model" not in fields(card)
        assert "## Training data" not in card
        assert "## Recipe" not in card
        card = bytes(planned(given(tmp_path / "artifact", base_model="owner/mine"))["README.md"]).decode()
        assert fields(card)["base_model"] == "owner/mine"
    with pytest.raises(UserError, match="base_model must be OWNER/NAME, got 'mine'; give both parts"):
        given(tmp_path / "artifact", base_model="mine")


def test_a_failed_upload_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    monkeypatch.setattr("huggingface_hub.ModelCard.validate", validated)
    # The card was taken: a wrong value after that is none of it.
    for failure in (OfflineModeIsEnabled("no network"), LocalTokenNotFoundError("no token"), ValueError("no space")):
        with pytest.raises(UserError, match=f"owner/draft could not be uploaded \\({failure}\\); check the network"):
            upload(StandIn(failure), given(folder), planned(given(folder)))
