"""The drafter families, each with a folder of its name."""

from importlib import import_module

from ..interfaces.drafter import Drafter

FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "p_eagle", "block", "falcon", "kangaroo", "prompt_tokens",
            "hidden_transfer", "draft_lm", "mtp")
"""Their names; a new one is one more here."""


# A class says itself that it is the family's.
DRAFTERS: tuple[type[Drafter], ...] = tuple(
    next(one for one in vars(import_module(f".{name}.drafter", __package__)).values()
         if isinstance(one, type) and issubclass(one, Drafter) and vars(one).get("family") == name)
    for name in FAMILIES)
"""Every drafter family; contract, losslessness, artifact and recipe tests run over this tuple."""
