"""Recipes that cannot work are refused before a token is distilled."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.datamodule import DraftDataModule
from draftsmith.data.store.token_store import HeldOut, hash_bytes
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import pipeline
from draftsmith.recipes.commands.pipeline import ALL, COMMANDS
from draftsmith.recipes.stages import workspace
from draftsmith.recipes.stages.workspace import Workspace
from support.target_folders import change, with_head
from support.tiers import some_long

TWO = ("--train.devices", "2", "--train.accelerator", "cpu")


@pytest.mark.parametrize(("words", "message"), some_long([
    (["--tree.searched_nodes", "3", "--tree.used_nodes", "2"],
     "a tree of tree.searched_nodes 3 is at most 2 tokens deep, but this drafter guesses 3; raise tree"),
    (["--evaluate.policies", "[static, chain-8]"],
     "the tree is 8 tokens deep, but this medusa drafter answers 3; choose a tree of at most that depth"),
    (["--evaluate.policies", "[static-64]"], "a tree of 64 nodes was asked for; this artifact's has"),
    (["--family", "mtp"], "tiny-random was not read from a folder of safetensors files, which alone can"),
    (["--evaluate.baselines", "[native_head]"], "tiny-random was not read from a folder of safetensors files, which"),
    (["--family", "medusa2"], "batch.states is 'stored', but Medusa2Module trains the"),
    (["--family", "draft_lm", "--drafter.layers", "[0, 7]"], "7"),
    (["--drafter.vocabulary_size", "100000"], "100000"),
    (["--family", "eagle3", "--drafter.taps", "[0, 2]"],
     "tap 2 would be the state after the last norm of tiny-random, which is no layer's output; its last layer is 1"),
    (["--family", "eagle3", "--drafter.steps", "40", "--batch.row_length", "41"],
     "40 draft steps need rows of at least 42 tokens, but batch.row_length is 41; raise it, or train fewer steps"),
    (["--family", "eagle", "--drafter.vocabulary_size", "101"],
     "between 1 and 100 entries"),
    (["--family", "eagle3", "--drafter.taps", "[0, 5]"],
     "tap 5 is not a layer of tiny-random; choose from 0 to 1"),
    (["--family", "eagle3", "--drafter.vocabulary_size", "101"],
     "between 1 and 100 entries (the target's vocabulary), got 101; set vocabulary_size within these bounds"),
    (["--family", "eagle3", "--drafter.hidden_size", "24", "--drafter.output", "shared"],
     "reads states 32 wide, not of hidden_size 24; set output to copy"),
    (["--family", "eagle3", "--train.positions.offset", "600"],
     "positions.offset is 600, but the context of tiny-random ends at 512 tokens; lower it, or set it to max"),
    (["--target.placement", "tensor_parallel"], "shares one target among several processes, but this is one; start"),
    (["--target.placement", "tensor_parallel", "--train.devices", "4", "--train.accelerator", "cpu"],
     "target.degree 4 does not divide num_key_value_heads 2 of the target; set it to a divisor of both"),
    (["--target.placement", "fully_sharded", *TWO],
     "but this is one; start draftsmith train with torchrun --nproc-per-node, or with --target.placement layers"),
    (["--target.placement", "fully_sharded", "--target.degree", "3", "--train.devices", "4", "--train.accelerator",
      "cpu"], "target.degree 3 does not divide the 4 processes of this run into groups"),
    (["--target.placement", "fully_sharded", *TWO, "--target.pack", "1"],
     "target.pack 1 packs whole linear layers for oneDNN, but target.placement fully_sharded does not keep them whole"),
    (["--target.placement", "fully_sharded", *TWO, "--family", "medusa2", "--batch.states", "computed"],
     "Medusa2Module trains through the target's layers, which target.placement fully"),
    (["--target.placement", "layers"], "spreads the target over the devices of one process, but there are 0 here"),
    (["--train.strategy", "deepspeed_stage_3_offload"],
     "train.strategy must be one of auto, ddp, deepspeed_stage_1, deepspeed_stage_2, deepspeed_stage_3, got 'd"),
    (["--target.placement", "zero3", "--target.degree", "2", "--train.devices", "4", "--train.accelerator", "cpu"],
     "target.placement zero3 divides the target among all 4 processes, but target.degree is 2; leave it out, or set"),
    (["--target.placement", "fully_sharded", *TWO, "--target.offload", "true"],
     "target.offload keeps the target's weights in the machine's memory with target.placement zero3 only, and the"),
    (["--train.strategy", "fsdp2"], "train.strategy must be one of auto, ddp, deepspeed_stage_1, "),
    (["--family", "medusa2", "--batch.states", "computed", "--train.strategy", "deepspeed_stage_1"],
     "train.strategy deepspeed_stage_1 splits the drafter's weights or their optimizer, and Medusa2Module trains"),
    (["--family", "block", "--drafter.mask_token_id", "40"], "a token that its text has; choose the id of a reserved"),
    (["--train.num_nodes", "2"], "train.num_nodes is 2, but this process was started alone; start draftsmith train on"),
], 4))
def test_a_run_that_cannot_work_leaves_nothing(words: list[str], message: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["run", "--config", "tiny", "--out", str(out), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (out / "data").exists()


def test_another_head_in_the_targets_folder_is_noticed(tmp_path: Path) -> None:
    folder = with_head("mimo", tmp_path / "target")

    def decisive(*words: str) -> dict[str, Any]:
        given = ["--config", "tiny", "--out", str(tmp_path), "--target.name", str(folder), *words]
        return Workspace(COMMANDS["run"].parse(given)).decisive

    words = ("--family", "mtp", "--evaluate.baselines", "[native_head]")
    before = decisive(*words)
    # Other tensors have hashes of their own.
    change(folder, {"model.norm.weight": torch.rand(32)})
    assert decisive(*words) == before
    change(folder, {"model.mtp_layers.0.final_layernorm.weight": torch.rand(32)})
    after = decisive(*words)
    for section in ("drafter", "evaluate"):
        assert after[section].pop("head_in_target") != before[section].pop("head_in_target")
    assert after == before
    assert "head_in_target" not in decisive()["evaluate"]


def test_a_command_for_one_process_is_refused_in_several(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ["--config", "tiny", "--out", str(tmp_path / "out"), "--train.accelerator", "cpu"]
    for command, message in (
        ("distill", "torchrun has started 2 processes, but draftsmith distill works in one; start it without torchrun"),
        ("train", "holds no complete data; run draftsmith distill with this recipe first"),
        ("run", "before 2 processes can train, one must have finished the stage 'distill'"),
    ):
        assert main([command, *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_target_with_other_weights_than_answered_the_data_is_refused_wherever_it_is_loaded(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id of the hub may name another revision than it did."""
    parsed = COMMANDS["train"].parse(["--config", "tiny", "--out", str(tiny_run)])
    assert Workspace(parsed).target.num_layers == 2
    monkeypatch.setattr(workspace, "load_target", lambda _: Target(tiny_model(seed=1), tiny_tokenizer(), name="moved"))
    with pytest.raises(UserError, match=r"data was made for the target tiny-random with .* here, moved, .*; "):
        _ = Workspace(parsed).target


