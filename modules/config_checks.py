"""Checks shared by the settings of all drafters, and their reading from an artifact."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import UserError
from .files.json_records import typed

PARTS = frozenset({"num_layers", "num_heads", "num_kv_heads", "depths", "steps", "exit_layer", "block_size", "blocks",
                   "gamma"})
"""Sizes that count layers, heads or draft steps: each is a module, or a pass, of its own."""
MOST_PARTS, MOST_WIDTH = 256, 2**26
"""Largest number of these, and of any other size."""
MOST_ROWS, MOST_TOKENS, MOST_STEPS, MOST_PROCESSES, MOST_SEED = 2**16, 2**20, 2**40, 2**10, 2**32 - 1
"""Largest numbers of rows, of tokens in a row, of steps and of processes that a setting may ask for, and largest seed:
NumPy's generators take 32 bits."""


def check_sizes(**sizes: object) -> None:
    """Refuse sizes other than whole numbers of at least 1 that some model may have; None is a size left open.

    Raises:
        UserError: naming the size, its value and the bound.
    """
    for name, value in sizes.items():
        most = MOST_PARTS if name in PARTS else MOST_WIDTH
        # The exact type: True is an int for Python, and would be a size of 1.
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
        if value is not None and value > most:
            raise UserError(f"{name} must be at most {most:,}, got {value}; lower it")


@dataclass(frozen=True, kw_only=True)
class CheckedSettings:
    """Settings that refuse values which no drafter can have, by their types and names.

    Raises:
        UserError: naming the setting, its value and the bound.
    """

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, kind, value = setting.name, setting.type, getattr(self, setting.name)
            # Every whole number is a size, the id of a token excepted.
            if kind in (int, int | None) and not name.endswith("_id"):
                check_sizes(**{name: value})
            # A recipe's values were parsed by their types; an artifact's and a caller's were not.
            elif get_origin(kind) is Literal and value not in get_args(kind):
                *others, last = map(repr, get_args(kind))
                raise UserError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
            # Not "value < 0": that is False for NaN, which would pass.
            elif name == "noise" and not value >= 0:
                raise UserError(f"noise must not be negative, got {value!r}")
            elif name == "dropout" and not 0 <= value < 1:
                raise UserError(f"dropout must be at least 0 and below 1, got {value!r}")


def check_bounds(settings: object, prefix: str = "", **bounds: tuple[float, float]) -> None:
    """Refuse numbers below or above what any run may ask for; None is a number left open.

    Args:
        settings: whose attributes are checked.
        prefix: of their names in a recipe, such as "distill.".
        bounds: smallest and largest value of each.

    Raises:
        UserError: naming the setting, its value and the bound.
    """
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        # Not "value < least": that is False for NaN, which would pass.
        if value is not None and not value >= least:
            raise UserError(f"{prefix}{name} must be at least {least:,}, got {value}")
        if value is not None and value > most:
            raise UserError(f"{prefix}{name} must be at most {most:,}, got {value}; lower it")


def settings_of(description: dict[str, Any], config: type, subject: str, *more: str) -> dict[str, Any]:
    """A drafter's description with the settings of its config converted to their types, tuples among them.

    Args:
        description: of the drafter's `describe`.
        config: the dataclass of its settings.
        subject: start of the error's sentence, such as "a Medusa drafter is".
        more: keys besides the settings; their values stay as they are.

    Raises:
        UserError: if a key is missing or unknown.
        MistypedError: if a setting is of the wrong kind.
    """
    if set(description) != (known := {*more, *(field.name for field in fields(config))}):
        raise UserError(f"{subject} described by {sorted(known)}, got {sorted(description)}; use the version of "
                        "draftsmith that wrote the artifact")
    hints = get_type_hints(config)
    return {name: value if name in more else typed(value, hints[name], f"drafter.{name}")
            for name, value in description.items()}
