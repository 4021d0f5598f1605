"""The command line: quick help, recipes and overrides, and one clear sentence for whatever a user gets wrong; nothing
that is printed moves the cursor, and no value drowns its sentence."""

import errno
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from draftsmith import modules
from draftsmith.modules import BASELINES, FASTEST, PARTNERS, POLICIES
from draftsmith.recipes.__main__ import COMMANDS, complain, main, one_line
from draftsmith.recipes.commands import (
    acceptance_head,
    answer_commands,
    artifact_commands,
    choose,
    compare_families,
    doctor,
    exchange,
    layers,
    memory_plan,
    pipeline,
    trim,
)
from draftsmith.recipes.reading.command_line import SECTIONS, TRUST, Command, CommandLine
from draftsmith.recipes.reading.keys import EXAMPLES, USES
from draftsmith.recipes.reading.recipe_files import flat, read_recipe
from draftsmith.recipes.recipe import Recipe
from draftsmith.recipes.stages import answer_workers
from draftsmith.recipes.terminal import one_sentence, printable, say
from draftsmith.trainers.families import family_configs, family_names
from support.tiers import some_long

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "recipes").rglob("*.yaml"))
FAMILIES = next(path for path in SHIPPED if path.stem == "families")
RECIPES = [path for path in SHIPPED if "family" in read_recipe(str(path))]
FILES = {"pipeline": pipeline, "compare_families": compare_families, "memory_plan": memory_plan,
         "artifact_commands": artifact_commands, "answer_commands": answer_commands,
         "acceptance_head": acceptance_head, "choose": choose, "doctor": doctor,
         "exchange": exchange, "layers": layers, "trim": trim}
EVERY: dict[str, Command[Any]] = {name: command for file in FILES.values() for name, command in file.COMMANDS.items()}


def parse(name: str, *words: str) -> dict[str, Any]:
    """The settings that a command makes of its words, by dotted key."""
    return dict(flat(EVERY[name].parse(words).settings))


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence that a command refuses its words with."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    message = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "\n".join(message)
    assert message[-1].startswith("draftsmith: error: ")
    return message[-1]


# Help ----------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    program = ("import sys; from draftsmith.recipes.__main__ import main; main(['--help']);"
               "assert not {'torch', 'transformers', 'lightning', 'numpy'} & set(sys.modules)")
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert all(f"  {name}" in answer.stdout for name in COMMANDS)


