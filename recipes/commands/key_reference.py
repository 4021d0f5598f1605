"""Reference of all recipe keys, `recipes/keys.md`, written from the dataclasses that hold them.

    python -m draftsmith.recipes.commands.key_reference
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    parts = [HEADING, *_tables(Recipe, ("train",), "## Top level", "## `{section}`\n\n{meaning}")]
    common = keys_of(TrainConfig, "train.")
    parts.append(f"## `train`\n\nTraining, whatever the family.\n\n{markdown_table(common)}")
    for family in family_names():
        configs = family_configs(family)
        # A family's own keys, and the common ones for which it has another default.
        train = {name: key for name, key in keys_of(configs.train, "train.", skip=("drafter",)).items()
                 if name not in common or common[name].default != key.default}
        tables = markdown_table(keys_of(configs.drafter, "drafter.") | train)
        parts.append(f"## `family: {family}`\n\n{tables}")
    # Its target has the keys of a recipe's.
    parts += _tables(SpecdecArguments, ("target",),
                     "## `draftsmith specdec`\n\nAcceptance heads for a finished artifact.", "`{section}`: {meaning}")
    return "\n\n".join(parts) + "\n"


def _tables(arguments: type[Any], skip: tuple[str, ...], top: str, heading: str) -> Iterator[str]:
    """A table for a command's keys at the top and one for each of its sections.

    Args:
        arguments: dataclass of the command.
        skip: sections that are left out.
        top: heading of the keys at the top.
        heading: of a section, with the places `section` and `meaning`.
    """
    known, meanings = keys_of(arguments, skip=skip), field_docstrings(arguments)
    # No recipe can hold a key that lets code run.
    keys = {name: key for name, key in known.items() if name not in LINE_ONLY}
    yield f"{top}\n\n{markdown_table({name: key for name, key in keys.items() if '.' not in name})}"
    for section in dict.fromkeys(name.partition(".")[0] for name in keys if "." in name):
        inside = {name: key for name, key in keys.items() if name.startswith(f"{section}.")}
        yield f"{heading.format(section=section, meaning=meanings[section])}\n\n{markdown_table(inside)}"


if __name__ == "__main__":
    write_file(KEYS, reference())
