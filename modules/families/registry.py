"""The drafter families, each with a folder of its name."""

from importlib import import_module

from ..interfaces.drafter import Drafter

FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "block", "falcon", "kangaroo", "prompt_tokens", "hidden_transfer",
            "draft_lm", "mtp")
"""Their names; a new one is one more here."""


def _drafter(name: str) -> type[Drafter]:
    """The class of a family, which says so itself."""
    file = import_module(f".{name}.drafter", __package__)
    return next(one for one in vars(file).values() if isinstance(one, type) and issubclass(one, Drafter)
                and vars(one).get("family") == name)


DRAFTERS: tuple[type[Drafter], ...] = tuple(map(_drafter, FAMILIES))
"""Every drafter family; contract, losslessness, artifact and recipe tests run over this tuple."""
