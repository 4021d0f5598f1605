"""Families by name: the LightningModule of each, and the dataclasses of its settings.

The rule of the house: a family has one file of the same name in each room, so `trainers/<family>.py` holds its module.
"""

import difflib
import inspect
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any, TypeGuard, get_type_hints

from ..modules import DRAFTERS
from ..modules.errors import UserError
from .base import DraftModule
from .train_config import TrainConfig

VARIANTS = ("medusa2",)
"""Other ways to train a drafter of `DRAFTERS`, each with a module of its own."""


@dataclass(frozen=True, kw_only=True)
class FamilyConfigs:
    """The two dataclasses of a family's settings."""

    drafter: type[Any]
    """Shape of the drafter."""
    train: type[TrainConfig]
    """Training; its field `drafter` holds the shape."""


def family_names() -> tuple[str, ...]:
    """Names of all families of the package."""
    return (*(drafter.family for drafter in DRAFTERS), *VARIANTS)


def family_module(name: str, *, trust: bool = False) -> type[DraftModule]:
    """The LightningModule of a family.

    Args:
        name: a family's name, or the dotted path of a DraftModule subclass outside the package.
        trust: whether such a class may be imported, which runs the code of its file.

    Raises:
        UserError: if there is no such family or class, the class is no DraftModule, or it is not trusted.
    """
    if name in family_names():
        file = import_module(f".drafters.{name}", __package__)
        own = [value for public, value in vars(file).items() if _is_module(value)
               and value.__module__ == file.__name__ and not public.startswith("_")]
        if len(own) != 1:
            raise TypeError(f"{file.__name__} must define exactly one public DraftModule, got {len(own)}")
        return own[0]
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
        if not _is_module(found):
            raise UserError(f"family {name} is not a subclass of draftsmith.trainers.DraftModule; choose one of "
                            f"{', '.join(family_names())}, or give the dotted path of such a class")
        return found
    close = difflib.get_close_matches(name, family_names(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(family_names())}"
    raise UserError(f"unknown family {name!r}: {hint}")


def family_configs(name: str, *, trust: bool = False) -> FamilyConfigs:
    """The dataclasses of a family's settings, by the annotation `config` of its module.

    Args:
        name: as in `family_module`.
        trust: as there.

    Raises:
        UserError: as `family_module` does, or if the annotation is no TrainConfig with a field `drafter`.
    """
    train = get_type_hints(family_module(name, trust=trust)).get("config")
    drafter = get_type_hints(train).get("drafter") if inspect.isclass(train) else None
    if not inspect.isclass(train) or not issubclass(train, TrainConfig) or not is_dataclass(drafter):
        raise UserError(f"family {name} must annotate `config` with a subclass of TrainConfig whose field `drafter` "
                        f"is a dataclass, got {train}")
    return FamilyConfigs(drafter=drafter if inspect.isclass(drafter) else type(drafter), train=train)


def _is_module(value: object) -> TypeGuard[type[DraftModule]]:
    return inspect.isclass(value) and issubclass(value, DraftModule)
