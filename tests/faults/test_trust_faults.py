"""Classes, tags and folders by which a file would make a command run code, and where processes import from."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.store.token_store import _json, hash_bytes
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import compare_families
from support.faults import Fault, Place, check, edited, ids

MARK = "import pathlib; pathlib.Path({!r}).write_text('ran')\n"
FLAG = r"is a class outside the package, .* add --trust to the command line"


def hostile(place: Place) -> None:
    """A module in the working folder that leaves a file when it is imported."""
    place.write("hostile.py", MARK.format(str(place.folder / "ran")))


def recipe(text: str) -> Callable[[Place], object]:
    """A preparation that writes the module and a recipe that would run it."""
    return lambda place: (hostile(place), place.write("r.yaml", text))


def artifact(**changes: Any) -> Callable[[Place], object]:
    """A preparation that writes the module and changes config.json of the artifact."""
    return lambda place: (hostile(place), edited(lambda content: content.update(changes))(place))


def foreign_shard(place: Place) -> None:
    """A manifest that names a shard in another folder."""
    file = place.run / "data" / "manifest.json"
    content = json.loads(file.read_text())
    del content["sha256"]
    content["shards"][0]["file"] = "x/../../../elsewhere.safetensors"
    file.write_text(json.dumps({**content, "sha256": hash_bytes(_json(content))}))


NAMED = "extends: tiny\nout: out\n"
FAULTS = [
    Fault("a plan of a dotted class", "plan --config r.yaml", rf"family hostile\.Module {FLAG}",
          recipe(f"{NAMED}family: hostile.Module\n")),
    Fault("a run of a dotted class", "run --config r.yaml", rf"family hostile\.Module {FLAG}",
          recipe(f"{NAMED}family: hostile.Module\n")),
    Fault("help for a dotted class", "train --config r.yaml --help", rf"family hostile\.Module {FLAG}",
          recipe(f"{NAMED}family: hostile.Module\n")),
    Fault("a function of the system", "plan --config {tiny} --family os.system", rf"family os\.system {FLAG}"),
    Fault("a class of the package by its path",
          "plan --config {tiny} --family draftsmith.trainers.medusa2.Medusa2Module",
          rf"family draftsmith\.trainers\.medusa2\.Medusa2Module {FLAG}"),
    Fault("a dotted path of no names", "plan --config {tiny} --family ..os.system --trust",
          r"unknown family '\.\.os\.system': choose one of"),
    Fault("a trusted function", "plan --config {tiny} --family os.system --trust",
          r"family os\.system is not a subclass of .*DraftModule; choose"),
    Fault("trust in a recipe", "plan --config r.yaml", rf"family hostile\.Module {FLAG}",
          recipe(f"{NAMED}trust: true\nfamily: hostile.Module\n")),
    Fault("trust in a recipe of the package's own family", "plan --config r.yaml",
          r"trust lets code of others run.*remove it from the recipe.* add --trust true",
          recipe(f"{NAMED}trust: true\n")),
    Fault("trust that is taken back", "plan --config r.yaml --trust false", rf"family hostile\.Module {FLAG}",
          recipe(f"{NAMED}family: hostile.Module\n")),
    Fault("a dotted class in a row", "families --config f.yaml", rf"family hostile\.Module {FLAG}",
          lambda place: (recipe(f"{NAMED}family: hostile.Module\n")(place), place.write(
              "f.yaml", "out: out\nrows: [./r.yaml]\ntarget: {name: tiny-random}\n"))),
    Fault("trust in a list of rows", "families --config f.yaml", r"trust lets code of others run.*remove",
          lambda place: place.write("f.yaml", "out: out\ntrust: true\nrows: [medusa]\n")),
    Fault("a class path in a section", "plan --config r.yaml", r"unknown key prompts\.class_path: did you mean",
          recipe(f"{NAMED}prompts:\n  class_path: hostile.Module\n")),
    Fault("a class path in a free section", "evaluate --out e --artifact {artifact} --config r.yaml",
          r"unknown key template\.class_path.*",
          recipe("tree: {class_path: hostile.Module}\ntemplate: {class_path: hostile.Module}\n")),
    Fault("a class path in a mapping", "plan --config r.yaml", r"distill\.answered_by must be one of target, text",
          recipe(f"{NAMED}distill:\n  answered_by: {{class_path: hostile.Module}}\n")),
    Fault("a tag that calls", "plan --config r.yaml", r"constructor for the tag .*os\.system.*correct it",
          recipe(f"{NAMED}family: !!python/object/apply:os.system ['echo']\n")),
    Fault("a tag that names a module", "plan --config r.yaml", r"constructor for the tag .*hostile.*correct it",
          recipe(f"{NAMED}family: !!python/module:hostile\n")),
    Fault("an artifact of a foreign class", "generate --prompt hi --artifact {artifact}",
          r"'own' is not one of .* its class hostile\.Drafter, .* add --trust to the command line",
          artifact(**{"family": "own", "class": "hostile.Drafter"})),
    Fault("an export of a foreign class", "export --format medusa --out e --artifact {artifact}",
          r"its class hostile\.Drafter, .* add --trust", artifact(**{"family": "own", "class": "hostile.Drafter"})),
    Fault("an evaluation of a foreign class", "evaluate --out e --artifact {artifact}",
          r"its class hostile\.Drafter, .* add --trust", artifact(**{"family": "own", "class": "hostile.Drafter"})),
    Fault("a shard in another folder", "train --config {tiny} --out {run}",
          r"file must be the name of a file in the folder, .*delete the folder",
          foreign_shard),
]


@pytest.mark.parametrize("fault", FAULTS, ids=ids(FAULTS))
def test_no_file_makes_a_command_run_code(fault: Fault, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the user worked on that code: only trust stands between the name and its import.
    monkeypatch.syspath_prepend(str(place.folder))
    check(fault, place)
    assert not (place.folder / "ran").exists()
    assert "hostile" not in sys.modules


def test_a_trusted_class_is_imported_and_its_run_holds_no_trust(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write("friendly.py", "from draftsmith.modules import Medusa\nfrom draftsmith.trainers import DraftModule\n\n"
                "\nclass Own(DraftModule):\n    drafter_class = Medusa\n")
    monkeypatch.syspath_prepend(str(place.folder))
    assert main(["plan", "--config", "tiny", "--family", "friendly.Own", "--trust"]) == 0
    assert "trained parameters" in place.capfd.readouterr().out
    parsed = compare_families.PIPELINE["run"].parse(["--config", "tiny", "--trust", "--target.trust_remote_code=true"])
    assert parsed.values.trust
    assert parsed.values.target.trust_remote_code
    assert "trust" not in json.dumps(parsed.settings)


def test_no_process_imports_from_the_working_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    for name in ("json", "yaml", "torch", "lightning", "draftsmith", "importlib", "difflib", "pydantic"):
        place.write(f"{name}.py", MARK.format(str(place.folder / "ran")))
    monkeypatch.setattr(compare_families, "call", lambda words: started.append(words) or 0)
    compare_families.run_row("row", place.folder / "r.yaml", ["--trust=false"])
    monkeypatch.undo()
    row = [*started[0][: started[0].index("run")], "--help"]
    script = [str(Path(sys.executable).with_name("draftsmith")), "--help"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    for words in (row, script):
        answer = subprocess.run(words, cwd=place.folder, capture_output=True, text=True, check=False, env=bare)
        assert "usage: draftsmith" in answer.stdout, answer.stderr
    assert not (place.folder / "ran").exists()
    # The test can fail: without -P the folder comes first.
    subprocess.run([word for word in row if word != "-P"], cwd=place.folder, capture_output=True, check=False, env=bare)
    assert (place.folder / "ran").exists()


def test_processes_of_libraries_do_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert main(["plan", "--config", "tiny"]) == 0
    assert os.environ["PYTHONSAFEPATH"] == "1"
