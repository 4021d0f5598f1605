"""`draftsmith import`: every family comes back from its layouts as it was; what a checkpoint leaves open is asked. And
`draftsmith push`: what it uploads, its card, and what it refuses; a stand-in takes the place of the Hub."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import yaml
from draftsmith.export import (
    Artifact,
    EvaluateConfig,
    Method,
    Question,
    evaluate,
    export_artifact,
    load_artifact,
    read_description,
    save_artifact,
)
from draftsmith.export.layouts.registry import EXPORT_FORMATS, IMPORTED
from draftsmith.modules import (
    DecodeSettings,
    Drafter,
    DraftLM,
    DraftLMConfig,
    Eagle,
    EagleConfig,
    Request,
    Target,
    TargetConfig,
    Topology,
    UserError,
    decode,
    load_target,
)
from draftsmith.modules.decoding.recorders import PassRecorder
from draftsmith.modules.files.atomic_files import file_sha256
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.exchange import PushArguments, listing, planned, upload
from draftsmith.recipes.commands.published import draft_folder, imported
from safetensors.torch import load_file, save_file
from support.artifacts import TREE, heads
from support.data.data_folders import many, write_prompts
from support.families import CASES, randomised
from support.tiers import others_long

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml"
RANKS = "[[0],[1],[0,0]]"
LAYOUTS = [
    ("medusa", "medusa", RANKS), ("medusa-one-copy", "medusa", "2"), ("medusa-copy-reduced", "medusa", "2"),
    ("hydra", "hydra", RANKS), ("hydra-one-copy", "hydra", "2"), ("hydra++", "hydra", RANKS),
    ("eagle", "eagle", RANKS), ("eagle3", "eagle", RANKS), ("eagle3-reduced", "eagle", RANKS),
    ("eagle3-narrow", "eagle", RANKS), ("eagle3-reduced", "speculators", RANKS), ("eagle3.1", "speculators", RANKS),
    ("eagle3-norms", "speculators", RANKS), ("eagle3-layers", "speculators", RANKS),
    ("p-eagle", "speculators", RANKS), ("kangaroo", "kangaroo", RANKS),
    ("prompt-tokens", "ppd", RANKS), ("draft-lm", "huggingface", RANKS), ("draft-lm-reduced", "huggingface", RANKS),
    ("masks", "huggingface", RANKS),
]
"""(case, layout, tree): of a reduced vocabulary that becomes a whole one the likeliest guess alone is the same."""


@pytest.fixture(scope="module")
def tiny() -> Target:
    """The target that the command line knows by name."""
    return load_target(TargetConfig(name="tiny-random"))


@cache
def made(name: str, target: Target) -> Drafter[Any]:
    """The drafter of a case, the same for each call."""
    if name == "masks":
        config = DraftLMConfig(num_layers=2, hidden_size=32, depths=3, mask_token_id=7)
        drafter: Drafter[Any] = randomised(DraftLM.create(config, target))
        assert isinstance(drafter, DraftLM)
        assert drafter.mask_embedding is not None
        # An export has one place for both.
        drafter.mask_embedding.data.copy_(drafter._embedding().weight[7])
        return drafter
    return randomised(CASES[name].make(target))


def exported(name: str, target: Target, layout: str, out: Path) -> Path:
    drafter = made(name, target)
    return export_artifact(Artifact(drafter=drafter, target=target, topology=Topology.chain(1), provenance={},
                                    identity=target.identity), target, layout, out)


@pytest.fixture(scope="module")
def checkpoint(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, Path], Path]:
    """A copy of an export, which is made once, to a folder."""
    @cache
    def once(name: str, layout: str) -> Path:
        return exported(name, tiny, layout, tmp_path_factory.mktemp("made") / "out")

    return lambda name, layout, out: Path(copytree(once(name, layout), out))


def words(layout: str, folder: Path, out: Path, *more: str) -> list[str]:
    return ["import", "--format", layout, "--folder", str(folder), "--out", str(out), *more]


def passes(drafter: Drafter[Any], target: Target, topology: Topology) -> tuple[list[Any], dict[int, list[Any]]]:
    """(answers, guesses of every pass) of two prompts."""
    recorder, artifact = PassRecorder(), Artifact(drafter=drafter, target=target, topology=topology, provenance={},
                                                  identity=target.identity)
    requests = [Request((1, 9, 8, 30, 31), 0, 24), Request((1, 40, 5), 1, 24)]
    found = decode(target, requests, DecodeSettings(), drafter=drafter, policy=artifact.policy("static"),
                   observer=recorder)
    return [one.tokens for one in found.generations], recorder.passes


FIRST = list({case[1]: case for case in reversed(LAYOUTS)}.values())  # The first case of each layout


@pytest.mark.parametrize(("name", "layout", "tree"), others_long(LAYOUTS, FIRST))
def test_an_imported_drafter_makes_the_same_passes(
    tmp_path: Path, tiny: Target, checkpoint: Callable[[str, str, Path], Path], name: str, layout: str, tree: str
) -> None:
    folder = checkpoint(name, layout, tmp_path / "out")
    assert main(words(layout, folder, tmp_path / "back", "--target.name", "tiny-random", "--tree", tree)) == 0
    back = load_artifact(tmp_path / "back", tiny)
    own = made(name, tiny)
    assert type(back.drafter) is type(own)
    assert any(one.rejected for one in passes(own, tiny, back.topology)[1][0])
    assert passes(back.drafter, tiny, back.topology) == passes(own, tiny, back.topology)
    # Once more in the same layout, it is the same checkpoint.
    again = export_artifact(back, tiny, layout, tmp_path / "again")
    file = next(one.file for one in EXPORT_FORMATS if one.name == layout)
    first, second = load_file(folder / file), load_file(again / file)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    facts = read_description(tmp_path / "back")["provenance"]["imported"]
    assert facts == {"format": layout, "folder": "out", "files": {file: file_sha256(folder / file)}}
    assert f"format {layout}, folder out: {file} `{facts['files'][file]}`" in (
        tmp_path / "back" / "README.md").read_text()


@pytest.mark.parametrize(("name", "layout", "tree"), others_long(LAYOUTS, FIRST))
def test_a_draft_that_is_compared_needs_no_name_of_its_layout(
    tmp_path: Path, tiny: Target, checkpoint: Callable[[str, str, Path], Path], name: str, layout: str, tree: str
) -> None:
    folder = checkpoint(name, layout, tmp_path / "out")
    (folder / "origin.json").unlink()
    assert draft_folder(folder) == (folder, True)
    found = imported(folder, "owner/name", tiny)
    assert (type(found.drafter), found.provenance["imported"]["format"]) == (type(made(name, tiny)), layout)
    assert passes(found.drafter, tiny, found.topology) == passes(made(name, tiny), tiny, found.topology)


def test_every_layout_that_is_read_is_tried_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    # Drafters of blocks need a target with a mask, EAGLE-4 three layers to read; they have tests of their own.
    assert {layout for _, layout, _ in LAYOUTS} | {"mtp", "dflash", "eagle4"} == set(IMPORTED)
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert f"One of {', '.join(IMPORTED)}." in " ".join(capsys.readouterr().out.split())


FOREIGN = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": None, "draftsmith_taps": None,
           "draftsmith_rope_base": None}
"""Keys that checkpoints of other programs lack."""


@pytest.mark.parametrize(("name", "layout", "config", "more", "message"), [
    ("eagle3", "eagle", FOREIGN, "", "does not say which layers' outputs EAGLE-3 reads; give them, from 0, with --taps:"
                                     " '[0, 1]' in the official code and in vLLM for the 2 layers of tiny-random"),
    ("eagle3", "eagle", {**FOREIGN, "rope_theta": 500000.0}, "--taps [0,1]",
     "says rope_theta: 500000, which the official trainers of EAGLE pass over; give --rope_base 10000 for a checkpoint "
     "of theirs, or --rope_base 500000 for one of another trainer"),
    ("eagle3", "speculators", {"eagle_aux_hidden_state_layer_ids": None}, "", "does not say which layers' outputs"),
    ("eagle", "eagle", {**FOREIGN, "rope_theta": 7.5}, "", "says rope_theta: 7.5, which the official trainers"),
    ("eagle3", "eagle", {}, "--taps [1]", "fc in"),
    ("eagle3", "eagle", {"hidden_size": 64}, "", "reads states 64 wide"),
    ("draft-lm", "huggingface", {"hidden_act": 0}, "", "config.json is damaged: "),
    ("draft-lm", "huggingface", {"num_key_value_heads": "2"}, "", "config.json is damaged: "),
    ("eagle3", "eagle", {"vocab_size": 99}, "", "says vocab_size: 99, but tiny-random has 100 tokens; load the target"),
    ("eagle3", "eagle", {"is_causal": False}, "", "says is_causal: false; only true can be imported"),
    ("eagle3", "eagle", {"dflash_config": {}}, "", "says dflash_config: {}; only null can be imported"),
    ("eagle3", "speculators", {"speculators_model_type": "mtp"}, "", 'says speculators_model_type: "mtp"; only'),
    ("eagle3", "eagle", {"quantization_config": {"bits": 4}}, "", "says quantization_config"),
    ("eagle3", "eagle", {"hidden_size": 10**12}, "", "has hidden_size 1000000000000, more than any model"),
    ("eagle3", "eagle", {"eagle_aux_hidden_state_layer_ids": 5, "draftsmith_taps": None}, "", "is damaged: "),
    ("eagle3", "eagle", {}, "--exit_layer 1", "exit_layer 1 is for the formats kangaroo alone; leave it out"),
    ("eagle3", "eagle", {}, "--rope_base 0", "rope_base must be at least 1, got 0"),
    ("kangaroo", "kangaroo", {"draftsmith_exit_layer": None}, "", "give it with --exit_layer (the official"),
    ("kangaroo", "kangaroo", {"rms_norm_eps": None}, "", "lacks 'rms_norm_eps'; copy it again"),
    ("masks", "huggingface", {"draftsmith_depths": None}, "", "names the mask token 7 (pard_token), and not how many"),
    ("draft-lm", "huggingface", {}, "--depths 3", "names none (pard_token); leave --depths out"),
    ("medusa", "medusa", {}, "--tree 9", "the tree is 9 tokens deep, but this medusa drafter answers 3"),
    ("medusa", "medusa", {}, "--tree [[1,0]]", "the path (1, 0) comes before its parent (1,); give --tree N"),
    ("medusa", "medusa", {}, "--tree 0", "tree must have 1 to 1023 nodes below its root, got 0; give --tree N"),
    ("medusa", "medusa", {}, "--tree null", "no checkpoint says with which tree it drafts; give --tree N"),
    ("medusa", "medusa", {}, "--target.name artifact", "give it with --target.name"),
    ("medusa", "medusa", {}, "--format medusa-vllm",
     "the format 'medusa-vllm' is none of dflash, eagle, eagle4, huggingface"),
    ("medusa", "medusa", {}, "--format specdec", "the format 'specdec' is none of dflash, eagle, eagle4, huggingface"),
])
def test_what_is_open_or_does_not_fit_is_refused(
    tmp_path: Path, checkpoint: Callable[[str, str, Path], Path], capsys: pytest.CaptureFixture[str], name: str,
    layout: str, config: dict[str, Any], more: str, message: str,
) -> None:
    folder = checkpoint(name, layout, tmp_path / "out")
    said = json.loads((folder / "config.json").read_text())
    changed = {key: value for key, value in (said | config).items() if key not in config or value is not None}
    (folder / "config.json").write_text(json.dumps(changed))
    line = words(layout, folder, tmp_path / "back", "--target.name", "tiny-random", "--tree", "2", *more.split())
    assert main(line) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(("name", "layout", "change", "message"), [
    ("eagle3-reduced", "eagle", {"t2d": torch.ones(90, dtype=torch.bool)}, "marks 90 tokens, but tiny-random has 100"),
    ("eagle3-reduced", "speculators", {"d2t": torch.full((26,), 90)}, "names the token 115, but tiny-random has 100"),
    ("eagle3", "eagle", {"norm.weight": torch.full((32,), torch.nan)}, "values that are not finite"),
    ("hydra", "hydra", {"hydra_mlp.1.0.linear.bias": None}, "does not fit its configuration or tiny-random"),
    ("prompt-tokens", "ppd", {"prompt_embeddings": torch.zeros(3, 8)}, "does not fit its configuration or tiny-random"),
])
def test_tensors_of_another_target_are_refused(
    tmp_path: Path, checkpoint: Callable[[str, str, Path], Path], capsys: pytest.CaptureFixture[str], name: str,
    layout: str, change: dict[str, torch.Tensor | None], message: str,
) -> None:
    folder = checkpoint(name, layout, tmp_path / "out")
    file = folder / next(one.file for one in EXPORT_FORMATS if one.name == layout)
    save_file({key: value for key, value in (load_file(file) | change).items() if value is not None}, file)
    assert main(words(layout, folder, tmp_path / "back", "--target.name", "tiny-random", "--tree", "2")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("layout", sorted(IMPORTED))
def test_a_pickle_is_refused_with_the_line_that_converts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "weights.bin").write_bytes(b"\x80\x04.")
    more = ("--target.name", "no such model", "--tree", "2")
    # Before the target is loaded, which may take minutes.
    assert main(words(layout, tmp_path / "pickled", tmp_path / "back", *more)) == 2
    assert "torch.load('weights.bin', weights_only=True)" in capsys.readouterr().err
    assert main(words(layout, tmp_path / "nowhere", tmp_path / "back", *more)) == 2
    assert "nowhere; give the one that holds the checkpoint" in capsys.readouterr().err


def test_values_that_are_given_are_kept(tmp_path: Path, tiny: Target) -> None:
    folder = exported("eagle3", tiny, "eagle", tmp_path / "out")
    said = json.loads((folder / "config.json").read_text())
    foreign = {key: value for key, value in said.items() if key not in FOREIGN} | {"rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(foreign))
    more = ("--target.name", "tiny-random", "--tree", "2", "--taps", "[0,1]", "--rope_base")
    for base in (10000.0, 500000.0):
        assert main(words("eagle", folder, tmp_path / "back", *more, f"{base:g}")) == 0
        description = read_description(tmp_path / "back")
        assert description["drafter"]["block"]["rope_base"] == base
        assert description["provenance"]["imported"]["rope_base"] == base
        assert description["provenance"]["imported"]["taps"] == [0, 1]


@pytest.mark.long
def test_an_import_is_measured_next_to_it(tmp_path: Path, tiny: Target) -> None:
    folder = exported("medusa", tiny, "medusa", tmp_path / "out")
    assert main(words("medusa", folder, tmp_path / "back", "--target.name", "tiny-random", "--tree", "2",
                      "--evaluate")) == 0
    found = json.loads((tmp_path / "back-evaluation" / "evaluation.json").read_text())
    assert list(found["header"]["artifacts"].values()) == [read_description(tmp_path / "back")["weights_sha256"]] * len(
        found["header"]["artifacts"])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [
    ("medusa", "medusa"), ("hydra", "hydra"), ("eagle", "eagle"), ("eagle3", "eagle"),
    ("eagle3-reduced", "speculators"), ("kangaroo", "kangaroo"), ("prompt-tokens", "ppd"), ("draft-lm", "huggingface")])
def test_an_import_is_measured_continued_and_exported(name: str, layout: str, tmp_path: Path, tiny: Target) -> None:
    """The way of somebody who takes a published draft, on prompts of his own."""
    folder, prompts = exported(name, tiny, layout, tmp_path / "published"), write_prompts(tmp_path, many(24))
    assert main(words(layout, folder, tmp_path / "imported", "--target.name", "tiny-random", "--tree", "2")) == 0
    assert main(["evaluate", "--artifact", str(tmp_path / "imported"), "--out", str(tmp_path / "measured"), "--limit",
                 "2", "--max_new_tokens", "8", "--speed_prompts", "0"]) == 0
    recipe = yaml.safe_load(TINY.read_text()) | {
        "family": made(name, tiny).family, "out": str(tmp_path / "run"),
        "prompts": {"origin": "file", "path": prompts.path}}
    # Whatever the recipe leaves out is the imported draft's.
    del recipe["drafter"]
    recipe["distill"] |= {"budget_tokens": 300, "max_new_tokens": 24, "validation_prompts": 4}
    recipe["train"] |= {"max_steps": 4, "validate_every": 2, "warmup_steps": 1, "start": str(tmp_path / "imported")}
    recipe["evaluate"] |= {"speed_prompts": 0, "limit": 2, "max_new_tokens": 12}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "--config", str(tmp_path / "recipe.yaml")]) == 0
    for measured in (tmp_path / "measured", tmp_path / "run"):
        for entry in json.loads((measured / "evaluation.json").read_text())["measurements"]:
            assert entry["lossless"]["identical"] == entry["prompts"]
    continued = read_description(tmp_path / "run" / "artifact")["provenance"]["start"]
    assert continued["weights_sha256"] == read_description(tmp_path / "imported")["weights_sha256"]
    assert main(["export", "--artifact", str(tmp_path / "run" / "artifact"), "--format", layout, "--out",
                 str(tmp_path / "export")]) == 0
    file = next(one.file for one in EXPORT_FORMATS if one.name == layout)
    first, second = load_file(folder / file), load_file(tmp_path / "export" / file)
    assert {key: tensor.shape for key, tensor in first.items()} == {key: tensor.shape for key, tensor in second.items()}


def test_the_table_of_the_guide_is_that_of_the_layouts() -> None:
    text = (Path(__file__).parents[3] / "recipes/guides/continue-or-carry-over.md").read_text()
    rows = text.partition("<!-- imports -->\n")[2].partition("<!-- /imports -->")[0].splitlines()[2:]
    expected = [(f"`{one.name}`", one.content, f"`{one.file}`", ", ".join(f"`--{name}`" for name in one.opens))
                for one in EXPORT_FORMATS if one.name in IMPORTED]
    assert [tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in rows] == expected


def test_weights_in_several_files_are_read(tmp_path: Path, tiny: Target, checkpoint: Callable[[str, str, Path], Path]
                                           ) -> None:
    folder = checkpoint("eagle3", "eagle", tmp_path / "out")
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for part, some in enumerate((tensors[:4], tensors[4:]), 1):
        save_file(dict(some), folder / f"model-0000{part}-of-00002.safetensors")
    assert main(words("eagle", folder, tmp_path / "back", "--target.name", "tiny-random", "--tree", "2")) == 0
    back = load_artifact(tmp_path / "back", tiny).drafter.state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in made("eagle3", tiny).state_dict().items())
    assert list(read_description(tmp_path / "back")["provenance"]["imported"]["files"]) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


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


def test_what_would_be_uploaded_is_listed_and_only_the_word_of_the_user_uploads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, files = StandIn(), planned(given(folder))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", validated)
    size = (folder / "model.safetensors").stat().st_size
    assert f"{size:>15,}  model.safetensors" in listing(files, "owner/draft")
    words = ["push", "--folder", str(folder), "--repository", "owner/draft", "--licence", "mit"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "owner/draft: 4 files" in said.out + said.err
    assert "nothing was uploaded; add --dry_run false to upload" in said.out + said.err
    # The card as it would be uploaded, field by field.
    assert bytes(files["README.md"]).decode().replace("apache-2.0", "mit", 1) in said.out
    assert not hub.made
    assert main([*words, "--dry_run", "false"]) == 0
    assert hub.made["private"] is True
    said = capsys.readouterr()
    assert "uploaded: https://hub/owner/draft" in said.out + said.err


@pytest.mark.parametrize(("change", "reason"), [
    (lambda folder: (folder / "notes.txt").write_text("mine"), r"holds other or changed files \(notes.txt\)"),
    (lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
     r"holds other or changed files \(config.json\)"),
    (lambda folder: (folder / ".draftsmith.json").unlink(), "is no artifact or export of draftsmith"),
])
def test_a_folder_with_anything_else_is_refused(folder: Path, change: Callable[[Path], object], reason: str) -> None:
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


def test_a_lossy_evaluation_says_so_on_the_card(folder: Path, tmp_path: Path) -> None:
    found = evaluation(tmp_path / "evaluation.json", weights_of(folder), lossy="typical",
                       lossless={"prompts": 10, "identical": 7})
    card = bytes(planned(given(folder, evaluation=found))["README.md"]).decode()
    assert "**LOSSY (typical): 3 of 10 answers differ from those of exact verification.**" in card


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


def test_a_card_that_the_hub_refuses_uploads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub itself knows the licences."""
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", validated)
    assert given(folder, licence="openrail++").licence == "openrail++"
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
