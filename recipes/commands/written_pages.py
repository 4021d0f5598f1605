"""The pages that the code writes, by `python -m draftsmith.recipes.commands.written_pages README.md`: the README's
table of methods; and the reference of all keys, `recipes/keys.md`, from the dataclasses that hold them, which `--help`
reads."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...export.layouts.registry import EXPORT_FORMATS
from ...export.page import Table, as_markdown
from ...modules import BASELINES, DRAFTERS, Eagle2Tree, UserError
from ...modules.files.atomic_files import write_file
from ...modules.interfaces.drafter import DrafterConfig, FamilyCard
from ...trainers import TrainConfig
from ...trainers.families import VARIANTS, family_configs, family_module, family_names
from ..reading.command_line import Command
from ..reading.keys import (
    COMMAND,
    FAMILY,
    HOME,
    PAGE,
    SHARED,
    TOP,
    WHOLE,
    Key,
    field_docstrings,
    inside,
    keys_of,
    markdown_table,
    sections,
)
from ..recipe import Recipe
from . import (
    acceptance_head,
    answer_commands,
    artifact_commands,
    choose,
    compare_families,
    doctor,
    exchange,
    layers,
    memory_plan,
    pipeline,
    trim,
)

HEADING = """# Keys of recipes and commands

Written by `python -m draftsmith.recipes.commands.written_pages`. How to use them: [the guide](README.md).
`draftsmith run --help` shows those that most runs set, each with an example."""
FILES = (pipeline, compare_families, acceptance_head, trim, memory_plan, artifact_commands, choose, layers, doctor,
         exchange, answer_commands)
MARKERS = ("<!-- families -->", "<!-- /families -->")  # Lines of the README before and after the table


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


def cards() -> list[tuple[FamilyCard, tuple[str, ...]]]:
    """Cards of all drafter families, training variants and tree policies, and of drafting without training, each with
    the export formats that can hold it."""
    families = [(family.card, tuple(one.name for one in EXPORT_FORMATS if family in one.families))
                for family in DRAFTERS]
    # A variant that changes its target is exported with it.
    adapted = tuple(one.name for one in EXPORT_FORMATS if one.write_adapted is not None)
    variants = [(module.card, adapted if module.changes_target else ())
                for module in map(family_module, VARIANTS) if module.card is not None]
    training_free = FamilyCard(
        name="without training", guesses=", ".join(f"`{name}`" for name in BASELINES), needs_export=False,
        cost="no training; baselines of every evaluation, or next to a draft: `--policy static+lookup`",
    )
    return [*families, *variants, (Eagle2Tree.card, ()), (training_free, ())]


def with_table(text: str) -> str:
    """A README with the generated table between its markers. Raises UserError if a marker is missing."""
    rows = []
    for card, exports in cards():
        papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in card.papers)
        # An empty cell would leave open whether an artifact exists that no engine reads.
        nothing = "no serving engine" if card.needs_export else "nothing to export"
        rows.append((card.name, card.guesses + (f" ({papers})" if papers else ""), card.cost,
                     ", ".join(f"`{name}`" for name in exports) or nothing))
    table = as_markdown([Table(("method", "how it guesses", "cost", "exports to"), rows, "words")])
    return filled(text, MARKERS, table.rstrip())


def filled(text: str, markers: tuple[str, str], content: str) -> str:
    """A README with generated content between two lines. Raises UserError if one is missing."""
    before, first, rest = text.partition(markers[0])
    _, last, after = rest.partition(markers[1])
    if not (first and last):
        raise UserError(f"generated tables need the lines {markers[0]} and {markers[1]}; add them")
    return f"{before}{first}\n{content}\n{last}{after}"


if __name__ == "__main__":
    write_file(PAGE, reference())
    for file in map(Path, sys.argv[1:]):
        write_file(file, with_table(file.read_text(encoding="utf-8")))
