"""Families by name: the LightningModule of each, and the dataclasses of its settings."""

import difflib
import inspect
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, get_type_hints

from ..modules import DRAFTERS, Drafter, UserError
from .base import DraftModule
from .medusa2 import Medusa2Module
from .train_config import TrainConfig

VARIANTS: dict[str, type[DraftModule]] = {"medusa2": Medusa2Module}
"""Other ways to train a drafter of `DRAFTERS`, each with a module of its own."""


@dataclass(frozen=True, kw_only=True)
class FamilyConfigs:
    """The two dataclasses of a family's settings."""

    drafter: type[Any]  # Shape of the drafter
    train: type[TrainConfig]  # Training; its field `drafter` holds the shape


@cache
def draft_module(drafter: type[Drafter]) -> type[DraftModule]:
    """The LightningModule of a drafter that is trained as most are."""
    return type(f"{drafter.__name__}Module", (DraftModule,), {"drafter_class": drafter, "__doc__": drafter.__doc__})


def family_names() -> tuple[str, ...]:
    """Names of all families of the package."""
    return (*(drafter.family for drafter in DRAFTERS), *VARIANTS)


def family_module(name: str, *, trust: bool = False) -> type[DraftModule]:
    """The LightningModule of a family, by its name or by the dotted path of a DraftModule subclass outside the package;
    `trust` lets such a class be imported, which runs the code of its file. UserError if there is no such family or
    class, the class is no DraftModule, or it is not trusted."""
    if name in VARIANTS:
        return VARIANTS[name]
    if name in family_names():
        return draft_module(next(drafter for drafter in DRAFTERS if drafter.family == name))
    dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if dotted and not trust:
        raise UserError(f"family {name} is a class outside the package, whose file would be imported and run; if you "
                        "trust it, add --trust to the command line (trust=True in Python), else choose one of "
                        f"{', '.join(family_names())}")
    if dotted:
        place, _, last = name.rpartition(".")
        try:
            found = getattr(import_module(place), last, None)
        except (ImportError, ValueError) as error:
            raise UserError(f"family {name} cannot be imported ({error}); give the dotted path of a class, or one of "
                            f"{', '.join(family_names())}") from error
        # Checked before anything of it is called.
        if not (inspect.isclass(found) and issubclass(found, DraftModule)):
            raise UserError(f"family {name} is not a subclass of draftsmith.trainers.DraftModule; choose one of "
                            f"{', '.join(family_names())}, or give the dotted path of such a class")
        return found
    close = difflib.get_close_matches(name, family_names(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(family_names())}"
    raise UserError(f"unknown family {name!r}: {hint}")


def family_configs(name: str, *, trust: bool = False) -> FamilyConfigs:
    """The dataclasses of a family's settings. UserError as `family_module`, or if its module names neither a drafter
    nor a TrainConfig with one."""
    module = family_module(name, trust=trust)
    train = module.settings() if hasattr(module, "drafter_class") else None
    drafter = get_type_hints(train).get("drafter") if inspect.isclass(train) else None
    if not inspect.isclass(train) or not issubclass(train, TrainConfig) or not is_dataclass(drafter):
        raise UserError(f"family {name} must set `drafter_class` to its drafter, and may annotate `config` with a "
                        f"subclass of TrainConfig whose field `drafter` is a dataclass, got {train}")
    return FamilyConfigs(drafter=drafter if inspect.isclass(drafter) else type(drafter), train=train)
