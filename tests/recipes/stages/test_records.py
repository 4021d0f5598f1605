"""A finished stage is skipped only while everything that it read is as it was; else the run says what changed."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from draftsmith.modules.files import atomic_files
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS, stages
from draftsmith.recipes.stages.records import Stage, run_stages
from draftsmith.recipes.stages.workspace import Workspace

SETTINGS: dict[str, Any] = {"prompts": {"limit": 3, "own_kinds": ["a"]}, "family": "medusa"}


def finished(out: Path, reads: Sequence[Path], settings: dict[str, Any] = SETTINGS) -> list[str]:
    """Run a stage and one that builds on it; returns the names of those that were done."""
    done: list[str] = []

    def work(name: str) -> Callable[[], Sequence[Path]]:
        def write() -> Sequence[Path]:
            done.append(name)
            (out / name).write_text("written")
            return [out / name]

        return write

    each = [Stage(name="first", title="one", sections=("prompts",), work=work("first"), reads={"prompts": reads}),
            Stage(name="second", title="two", sections=("family",), work=work("second"))]
    run_stages(out, settings, each, ["first", "second"])
    return done


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def edited(path: Path) -> None:
    path.write_text("other prompts")


def touched_back(path: Path) -> None:
    """Other text of the same length, with the same time of writing."""
    times = path.stat()
    path.write_text(path.read_text().upper())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [edited, touched_back, Path.unlink])
def test_a_changed_file_is_noticed_and_named(change: Callable[[Path], None], out: Path, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("some prompts")
    assert finished(out, [file]) == ["first", "second"]
    assert finished(out, [file]) == []
    os.utime(file, (1, 1))
    assert finished(out, [file]) == [], "a copy of the same content"
    capsys.readouterr()
    change(file)
    # The second one finds what the first one wrote as it was.
    assert finished(out, [file]) == ["first"]
    assert "[1/2] one, again: the content of prompts changed since" in capsys.readouterr().out
    assert finished(out, [file]) == []


@pytest.mark.parametrize(("change", "again"), [
    (lambda folder: (folder / "data" / "b.parquet").write_text("rows!"), True),
    (lambda folder: (folder / "data" / "c.parquet").write_text("more"), True),
    (lambda folder: (folder / "data" / "b.parquet").rename(folder / "data" / "a.parquet"), True),
    (lambda folder: (folder / "data" / "cache-1f.arrow").write_text("of datasets itself"), False),
    (lambda folder: (folder / "data" / "cache-1f_00000_of_00002.arrow").write_text("of datasets itself"), False),
    (lambda folder: (folder / "data" / "cache-questions.jsonl").write_text("{}"), True),
    (lambda folder: (folder / ".lock").write_text(""), False),
    (lambda folder: (folder / ".cache" / "x.metadata").write_text("downloaded again"), False),
])
def test_a_changed_folder_is_noticed(change: Callable[[Path], object], again: bool, out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "b.parquet").write_text("rows.")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.metadata").write_text("downloaded")
    finished(out, [folder])
    change(folder)
    assert finished(out, [folder]) == (["first"] if again else [])


def test_large_files_count_by_size_and_time(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "LARGE", 4)
    file = tmp_path / "model.safetensors"
    file.write_text("weights")
    finished(out, [file])
    monkeypatch.setattr(atomic_files, "file_sha256", lambda _: pytest.fail("gigabytes were read"))
    monkeypatch.setattr("draftsmith.recipes.stages.records.file_sha256",
                        lambda path: __import__("hashlib").sha256(path.read_bytes()).hexdigest())
    assert finished(out, [file]) == []
    os.utime(file, (1, 1))
    assert finished(out, [file]) == ["first"]


def test_changed_settings_are_named(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(out, [])
    capsys.readouterr()
    other = {"prompts": {"limit": 4, "own_kinds": ["a", "b"]}, "family": "hydra"}
    assert finished(out, [], other) == ["first", "second"]
    printed = capsys.readouterr().out
    assert "[1/2] one, again: prompts.limit, prompts.own_kinds changed since" in printed
    assert "[2/2] two, again: family changed since" in printed


def test_each_stage_names_the_files_that_it_reads(tmp_path: Path) -> None:
    names = ("m", "tools.json", "t.jinja", "p.jsonl", "d")
    model, tools, template, prompts, draft = (tmp_path / name for name in names)
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "out").mkdir()
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    prompts.write_text('{"prompt": "hi"}\n')
    words = ["--target.name", str(model), "--target.chat_template", str(template), "--template.tools", str(tools),
             "--prompts.origin", "file", "--prompts.path", str(prompts), "--distill.answered_by", "draft",
             "--distill.draft", str(draft), "--distill.budget_tokens", "5"]
    parsed = COMMANDS["run"].parse(["--config", "tiny", "--out", str(tmp_path / "out"), *words])
    found = {stage.name: dict(stage.reads) for stage in stages(Workspace(parsed))}
    target = {"target.name": [model / "additional_chat_templates" / "tool_use.jinja", model / "config.json"],
              "target.chat_template": [template], "template.tools": [tools]}
    assert found["distill"] == {**target, "prompts": [prompts], "distill.draft": [draft / "config.json"]}
    assert found["encode"] == target
    assert [path.name for paths in found["evaluate"].values() for path in paths] == [
        "handwritten.jsonl", "acceptance_heads.safetensors"]


@pytest.mark.long
@pytest.mark.slow
def test_a_run_over_changed_prompts_is_refused_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, tools, out = tmp_path / "prompts.jsonl", tmp_path / "tools.json", tmp_path / "out"
    rows = [json.dumps({"prompt": f"Say {number}."}) for number in range(40)]
    prompts.write_text("\n".join(rows) + "\n")
    tools.write_text("[]")
    words = ["run", "--config", "tiny", "--out", str(out), "--prompts.origin", "file", "--prompts.path", str(prompts),
             "--template.tools", str(tools), "--prompts.own_kinds", "null"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 5
    kept = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for file, text, says in ((prompts, "\n".join([*rows, '{"prompt": "One more."}']) + "\n", "prompts.sha256 was"),
                             (tools, '[{"name": "f"}]', "the chat template or its settings was")):
        former = file.read_text()
        file.write_text(text)
        assert main(words) == 2
        printed = capsys.readouterr()
        name = "prompts" if file is prompts else "template.tools"
        assert f"[1/5] the target answers prompts, again: the content of {name} changed since" in printed.out
        assert f"was started with other settings: {says}" in printed.err
        file.write_text(former)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == kept
    assert main(words) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 5