@pytest.mark.parametrize(("asked", "prompts", "says"), [
    ("true", {"origin": "file"}, True),
    ("true", {"origin": "own", "own_kinds": ["math"]}, True),
    ("true", {"origin": "own"}, False),
    ("false", {"origin": "file"}, False),
])
def test_prompts_that_cannot_be_learned_are_reported(asked: str, prompts: dict[str, object], says: bool,
                                                     monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    parsed = COMMANDS["run"].parse(["--config", "tiny", "--batch.own_prompts", asked])
    given = Workspace(parsed)
    monkeypatch.setattr(given, "manifest", lambda: SimpleNamespace(recipe={"prompts": prompts}))
    monkeypatch.setattr(given, "template", SimpleNamespace(user_turn=lambda: "around"))
    assert given.around_prompts == ("around" if asked == "true" and not says else None)
    assert given.around_prompts == given.around_prompts
    assert capsys.readouterr().out.count("only answers are learned") == says, "once"


@pytest.mark.long
def test_a_run_sketches_the_target_once_and_only_training_opens_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, running, opened = dict.fromkeys(("sketch_target", "dry_run", "data"), 0), [""], dict[str, list[str]]()

    def counted(owner: Any, attribute: str, name: str) -> None:
        original = getattr(owner, attribute)

        def call(*given: Any, **settings: Any) -> Any:
            counts[name] += 1
            return original(*given, **settings)

        monkeypatch.setattr(owner, attribute, call)

    def watched(name: str) -> None:
        original = getattr(pipeline, f"{name}_stage")

        def stage(*given: Any) -> Any:
            running[0], opened[name] = name, []
            return original(*given)

        monkeypatch.setattr(pipeline, f"{name}_stage", stage)

    counted(workspace, "sketch_target", "sketch_target")
    counted(workspace, "dry_run", "dry_run")
    counted(DraftDataModule, "__init__", "data")
    for name in ALL:
        watched(name)
    read = TokenShard.read

    def noting(file: Path, *rest: Any) -> TokenShard:
        opened[running[0]].append(file.name)
        return read(file, *rest)

    monkeypatch.setattr(TokenShard, "read", noting)
    words = ["--distill.budget_tokens", "300", "--train.max_steps", "2", "--evaluate.limit", "1"]
    assert main(["run", "--config", "tiny", "--out", str(tmp_path), *words]) == 0
    assert counts == {"sketch_target": 1, "dry_run": 1, "data": 1}
    assert [file for file in opened["artifact"] if not file.startswith("validation")] == []
    assert len(opened["artifact"]) == len(set(opened["artifact"])) > 0, "each file is read and hashed once"
    assert any(file.startswith("train") for file in opened["train"]), "the test sees nothing"


def test_questions_that_do_not_fit_the_context_are_found_before_an_answer(
    copied_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ["--config", "tiny", "--evaluate.max_new_tokens", "400"]
    assert main(["run", *long, "--out", str(tmp_path / "new")]) == 2
    said = r"a question of the set 'handwritten' \(.*\) has 1\d\d tokens; with 1 answer of evaluate.max_new_tokens 400"
    assert re.search(said, capsys.readouterr().err)
    assert not list((tmp_path / "new").rglob("*.safetensors"))
    # Prompts of one's own are known once they are held out: before the training, at the latest.
    shutil.rmtree(copied_run / "train")
    file, manifest = copied_run / "data" / "test.jsonl", Manifest.load(copied_run / "data")
    file.write_text(json.dumps({"question_id": "talk", "turns": ["Say hi.", "x" * 300, "y" * 150]}) + "\n")
    held_out = HeldOut(file="test.jsonl", sha256=hash_bytes(file.read_bytes()), prompts=1)
    replace(manifest, held_out=held_out).save(copied_run / "data")
    shutil.move(copied_run / "data", tmp_path / "data")
    assert main(["run", "--config", "tiny", "--out", str(copied_run), "--data", str(tmp_path / "data")]) == 2
    assert "a question of the set 'own' ('Say hi.') has" in capsys.readouterr().err
    assert not (copied_run / "train").exists()
    assert main(["train", "--config", "tiny", "--out", str(copied_run), "--data", str(tmp_path / "data")]) == 0
