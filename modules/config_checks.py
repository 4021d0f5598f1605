"""Checks shared by the settings of all drafters, and their reading from an artifact."""

from dataclasses import fields
from typing import Any

from .errors import UserError

MOST_PARTS = 256
"""Most layers, heads or draft steps of a drafter: each is a module, or a pass, of its own."""
MOST_WIDTH = 2**26
"""Largest width or vocabulary."""
WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "target_hidden_size", "vocabulary_size")

def check_sizes(**sizes: object) -> None:
    """Refuse sizes other than whole numbers of at least 1 that some model may have; None is a size left open.

    Raises:
        UserError: naming the size, its value and the bound.
    """
    for name, value in sizes.items():
        most = MOST_WIDTH if name in WIDTHS else MOST_PARTS
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
        if value is not None and value > most:
            raise UserError(f"{name} must be at most {most:,}, got {value}; lower it")


def settings_of(description: dict[str, Any], config: type, subject: str, *more: str) -> dict[str, Any]:
    """A copy of a drafter's description, once its keys are those of its config.

    Args:
        description: of the drafter's `describe`.
        config: the dataclass of its settings.
        subject: start of the error's sentence, such as "a Medusa drafter is".
        more: keys besides the settings.

    Raises:
        UserError: if a key is missing or unknown.
    """
    if set(description) != (known := {*more, *(field.name for field in fields(config))}):
        raise UserError(f"{subject} described by {sorted(known)}, got {sorted(description)}; use the version of "
                        "draftsmith that wrote the artifact")
    return {**description}
