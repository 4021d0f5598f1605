"""What the settings of all drafters have in common: how they are checked, and how they are read back."""

from dataclasses import fields
from typing import Any

from .errors import UserError


def check_sizes(**sizes: object) -> None:
    """Refuse what is no whole number of at least 1; None stands for a size that is left open. Raises UserError."""
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")


def settings_of(description: dict[str, Any], config: type, told: str, *more: str) -> dict[str, Any]:
    """A copy of a drafter's description, once its keys are those of its config.

    Args:
        description: what the drafter's `describe` gave.
        config: the dataclass of its settings.
        told: what is described, for people.
        more: keys that stand beside the settings.

    Raises:
        UserError: if a key is missing or unknown.
    """
    if set(description) != (known := {*more, *(field.name for field in fields(config))}):
        raise UserError(f"{told} described by {sorted(known)}, got {sorted(description)}; use the version of "
                        "draftsmith that wrote the artifact")
    return {**description}
