"""The command line: quick help, recipes and overrides, and one clear sentence for whatever a user gets wrong."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from draftsmith.modules import BASELINES
from draftsmith.recipes import (
    artifact_commands as commands,
)
from draftsmith.recipes import (
    compare_families as families,
)
from draftsmith.recipes import (
    memory_plan as plan,
)
from draftsmith.recipes import (
    pipeline,
)
from draftsmith.recipes.__main__ import COMMANDS, main
from draftsmith.recipes.parsing import SECTIONS, Command
from draftsmith.recipes.recipe import Recipe

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
FAMILIES = next(path for path in SHIPPED if path.stem == "families")
RECIPES = [path for path in SHIPPED if path != FAMILIES]
TINY = next(path for path in RECIPES if path.stem == "tiny")
FILES = {"pipeline": pipeline, "families": families, "plan": plan, "commands": commands}
EVERY: dict[str, Command[Any]] = {name: command for file in FILES.values() for name, command in file.COMMANDS.items()}


def parse(name: str, *words: str) -> Any:
    """The namespace that a command makes of its words."""
    return EVERY[name].parser().parse_args(EVERY[name].expand(words))


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence that a command refuses its words with."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "\n".join(told)
    assert told[-1].startswith("draftsmith: error: ")
    return told[-1]


# Help ----------------------------------------------------------------------------------------------------------------


def test_help_is_quick_and_lists_every_command() -> None:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        answer = subprocess.run([sys.executable, "-m", "draftsmith.recipes", "--help"], capture_output=True, text=True,
                                check=True)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1.5
    assert all(f"  {name}" in answer.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    program = ("import sys; from draftsmith.recipes.__main__ import main; main(['--help']);"
               "assert not {'torch', 'transformers', 'lightning', 'jsonargparse'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_table_of_commands_is_that_of_the_files() -> None:
    assert {name: file for name, (file, _) in COMMANDS.items()} == {
        name: title for title, file in FILES.items() for name in file.COMMANDS}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: draftsmith {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("draftsmith ")


# Recipes and overrides -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["run", "distill", "train"])
def test_every_shipped_recipe_parses(path: Path, name: str) -> None:
    parser = EVERY[name].parser()
    assert parser.instantiate(parser.parse_args(["--config", str(path)])).model is not None


def test_the_rows_of_the_comparison_are_shipped_recipes_and_baselines() -> None:
    given = EVERY["families"].parse(["--config", str(FAMILIES)]).values
    assert set(given.rows) <= {path.stem for path in RECIPES} | set(BASELINES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_commands_that_use_an_artifact_take_the_same_recipe(path: Path) -> None:
    given = parse("evaluate", "--config", str(path), "--artifact", "a", "--out", "b")
    assert str(given.out) == "b"


def test_sections_are_the_fields_of_a_recipe() -> None:
    assert sorted(SECTIONS) == sorted(field.name for field in fields(Recipe))


@pytest.mark.parametrize(("name", "words", "key", "value"), [
    ("run", ["--distill.seed", "7"], "distill.seed", 7),
    ("run", ["--distill.max-new-tokens=9"], "distill.max_new_tokens", 9),
    ("run", ["--model.config.drafter.num_heads", "2"], "model.init_args.config.drafter.num_heads", 2),
    ("distill", ["--budget-tokens", "500"], "distill.budget_tokens", 500),
    ("train", ["--max_steps", "5"], "model.init_args.config.max_steps", 5),
    ("evaluate", ["--batch-sizes", "[1,4,8]", "--artifact", "a"], "evaluate.batch_sizes", (1, 4, 8)),
    ("evaluate", ["--batch-sizes", "8", "--artifact", "a"], "evaluate.batch_sizes", 8),
    ("evaluate", ["--temperatures", "[0,1]", "--artifact", "a"], "evaluate.temperatures", (0.0, 1.0)),
    ("evaluate", ["--temperatures=0.7", "--artifact", "a"], "evaluate.temperatures", 0.7),
    ("evaluate", ["--prompts", "mine.jsonl", "--artifact", "a"], "prompts", "mine.jsonl"),
    ("evaluate", ["--distill.seed", "3", "--artifact", "a"], "evaluate.seed", 0),
])
def test_keys_override_the_recipe(name: str, words: list[str], key: str, value: object) -> None:
    assert parse(name, "--config", str(TINY), *words)[key] == value


def test_a_recipe_goes_by_its_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("run", "--config", "tiny").target.name == "tiny-random"


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "told"), [
    ([], "COMMAND"),
    (["trian"], "unknown command 'trian': did you mean train"),
    (["frobnicate"], "unknown command 'frobnicate': choose one of run"),
])
def test_unknown_command(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [
    (["--distill.sed", "1"], "distill.sed"),
    (["--frobnicate", "1"], "frobnicate"),
    (["--target.nam", "tiny-random"], "target.nam"),
    (["--distill.seed", "many"], "distill.seed.*many"),
    (["--target.dtype", "int8"], "target.dtype.*int8"),
    (["--model", "draftsmith.trainers.Nothing"], "Nothing"),
    (["--model.config.lr", "fast"], "fast"),
    (["--model.config.drafter.num_heads", "0"], "num_heads must be a whole number of at least 1, got 0"),
    (["--tree.max_nodes", "1"], "tree.max_nodes must be at least 2"),
    (["--tree.max_rank", "0"], r"tree.max_rank must lie between 1 \(a chain\) and 10, got 0"),
    (["--model.class_path", "draftsmith.trainers.Medusa2Module"],
     "batch.source is 'features', but Medusa2Module trains the target"),
    (["--tree.size", "99"], "tree.size must lie between 1 and tree.max_nodes 16, got 99"),
    (["--prompts.source", "file"], "prompts.source file needs prompts.path"),
    (["--target.name", "no/such-model"], "no/such-model"),
    (["--target.name", "gone.gguf"], "gone.gguf.*does not exist"),
    (["--target.chat_template", "gone.jinja"], "gone.jinja"),
    (["--target.device", "toaster"], "toaster"),
    (["--template.tools", "gone.json"], "gone.json"),
    (["--prompts.source", "file", "--prompts.path", "gone.jsonl"], "gone.jsonl"),
])
def test_a_wrong_recipe(words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = refused(capsys, "run", "--config", TINY, "--out", tmp_path / "run", *words)
    assert re.search(told, sentence), sentence
    assert not [file for file in (tmp_path / "run").rglob("*") if file.suffix in (".safetensors", ".partial")]


@pytest.mark.parametrize(("text", "told"), [
    ("distill: [", "config"),
    ("frobnicate: 1\n", "frobnicate"),
    ("just words", "config"),
])
def test_a_malformed_recipe_file(text: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert told in refused(capsys, "run", "--config", tmp_path / "mine.yaml")


def test_a_missing_recipe_file_names_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no recipe 'gone.yaml'; give the path of a YAML file or a shipped recipe (" in refused(
        capsys, "run", "--config", "gone.yaml")


@pytest.mark.parametrize(("content", "told"), [
    ('{"prompt": "hi"}\n{"prompt": \n', "mine.jsonl:2"),
    ('{"prompt": "hi"}\n{"prompt": " "}\n', "mine.jsonl:2"),
    ('{"question": "hi"}\n', "mine.jsonl:1"),
    ("", "mine.jsonl holds no prompt"),
    ('{"prompt": "' + "long " * 400 + '"}\n', "context"),
])
def test_bad_prompts_in_distillation(content: str, told: str, capsys: pytest.CaptureFixture[str],
                                     tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(content)
    sentence = refused(capsys, "distill", "--config", TINY, "--out", tmp_path / "run", "--prompts.source", "file",
                       "--prompts.path", tmp_path / "mine.jsonl")
    assert told in sentence, sentence


def test_a_place_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    sentence = refused(capsys, "distill", "--config", TINY, "--out", tmp_path / "file" / "run")
    assert str(tmp_path / "file") in sentence


@pytest.mark.parametrize(("code", "told"), [
    (errno.ENOSPC, "No space left on device: free some space or choose another --out"),
    (errno.EACCES, "Permission denied: change its permissions or choose another path"),
])
def test_a_full_disk_is_one_sentence(code: int, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(tmp_path / "shard"))

    monkeypatch.setattr(pipeline, "distill", fail)
    assert told in refused(capsys, "run", "--config", TINY, "--out", tmp_path / "run")


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(pipeline, "distill", fail)
    with pytest.raises(IndexError):
        main(["run", "--config", str(TINY), "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("name", ["evaluate", "generate", "export"])
def test_no_artifact(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = {"evaluate": ["--out", tmp_path], "generate": ["--prompt", "hi"],
            "export": ["--format", "medusa", "--out", tmp_path]}[name]
    assert "holds no artifact" in refused(capsys, name, "--artifact", tmp_path / "gone", *more)


def test_training_before_distilling(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "run draftsmith distill with this recipe first" in refused(
        capsys, "train", "--config", TINY, "--out", tmp_path / "run")


# Mistakes beside finished work ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny recipe, never changed: tests copy it. Shared with test_run.py where one process
    runs both: the second run skips all."""
    out = tmp_path_factory.getbasetemp() / "finished"
    assert main(["run", "--config", str(TINY), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_an_artifact_of_another_format_version(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copied / "artifact" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"format_version": 99}))
    assert "format version 99" in refused(capsys, "generate", "--artifact", copied / "artifact", "--prompt", "hi")


