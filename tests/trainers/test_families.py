"""Families by name: the module of each, and its settings."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from draftsmith.modules import DRAFTERS, Medusa, MedusaConfig, UserError
from draftsmith.trainers import DraftModule, TrainConfig, draft_module
from draftsmith.trainers.families import VARIANTS, family_configs, family_module, family_names


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_its_module_and_its_settings(name: str) -> None:
    module = family_module(name)
    assert issubclass(module, DraftModule)
    configs = family_configs(name)
    assert issubclass(configs.train, TrainConfig)
    assert isinstance(configs.train().drafter, configs.drafter)  # type: ignore[attr-defined]


def test_the_names_are_those_of_the_drafters_and_their_variants() -> None:
    assert family_names() == (*(drafter.family for drafter in DRAFTERS), *VARIANTS)
    assert family_module("medusa") is draft_module(Medusa)


@dataclass(frozen=True, kw_only=True)
class OutsideConfig(TrainConfig):
    """Settings of a family outside the package."""

    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    """The heads."""


class OutsideModule(DraftModule):
    """A family outside the package."""

    drafter_class = Medusa
    config: OutsideConfig  # type: ignore[assignment]


class UnsettledModule(DraftModule):
    """A family whose settings are those of no family."""


def test_a_family_outside_the_package_goes_by_its_dotted_class(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ModuleType("somewhere_outside")
    calls: list[object] = []
    for name, value in {"Outside": OutsideModule, "Unsettled": UnsettledModule, "called": calls.append}.items():
        setattr(outside, name, value)
    monkeypatch.setitem(sys.modules, "somewhere_outside", outside)
    assert family_module("somewhere_outside.Outside", trust=True) is OutsideModule
    assert family_configs("somewhere_outside.Outside", trust=True).train is OutsideConfig
    with pytest.raises(UserError, match=r"Unsettled must set `drafter_class` .* subclass of TrainConfig"):
        family_configs("somewhere_outside.Unsettled", trust=True)
    with pytest.raises(UserError, match=r"somewhere_outside.called is not a subclass of .*DraftModule"):
        family_module("somewhere_outside.called", trust=True)
    assert calls == [], "nothing is called before it is known to be a DraftModule"


@pytest.mark.parametrize(("name", "message"), [
    ("eagel3", "unknown family 'eagel3': did you mean eagle3?"),
    ("zzz", "unknown family 'zzz': choose one of medusa, hydra"),
    ("nowhere.Module", "family nowhere.Module cannot be imported"),
    ("pathlib.Path", "family pathlib.Path is not a subclass of draftsmith.trainers.DraftModule; choose one of medusa"),
    (".Module", "unknown family '.Module'"),
])
def test_unknown_families(name: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        family_module(name, trust=True)
    assert message in str(raised.value)


def test_a_class_outside_the_package_is_imported_only_when_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "outside_code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for find in (family_module, family_configs):
        with pytest.raises(UserError, match=r"outside_code.Module is a class outside .* add --trust .*trust=True"):
            find("outside_code.Module")  # type: ignore[operator]
    assert not ran.exists()
    with pytest.raises(UserError, match="is not a subclass"):
        family_module("outside_code.Module", trust=True)
    assert ran.exists()
