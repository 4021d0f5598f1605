"""Families by name: the module of each, and its settings with their bounds."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from draftsmith.modules import DRAFTERS, Medusa, MedusaConfig, UserError
from draftsmith.trainers import DraftModule, Medusa2TrainConfig, TrainConfig, draft_module
from draftsmith.trainers.acceptance_head import HeadFitConfig
from draftsmith.trainers.families import VARIANTS, family_configs, family_module, family_names
from draftsmith.trainers.train_config import PositionConfig


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


STEP_WEIGHTS = r"train\.step_weights must be (a number |above 0|at most 1)"


@pytest.mark.parametrize(("kind", "settings", "told"), [
    (TrainConfig, {"max_steps": 0}, "max_steps must be at least 1, got 0"),
    (TrainConfig, {"accumulate": 0}, "accumulate"), (TrainConfig, {"validate_every": 0}, "validate_every"),
    (TrainConfig, {"clip": -1.0}, "clip must be at least 0, got -1.0"),
    (TrainConfig, {"validation_nodes": 1}, "validation_nodes must be at least 2"),
    (TrainConfig, {"lr": 0.0}, "lr must be above 0"),
    (TrainConfig, {"objective": "firm"}, "objective must be one of hard, argmax, .* got 'firm'"),
    (TrainConfig, {"feature_weight": -1.0}, "feature_weight must be at least 0, got -1.0"),
    *((TrainConfig, {"step_weights": wrong}, STEP_WEIGHTS) for wrong in (0.0, 1.5, "pace")),
    (PositionConfig, {"offset": 0}, "offset must be at least 1, got 0"),
    (PositionConfig, {"offset": "most"}, "offset must be one of max or a whole number of at least 1 or null, got"),
    (Medusa2TrainConfig, {"heads_lr_factor": 0.0}, "heads_lr_factor must be above 0, got 0.0"),
    (Medusa2TrainConfig, {"schedule": "cosine"}, "schedule must be one of two_stage, sine, got 'cosine'"),
    (Medusa2TrainConfig, {"lr": 0.0}, "lr must be above 0"),
    (Medusa2TrainConfig, {"optimizer": "muon"},
     r"optimizer is 'muon', but the target's low-rank weights .*; set optimizer to"),
    (Medusa2TrainConfig, {"fall": "linear"}, r"fall is 'linear', but the rates of medusa2's stages .*; set fall to"),
    (HeadFitConfig, {"lr": 0.0}, "fit.lr must be above 0, got 0.0"),
    (HeadFitConfig, {"lr": float("inf")}, "fit.lr must be .*, got inf"),
    (HeadFitConfig, {"reject_weight": -1.0}, "fit.reject_weight must be above 0"),
])
def test_impossible_settings_are_refused(kind: type[Any], settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        kind(**settings)
