"""Families by name: one file of the same name, one module in it, its settings by annotation."""

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest
from draftsmith.modules import DRAFTERS, MedusaConfig, UserError
from draftsmith.trainers import DraftModule, MedusaModule, TrainConfig
from draftsmith.trainers.families import VARIANTS, family_configs, family_module, family_names


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_its_module_in_the_file_of_its_name(name: str) -> None:
    module = family_module(name)
    assert issubclass(module, DraftModule)
    assert module.__module__ == f"draftsmith.trainers.{name}"
    configs = family_configs(name)
    assert issubclass(configs.train, TrainConfig)
    assert isinstance(configs.train().drafter, configs.drafter)  # type: ignore[attr-defined]


def test_the_names_are_those_of_the_drafters_and_their_variants() -> None:
    assert family_names() == (*(drafter.family for drafter in DRAFTERS), *VARIANTS)
    assert family_module("medusa") is MedusaModule


@dataclass(frozen=True, kw_only=True)
class OutsideConfig(TrainConfig):
    """Settings of a family outside the package."""

    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    """The heads."""


class OutsideModule(MedusaModule):
    """A family outside the package."""

    config: OutsideConfig  # type: ignore[assignment]


class UnsettledModule(DraftModule):
    """A family whose settings are those of no family."""


def test_a_family_outside_the_package_goes_by_its_dotted_class(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ModuleType("somewhere_outside")
    calls: list[object] = []
    for name, value in {"Outside": OutsideModule, "Unsettled": UnsettledModule, "called": calls.append}.items():
        setattr(outside, name, value)
    monkeypatch.setitem(sys.modules, "somewhere_outside", outside)
    assert family_module("somewhere_outside.Outside") is OutsideModule
    assert family_configs("somewhere_outside.Outside").train is OutsideConfig
    with pytest.raises(UserError, match=r"Unsettled must annotate `config` with a subclass of TrainConfig"):
        family_configs("somewhere_outside.Unsettled")
    with pytest.raises(UserError, match=r"somewhere_outside.called is not a subclass of .*DraftModule"):
        family_module("somewhere_outside.called")
    assert calls == [], "nothing is called before it is known to be a DraftModule"


@pytest.mark.parametrize(("name", "message"), [
    ("eagel3", "unknown family 'eagel3': did you mean eagle3?"),
    ("zzz", "unknown family 'zzz': choose one of medusa, hydra"),
    ("nowhere.Module", "family nowhere.Module cannot be imported"),
    ("os.system", "family os.system is not a subclass of draftsmith.trainers.DraftModule; choose one of medusa"),
    (".Module", "family .Module cannot be imported"),
])
def test_unknown_families(name: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        family_module(name)
    assert message in str(raised.value)
