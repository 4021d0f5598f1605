"""Reference of all keys, `recipes/keys.md`, written from the dataclasses that hold them; `--help` reads it.

    python -m draftsmith.recipes.commands.key_reference
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ...modules.files.atomic_files import write_file
from ...modules.interfaces.drafter import DrafterConfig
from ...trainers import TrainConfig
from ...trainers.families import family_configs, family_names
from ..reading.key_page import COMMAND, FAMILY, HOME, PAGE, SHARED, TOP, WHOLE
from ..reading.parsing import Command
from ..reading.recipe_keys import Key, field_docstrings, keys_of, markdown_table
from ..recipe import Recipe
from . import (
    acceptance_head,
    answer_commands,
    artifact_commands,
    choose,
    compare_families,
    doctor,
    importing,
    memory_plan,
    pipeline,
    publishing,
)

HEADING = """# Keys of recipes and commands

Written by `python -m draftsmith.recipes.commands.key_reference`. How to use them: [the guide](README.md).
`draftsmith run --help` shows those that most runs set, each with an example."""
FILES = (pipeline, compare_families, acceptance_head, memory_plan, artifact_commands, choose, doctor, importing,
         publishing, answer_commands)


def reference() -> str:
    """All keys as Markdown: the common sections, training, what each family adds, and the keys of each command."""
    recipe, meanings = keys_of(Recipe, skip=("train",)), field_docstrings(Recipe)
    parts = [HEADING, f"## {TOP}\n\n{markdown_table(inside(recipe, ''))}"]
    parts += [f"## `{section}`\n\n{meanings[section]}\n\n{markdown_table(inside(recipe, section))}"
              for section in sections(recipe)]
    common = keys_of(TrainConfig, "train.", skip=("drafter",))
    shape = keys_of(DrafterConfig, "drafter.")
    parts += [f"## `drafter`\n\nShape of the drafter, whatever the family.\n\n{markdown_table(shape)}",
              f"## `train`\n\nTraining, whatever the family.\n\n{markdown_table(common)}"]
    for family in family_names():
        configs = family_configs(family)
        # A family's own keys, and the common ones that it changes.
        train = {name: key for name, key in keys_of(configs.train, "train.", skip=("drafter",)).items()
                 if common.get(name) != key}
        parts.append(f"## `{FAMILY}{family}`\n\n{markdown_table(keys_of(configs.drafter, 'drafter.') | train)}")
    parts += ["\n\n".join(_command(command, recipe, meanings)) for file in FILES for command in file.COMMANDS.values()]
    return "\n\n".join(parts) + "\n"


def _command(command: Command[Any], recipe: Mapping[str, Key], meant: Mapping[str, str]) -> Iterator[str]:
    """The paragraphs on a command: its work, the sections that it has as a recipe has them, and its own keys. `meant`
    is what a recipe's sections mean."""
    whole, meanings = command.trains, field_docstrings(command.arguments)
    keys = keys_of(command.arguments, skip=("train",) if whole else ())
    shared = [one for one in sections(keys) if inside(keys, one).keys() == inside(recipe, one).keys()]
    yield f"## `{COMMAND}{command.name}`\n\n{' '.join((command.run.__doc__ or '').split())}"
    if whole or shared:
        yield WHOLE if whole else f"{SHARED}{', '.join(f'`{one}`' for one in shared)}."
    if command.home is not None:
        yield f"{HOME}`{command.home}`."
    yield from (f"`{one}`: {meanings[one]}" for one in sections(keys) if meanings[one] != meant.get(one))
    as_there = recipe if whole else {name: key for one in shared for name, key in inside(recipe, one).items()}
    if own := {name: key for name, key in keys.items() if as_there.get(name) != key}:
        yield markdown_table(own)


def sections(keys: Mapping[str, Key]) -> list[str]:
    """The sections of keys, in order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in keys if "." in name))


def inside(keys: Mapping[str, Key], section: str) -> dict[str, Key]:
    """The keys of a section; "" for those without one."""
    return {name: key for name, key in keys.items() if name.rpartition(".")[0].partition(".")[0] == section}


if __name__ == "__main__":
    write_file(PAGE, reference())
