"""Wrong recipe files and wrong settings."""

import pytest
from support.faults import Fault, Place, check, ids

FAULTS = [
    Fault("a recipe that is not there", "run --config gone", r"there is no recipe 'gone'; give the path"),
    Fault("a recipe of a list", "run --config r.yaml", r"r\.yaml must hold the sections of a recipe .*got list",
          lambda place: place.write("r.yaml", "- out\n")),
    Fault("a recipe in Latin-1", "run --config r.yaml", r"r\.yaml is not a YAML file.*correct it",
          lambda place: place.write("r.yaml", "out: caf\xe9\n".encode("latin-1"))),
    Fault("a key given twice", "plan --config r.yaml", r"r\.yaml.*'out' is given twice",
          lambda place: place.write("r.yaml", "out: a\nout: b\n")),
    Fault("a temperature that is no number", "generate --artifact {artifact} --prompt hi --temperature hot",
          r"temperature.*hot"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=ids(FAULTS))
def test_a_wrong_recipe_is_refused_in_one_sentence(
    fault: Fault, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check(fault, place, monkeypatch, capfd)