@pytest.mark.parametrize(("words", "code"), [
    *(([name, asked], 0) for name in COMMANDS for asked in ("--help", "--help=all")),
    (["run", "--family", "eagle3", "--help.drafter"], 0), (["train", "--config", "quickstart", "--train.lrr", "1"], 2),
    (["generate", "--artifcat", "a"], 2), (["evaluate", "--batch_sizse=1"], 2), (["run"], 2),
])
def test_help_and_misspelt_keys_need_neither_torch_nor_the_files_of_a_command(words: list[str], code: int) -> None:
    program = ("import sys; from draftsmith.recipes.__main__ import main\n"
               "try: code = main(sys.argv[1:])\n"
               "except SystemExit as end: code = end.code\n"
               "print(); print(code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))")
    answer = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == f"{code} []"


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_a_reader_that_has_gone_and_a_full_disk_are_no_traceback(words: list[str]) -> None:
    command = [sys.executable, "-m", "draftsmith.recipes", *words]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in ended.stderr
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_every_name_of_the_modules_room_is_there() -> None:
    assert all(hasattr(modules, name) for name in modules.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        modules.Nothing  # noqa: B018


def test_the_table_of_commands_is_that_of_the_files() -> None:
    assert {name: file for name, (file, _) in COMMANDS.items()} == {
        name: title for title, file in FILES.items() for name in file.COMMANDS}


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The help that a command prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.parametrize("asked", ["--help", "-h", "--help=all"])
def test_every_command_explains_itself_in_plain_words(
    name: str, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = helped(capsys, name, asked)
    assert shown.startswith(f"usage: draftsmith {name} [--config FILE]")
    assert re.findall(r"\bNone\b|Union|Optional|<class|typing|Path_fr|Literal|type: |NoneType", shown) == []
    assert max(map(len, shown.splitlines())) <= 120
    keys = [key for key in CommandLine(name, []).keys if asked == "--help=all" or "." not in key]
    missing = [key for key in keys if not re.search(rf"^  --{re.escape(key)} ", shown, re.MULTILINE)]
    assert missing == ([] if asked == "--help=all" or not EVERY[name].trains else
                       [key for key in keys if key not in EXAMPLES])
    for section in {key.partition(".")[0] for key in CommandLine(name, []).keys if "." in key}:
        assert f"\n  --{section}." in helped(capsys, name, f"--help.{section}")


@pytest.mark.parametrize("key", EXAMPLES)
def test_the_keys_that_most_runs_set_come_first_with_an_example(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped(capsys, "run", "--help")
    assert f"\n  --{key} {EXAMPLES[key]}\n        " in shown
    assert len(shown.splitlines()) < 100
    # The origin and the path of prompts are given together.
    both = [f"--{name}={EXAMPLES[name]}" for name in ("prompts.origin", "prompts.path") if key.startswith("prompts.")]
    assert parse("run", "--config", "tiny", *both, f"--{key}={EXAMPLES[key]}")[key] not in (None, "")


@pytest.mark.parametrize("name", USES)
def test_commands_with_a_part_of_a_recipe_list_what_they_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown, (call, uses) = helped(capsys, name, "--help"), USES[name]
    assert f"\nExample: draftsmith {name} {call}\n" in shown
    assert EVERY[name].parse(shlex.split(call)).values.family
    listed = {key.partition(".")[0] for key in re.findall(r"^  --([\w.]+) ", shown, re.MULTILINE)} - {"config"}
    assert listed <= set(uses)
    home = EVERY[name].home
    assert not [key for key in CommandLine(name, []).keys
                if home is not None and key.startswith(f"{home}.") and f"\n  --{key} " not in shown]


def test_help_of_an_evaluation_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(helped(capsys, "evaluate", "--help").split()).partition("--evaluate.policies")[2]
    said = set(re.findall(r"[\w-]+", text.partition("--evaluate.baselines")[0]))
    assert {FASTEST, *POLICIES, *PARTNERS} <= said


def test_help_of_a_section_that_is_not_there_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no help on 'trian'; choose --help, --help=all or --help.SECTION with one of target, " in refused(
        capsys, "run", "--help.trian")


@pytest.mark.parametrize("gpu", [False, True])
def test_versions_are_those_that_a_report_of_a_bug_needs(gpu: bool, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"H100 number {number}")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": gpu})
    assert main(["--version"]) == 0
    shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    devices = [f"H100 number {number}, CUDA {torch.version.cuda}, driver" for number in range(2)] if gpu else ["none"]
    assert [name for name, _ in shown] == ["draftsmith", "torch", "transformers", "lightning", "python",
                                           *["device"] * len(devices), "processor"]
    assert all(said.startswith(device) for (_, said), device in zip(shown[5:], devices, strict=False))
    assert shown[1][1] == torch.__version__
    assert shown[-1][1].endswith(f", {os.cpu_count()} cores, avx2{' amx_bf16' * gpu}")


# Recipes and overrides -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", some_long(RECIPES, 3), ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["run", "distill", "train"])
def test_every_shipped_recipe_parses(path: Path, name: str) -> None:
    given = EVERY[name].parse(["--config", str(path)]).values
    assert isinstance(given.train, family_configs(given.family).train)


def test_the_rows_of_the_comparison_are_shipped_recipes_and_baselines() -> None:
    given = EVERY["families"].parse(["--config", str(FAMILIES)]).values
    assert set(given.rows) <= {path.stem for path in RECIPES} | set(BASELINES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_commands_that_use_an_artifact_take_the_same_recipe(path: Path) -> None:
    given = parse("evaluate", "--config", str(path), "--artifact", "a", "--out", "b")
    assert given["out"] == "b"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_section_of_a_shipped_recipe_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#")
    for above, line in pairwise(lines):
        if re.fullmatch(r"\w+:", line):
            assert above.startswith("# "), line


def test_the_recipe_for_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sentence = refused(capsys, "run", "--config", "quickstart_gpu", "--out", tmp_path / "run")
    assert "device 'cuda' was asked for, but no CUDA device is available; use cpu or auto" in sentence
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_sections_are_the_fields_of_a_recipe() -> None:
    assert sorted([*SECTIONS, TRUST]) == sorted(["drafter", *(field.name for field in fields(Recipe))])


@pytest.mark.parametrize(("name", "words", "key", "value"), [
    ("run", ["--distill.seed", "7"], "distill.seed", 7),
    ("run", ["--distill.max-new-tokens=9"], "distill.max_new_tokens", 9),
    ("run", ["--drafter.num_heads", "2"], "drafter.num_heads", 2),
    ("distill", ["--budget-tokens", "500"], "distill.budget_tokens", 500),
    ("train", ["--max_steps", "5"], "train.max_steps", 5),
    ("evaluate", ["--batch-sizes", "[1,4,8]", "--artifact", "a"], "evaluate.batch_sizes", [1, 4, 8]),
    ("evaluate", ["--batch-sizes", "8", "--artifact", "a"], "evaluate.batch_sizes", 8),
    ("evaluate", ["--temperatures", "[0,1]", "--artifact", "a"], "evaluate.temperatures", [0.0, 1.0]),
    ("evaluate", ["--temperatures=0.7", "--artifact", "a"], "evaluate.temperatures", 0.7),
    ("evaluate", ["--prompts", "mine.jsonl", "--artifact", "a"], "evaluate.prompts", "mine.jsonl"),
    ("evaluate", ["--prompts", "[mt_bench,gsm8k]", "--artifact", "a"], "evaluate.prompts", ["mt_bench", "gsm8k"]),
    ("evaluate", ["--distill.top_k", "3", "--artifact", "a"], "evaluate.top_k", 0),
    ("run", ["--train.lr=1e-3"], "train.lr", 0.001),
    # Text is taken as it stands, and null is none where there may be none.
    *(("run", ["--template.system", text], "template.system", text) for text in ('"a"', "12", "a: b", "[a", "-x")),
    ("run", ["--template.system", "a", "--template.system", "null"], "template.system", None),
    ("run", ["--distill.answered_by.target=.75", "--distill.answered_by.text=.25"], "distill.answered_by.text", .25),
    ("train", ["--family", "eagle3", "--train.positions", "{offset: 3}"], "train.positions.offset", 3),
])
def test_keys_override_the_recipe(name: str, words: list[str], key: str, value: object) -> None:
    assert parse(name, "--config", "tiny", *words)[key] == value


def test_the_printed_configuration_is_a_recipe_of_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", "tiny", "--family", "eagle3", "--distill.temperatures", "[0,0.7]", "--train.clip=1e-9"]
    (tmp_path / "mine.yaml").write_text(helped(capsys, "run", *words, "--print_config"))
    assert parse("run", "--config", str(tmp_path / "mine.yaml")) == parse("run", *words)


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "message"), [
    ([], "COMMAND"),
    (["frobnicate"], "unknown command 'frobnicate': choose one of run"),
])
def test_unknown_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), some_long([
    (["--distill.sed", "1"], "distill.sed"),
    (["--frobnicate", "1"], "frobnicate"),
    (["--target.nam", "tiny-random"], "target.nam"),
    (["--distill.seed", "many"], "distill.seed.*many"),
    (["--target.dtype", "int8"], "target.dtype.*int8"),
    (["--trust", "--family", "draftsmith.trainers.Nothing"], "trainers.Nothing is not a subclass of .*DraftModule"),
    (["--trust", "--family", "pathlib.Path"], "pathlib.Path is not a subclass of .*DraftModule; choose"),
    (["--trust", "--family", "no.such.Module"], "family no.such.Module cannot be imported"),
    (["--family", "medsua"], "unknown family 'medsua': did you mean medusa"),
    (["--train.lr", "fast"], "train.lr must be a number above 0 and at most 100, got 'fast'$"),
    (["--train.lrr", "1"], "unknown key train.lrr: did you mean train.lr"),
    (["--lr", "1"], "unknown key lr: did you mean train.lr"),
    (["--train.objective", "hart"], "train.objective must be one of hard, argmax, .*, got 'hart'$"),
    (["--train.max_steps", "null"], "max_steps and max_minutes are both null, .*; set one of them"),
    (["--drafter.num_layers", "many"], "drafter.num_layers must be a whole number from 1 to 256, got 'many'$"),
    (["--tree.used_nodes", "99"], "tree.used_nodes must lie between 1 and tree.searched_nodes 16, got 99"),
    (["--prompts.origin", "file"], "prompts.origin is file and prompts.path is null; give the path of a file"),
    (["--prompts.path", "mine.jsonl"], "prompts.origin is own and prompts.path is 'mine.jsonl'; give"),
    (["--target.name", "no/such-model"], "no/such-model"),
    (["--target.name", "gone.gguf"], "gone.gguf.*does not exist"),
    (["--target.chat_template", "gone.jinja"], "gone.jinja"),
], 3))
def test_a_wrong_recipe(words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = refused(capsys, "run", "--config", "tiny", "--out", tmp_path / "run", *words)
    assert re.search(message, sentence), sentence
    assert not [file for file in (tmp_path / "run").rglob("*") if file.suffix in (".safetensors", ".partial")]


@pytest.mark.parametrize("family", family_names())
@pytest.mark.parametrize("words", [["run"], ["train"]])
def test_help_lists_the_keys_of_a_family(family: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped(capsys, *words, "--family", family, "--help=all")
    configs = family_configs(family)
    for name in (*(f"drafter.{field.name}" for field in fields(configs.drafter)),
                 *(f"train.{field.name}" for field in fields(configs.train) if field.name != "drafter")):
        assert f"--{name}" in shown, name
    assert "--train.drafter" not in shown


def test_help_without_a_family_says_how_to_see_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert "draftsmith run --family NAME --help.drafter and --help.train list the keys of a family too: medusa, hydra" \
        in " ".join(helped(capsys, "run", "--help").split())
    assert "--drafter.norm_before_fc" in helped(capsys, "run", "--config", "eagle3", "--help.drafter")


@pytest.mark.parametrize(("text", "message"), [
    ("frobnicate: 1\n", "run needs a family; set family in the recipe"),
    ("family: medusa\nfrobnicate: 1\n", "unknown key frobnicate: choose one that run has: batch, data"),
    ("family: eagle3\ntrain:\n  positions: 3\n", "train.positions is a section with the keys offset, got 3"),
    ("family: medusa\ntrain:\n  lr: null\n", "train.lr must be a number above 0 .*, got null"),
    ("family: medusa\ntrain:\n  lr: [1]\n", r"train.lr must be a number above 0 .*, got \[1\]"),
    ("family: medusa\ndrafter:\n  num_head: 3\n", "unknown key drafter.num_head: did you mean drafter.num_heads"),
])
def test_a_malformed_recipe_file(text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    sentence = refused(capsys, "run", "--config", tmp_path / "mine.yaml", "--out", tmp_path / "out")
    assert re.search(message, sentence), sentence


@pytest.mark.parametrize(("error", "message"), [
    (errno.ENOSPC, "No space left on device: free some space or choose another --out"),
    (errno.EACCES, "Permission denied: change its permissions or choose another path"),
    (IndexError("a bug"), None),
])
def test_a_full_disk_is_one_sentence_and_our_own_mistakes_keep_their_traceback(
    error: Any, message: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = OSError(error, os.strerror(error), str(tmp_path / "shard")) if message else error
    monkeypatch.setattr(answer_workers, "distill", Mock(side_effect=raised))
    words = ("run", "--config", "tiny", "--out", str(tmp_path / "run"))
    if message is not None:
        assert message in refused(capsys, *words)
        return
    with pytest.raises(IndexError):
        main([*words])


# Mistakes and finished work ----------------------------------------------------------------------------------------


def test_a_format_that_cannot_hold_the_artifact_is_refused_before_the_target_is_read(
    tiny_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_commands, "load_target", lambda _: pytest.fail("the target is read"))
    words = ("export", "--artifact", tiny_run / "artifact", "--out", tmp_path / "x", "--format")
    assert "the format eagle holds EAGLE drafters, this artifact is medusa; choose --format medusa" in refused(
        capsys, *words, "eagle")
    assert "choose --format medusa" in refused(capsys, *words, "merged")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["--target_gguf", "x.gguf"], "target_gguf x.gguf is for the format gguf alone"),
    (["--convert_with", "python"], "convert_with python is for the format openvino alone"),
    (["--weights", "int8"], "the format medusa holds its weights as they were trained, got weights 'int8'"),
    (["--measure", "true"], "measure compares weights of fewer bits, which the format medusa does not hold"),
])
def test_options_of_another_format(
    tiny_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    refusal = refused(capsys, "export", "--artifact", tiny_run / "artifact", "--format", "medusa", "--out",
                      tmp_path / "x", *words)
    assert said in refusal
    assert not (tmp_path / "x").exists()


def test_a_prompt_longer_than_the_context(tiny_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "context" in refused(capsys, "generate", "--artifact", tiny_run / "artifact", "--prompt", "long " * 300)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "long " * 300}) + "\n")
    assert "context" in refused(capsys, "evaluate", "--artifact", tiny_run / "artifact", "--prompts",
                                tmp_path / "mine.jsonl", "--out", tmp_path / "report")
    assert not list(tmp_path.glob("report/*"))
    (tmp_path / "mine.jsonl").write_text((json.dumps({"prompt": "long " * 400}) + "\n") * 30)
    assert "context" in refused(capsys, "distill", "--config", "tiny", "--out", tmp_path / "run", "--prompts.origin",
                                "file", "--prompts.path", tmp_path / "mine.jsonl")