def test_an_unknown_export_format(finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "medusa" in refused(capsys, "export", "--artifact", finished / "artifact", "--format", "punchcards",
                               "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_prompt_longer_than_the_context(finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "context" in refused(capsys, "generate", "--artifact", finished / "artifact", "--prompt", "long " * 300)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "long " * 300}) + "\n")
    assert "context" in refused(capsys, "evaluate", "--artifact", finished / "artifact", "--prompts",
                                tmp_path / "mine.jsonl", "--out", tmp_path / "report")
    assert not list(tmp_path.glob("report/*"))


def test_a_malformed_line_in_evaluation(finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hi"}\nnot json\n')
    assert "mine.jsonl:2" in refused(capsys, "evaluate", "--artifact", finished / "artifact", "--prompts",
                                     tmp_path / "mine.jsonl", "--out", tmp_path / "report")


@pytest.mark.parametrize(("words", "told"), [
    (["--batch-sizes", "0"], "batch_size must be at least 1, got 0"),
    (["--batch-sizes", "[1,many]"], "batch_sizes"),
    (["--temperatures", "[0,-1]"], "a temperature must be at least 0 and finite, got -1"),
    (["--baselines", "[lookup]"], "there is no baseline 'lookup'; choose from prompt_lookup"),
    (["--batch-sizes", "2"], "batches of 2 rows cannot be timed on the same prompts: the set 'mine' has 1"),
    (["--prompts", "EMPTY"], "holds no prompt; write one JSON object a line"),
    (["--artifact", "[SAME,SAME]"], "2 methods are called"),
    (["--artifact", "[]"], "evaluate needs an artifact, or a target and baselines; give --artifact DIR"),
    (["--artifact", "[SAME,OTHER]"], "this was made for the target tiny-random with weights_hash"),
])
def test_a_wrong_evaluation(finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str],
                            told: str) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    other = shutil.copytree(finished / "artifact", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["target"]["weights_hash"] = "0" * 32
    (other / "config.json").write_text(json.dumps(config))
    places = {"SAME": str(finished / "artifact"), "OTHER": str(other), "EMPTY": str(tmp_path / "empty.jsonl")}
    given = ["--artifact", str(finished / "artifact"), "--prompts", str(tmp_path / "mine.jsonl"), *words]
    for name, place in places.items():
        given = [word.replace(name, place) for word in given]
    assert told in refused(capsys, "evaluate", "--out", tmp_path / "report", *given)
    assert not list(tmp_path.glob("report/*"))


def test_a_corrupted_shard_is_named_and_finished_work_kept(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = copied / "data" / "train-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    shutil.rmtree(copied / "train")
    for file in copied.glob("data/features*"):
        file.unlink()
    before = {file.name for file in (copied / "data").iterdir()}
    assert shard.name in refused(capsys, "train", "--config", TINY, "--out", copied)
    assert {file.name for file in (copied / "data").iterdir()} >= before


def test_other_settings_do_not_mix_with_finished_work(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--out" in refused(capsys, "run", "--config", TINY, "--out", copied, "--distill.max_new_tokens", "13")
    sentence = refused(capsys, "run", "--config", TINY, "--out", copied, "--model.config.lr", "0.25")
    assert "lr" in sentence
    assert "0.25" in sentence
