"""Folders that an export must not replace."""

from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main
from support.faults import Fault, Place, check, ids

EXPORT = "export --artifact {artifact} --format medusa --out {here}/model"


def model_folder(place: Place) -> Path:
    """Somebody's model, whose files have the names that an export has too."""
    for name in ("config.json", "medusa_lm_head.safetensors", "README.md"):
        place.write(f"model/{name}", "years of work")
    return place.folder / "model"


def link(place: Place) -> None:
    """A link to an empty folder elsewhere."""
    (place.folder / "elsewhere").mkdir()
    (place.folder / "model").symlink_to("elsewhere")


def changed_export(place: Place) -> None:
    """An earlier export, whose README somebody has written on since."""
    out = place.folder / "model"
    assert main(["export", "--artifact", str(place.artifact), "--format", "medusa", "--out", str(out)]) == 0
    with (out / "README.md").open("a") as file:
        file.write("my own notes\n")


FAULTS = [
    Fault("a model folder with our file names", EXPORT,
          r"model holds other files \(README.md, config.json, medusa_lm_head.safetensors\) than an unchanged export",
          model_folder),
    Fault("an export that was changed since", EXPORT, r"holds other files \(README.md\) than an unchanged export",
          changed_export),
    Fault("a copy of the marker over other files", EXPORT, r"holds other files \(README.md, config.json, medusa_lm",
          lambda place: (changed_export(place), model_folder(place))),
    Fault("the artifact itself", "export --artifact {artifact} --format medusa --out {artifact}",
          r"artifact holds other files \(.*, \.\.\.\) than an unchanged export .*choose another folder"),
    Fault("a link to a folder", EXPORT, r"model is a link to elsewhere and would be replaced.*give the path of", link),
    Fault("a link to nothing", EXPORT, r"model is a link to gone and would be replaced",
          lambda place: (place.folder / "model").symlink_to("gone")),
    Fault("a file", EXPORT, r"model is a file, a folder was expected", lambda place: place.write("model", "text")),
]


@pytest.mark.parametrize("fault", FAULTS, ids=ids(FAULTS))
def test_an_export_replaces_nothing_but_its_own(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_an_earlier_export_is_replaced_with_what_a_killed_one_left(place: Place) -> None:
    out = place.folder / "model"
    words = ["export", "--artifact", str(place.artifact), "--format", "medusa", "--out", str(out)]
    assert main(words) == 0
    before = place.fingerprints()
    place.write("model/.README.md.partial", "half")
    place.write(".model.partial/config.json", "half")
    assert main(words) == 0
    assert place.fingerprints() == before