@pytest.mark.parametrize(("words", "message"), [
    (["--batch-sizes", "[1,many]"], "batch_sizes"),
    (["--batch-sizes", "2"], "batches of 2 rows cannot be timed on the same prompts: the set 'mine' has 1"),
    (["--artifact", "[SAME,SAME]"], "more than once; name each artifact once"),
    (["--artifact", "[SAME,OTHER]"], "this was made for the target tiny-random with weights_hash"),
])
def test_a_wrong_evaluation(tiny_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str],
                            message: str) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hi"}\n')
    other = shutil.copytree(tiny_run / "artifact", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["target"]["weights_hash"] = "0" * 32
    (other / "config.json").write_text(json.dumps(config))
    words = [word.replace("SAME", str(tiny_run / "artifact")).replace("OTHER", str(other)) for word in words]
    assert message in refused(capsys, "evaluate", "--out", tmp_path / "report", "--artifact", tiny_run / "artifact",
                              "--prompts", tmp_path / "mine.jsonl", *words)
    assert not list(tmp_path.glob("report/*"))


def test_a_corrupted_shard_is_named_and_finished_work_kept(
    copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = min((copied_run / "data").glob("train-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    shutil.rmtree(copied_run / "train")
    for file in copied_run.glob("data/features*"):
        file.unlink()
    before = {file.name for file in (copied_run / "data").iterdir()}
    assert shard.name in refused(capsys, "train", "--config", "tiny", "--out", copied_run)
    assert {file.name for file in (copied_run / "data").iterdir()} >= before


def test_other_settings_do_not_mix_with_finished_work(copied_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--out" in refused(capsys, "run", "--config", "tiny", "--out", copied_run, "--distill.max_new_tokens", "13")
    sentence = refused(capsys, "run", "--config", "tiny", "--out", copied_run, "--train.lr", "0.25")
    assert "lr" in sentence
    assert "0.25" in sentence


@pytest.mark.parametrize(("variable", "given", "used"), [
    ("THP_MEM_ALLOC_ENABLE", None, "1"), ("THP_MEM_ALLOC_ENABLE", "0", "0"),
    ("GOMP_SPINCOUNT", None, "30000"), ("GOMP_SPINCOUNT", "7", "7")])
def test_commands_set_variables_that_the_user_has_not(
    variable: str, given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Huge pages, and threads that soon sleep while they wait."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv(variable, raising=False)
    if given is not None:
        monkeypatch.setenv(variable, given)
    assert main(["generate", "--no_such_key", "1"]) == 2
    assert os.environ[variable] == used


def test_threads_of_a_command_soon_sleep_while_they_wait(tmp_path: Path) -> None:
    """The variable is set before anything loads OpenMP, which says what it has read."""
    given = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-m", "draftsmith.recipes", "train", "--config", "tiny", "--out", tmp_path],
                          env={**given, "OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert re.search(r"GOMP_SPINCOUNT ?= ?'30000'", done.stderr)


ESCAPE = "\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize(("text", "shown"), [
    ("plain ↵ text ×", "plain ↵ text ×"),
    (ESCAPE, r"\x1b[2J\x1b]0;title\x07"),
    ("a\u202eb\u200bc\ud800\U000e0001", r"a\u202eb\u200bc\ud800\U000e0001"),
    ("a\nb\tc\rd", "a\nb\tc\\rd"),
])
def test_control_characters_are_written_as_their_codes(text: str, shown: str) -> None:
    assert printable(text, keep="\n\t") == shown


def test_a_sentence_is_one_line_and_shows_the_ends_of_a_long_word() -> None:
    shown = one_sentence(f"got\n{'9' * 5000}, {ESCAPE}")
    assert shown == f"got {'9' * 100}...(5,001 characters)...{'9' * 49}, " + r"\x1b[2J\x1b]0;title\x07"
    path = "/" + "x" * 198
    assert one_sentence(path) == path


@pytest.mark.parametrize(("given", "said"), [
    ({"TORCHELASTIC_RUN_ID": "run", "RANK": "1", "LOCAL_RANK": "0"}, ""),
    ({"TORCHELASTIC_RUN_ID": "run", "RANK": "0"}, "a line\n"),
    ({"LOCAL_RANK": "1"}, ""),
    ({}, "a line\n"),
])
def test_the_first_of_several_processes_speaks_for_all(
    given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    say("a line")
    say("an error", file=sys.stderr)
    assert capsys.readouterr() == (said, "an error\n")


def test_errors_and_warnings_and_progress_lines_show_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"a value {ESCAPE}")
    say(f"a line {ESCAPE}\n", file=sys.stderr)
    assert "\x1b" not in (shown := capsys.readouterr().err + one_line(f"a warning {ESCAPE}"))
    assert shown.count(r"\x1b[2J\x1b]0;title\x07") == 3


def test_the_name_of_a_target_is_shown_before_it_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["distill", "--config", "tiny", "--out", str(tmp_path / "out"), "--target.name", ESCAPE]) == 2
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err + shown.out


def test_an_answer_on_a_terminal_shows_its_escapes(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_commands, "readable", lambda _target, passes: [ESCAPE for _ in passes])
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["generate", "--artifact", str(tiny_run / "artifact"), "--prompt", "hi", "--max_new_tokens",
                     "4"]) == 0
        monkeypatch.undo()
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "␛[2J" in shown
    assert "\x1b" not in shown
