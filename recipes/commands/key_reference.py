"""Reference of all recipe keys, `recipes/keys.md`, written from the dataclasses that hold them.

    python -m draftsmith.recipes.commands.key_reference
"""

from collections.abc import Iterator
from pathlib import Path

from ...modules.files.atomic_files import write_file
from ...trainers import TrainConfig
from ...trainers.families import family_configs, family_names
from ..reading.parsing import LINE_ONLY
from ..reading.recipe_keys import field_docstrings, keys_of, markdown_table
from ..recipe import Recipe
from .acceptance_head import SpecdecArguments

KEYS = Path(__file__).parents[1] / "keys.md"
HEADING = """# Keys of a recipe

Written by `python -m draftsmith.recipes.commands.key_reference`. How to use them: [the guide](README.md).
`draftsmith run --help` shows those that most runs set, each with an example."""


def reference() -> str:
    """All keys as Markdown: the common sections, training, then what each family adds."""
    return "\n\n".join([HEADING, *_sections(), *_training(), *_acceptance_heads()]) + "\n"


def _sections() -> Iterator[str]:
    """A table for the keys at the top and one for each section, `train` and `drafter` excepted."""
    known, meanings = keys_of(Recipe, skip=("train",)), field_docstrings(Recipe)
    keys = {name: key for name, key in known.items() if name not in LINE_ONLY}
    yield f"## Top level\n\n{markdown_table({name: key for name, key in keys.items() if '.' not in name})}"
    for section in dict.fromkeys(name.partition(".")[0] for name in keys if "." in name):
        inside = {name: key for name, key in keys.items() if name.startswith(f"{section}.")}
        yield f"## `{section}`\n\n{meanings[section]}\n\n{markdown_table(inside)}"


def _training() -> Iterator[str]:
    """The keys of `train` that all families share, then those of each family."""
    common = keys_of(TrainConfig, "train.")
    yield f"## `train`\n\nTraining, whatever the family.\n\n{markdown_table(common)}"
    for family in family_names():
        configs = family_configs(family)
        # A family's own keys, and the common ones for which it has another default.
        train = {name: key for name, key in keys_of(configs.train, "train.", skip=("drafter",)).items()
                 if name not in common or common[name].default != key.default}
        tables = markdown_table(keys_of(configs.drafter, "drafter.") | train)
        yield f"## `family: {family}`\n\n{tables}"


def _acceptance_heads() -> Iterator[str]:
    """The keys of `draftsmith specdec`, but for those of its target."""
    keys, meanings = keys_of(SpecdecArguments, skip=("target",)), field_docstrings(SpecdecArguments)
    top = {name: key for name, key in keys.items() if "." not in name}
    yield f"## `draftsmith specdec`\n\nAcceptance heads for a finished artifact.\n\n{markdown_table(top)}"
    for section in dict.fromkeys(name.partition(".")[0] for name in keys if "." in name):
        inside = {name: key for name, key in keys.items() if name.startswith(f"{section}.")}
        yield f"`{section}`: {meanings[section]}\n\n{markdown_table(inside)}"


if __name__ == "__main__":
    write_file(KEYS, reference())
