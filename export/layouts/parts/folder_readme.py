"""README.md of an exported folder: what it holds, the commands that serve it, and the formats that hold the same."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ....modules import DRAFTERS
from ....modules.target.loading.loading import DEFAULT_NAME, is_local
from ....modules.target.loading.tiny_model import TINY_NAME
from ...acceptance_profile import acceptance_lines
from ...artifact import Artifact, portable
from ...page import Block, Heading, Text, as_markdown
from .export_format import ON_CPU, WRONG_SAMPLES, ExportFormat, Places
from .layout_folder import Contents, table_text

REMOTE = "transformers_modules."  # Start of the names of modules that transformers has read next to a model


def folder_readme(chosen: ExportFormat[Any], artifact: Artifact, contents: Contents,
                  fitting: Sequence[ExportFormat[Any]]) -> str:
    """README.md of an export.

    Args:
        chosen: its format.
        artifact: what was exported.
        contents: what the writer says of the folder.
        fitting: the formats that hold this drafter.
    """
    name, drafter = artifact.identity.name, artifact.drafter
    page: list[Block] = [Heading(f"{contents.title} for {portable(name)}", 1),
                         *(Text(said) for said in (contents.note, chosen.warning(drafter)) if said)]
    places = Places(target=hub_name(name) or Places.target, on_hub=hub_name(name) is not None)
    # A folder with the adapted target and drafts in one is none that `commands` is about.
    commands = chosen.commands(drafter, places) if artifact.adapter is None or chosen.write is None else {}
    if commands:
        page.append(Heading("Serve it"))
        # An export keeps no path of this machine.
        given = f"/path/to/{portable(name)}" if is_local(name) else None
        if hub_name(name) is None and (writing := target_command(artifact, commands, places, "../artifact", given)):
            where = f"; replace `{given}` by the path of its folder or file" if given else ""
            page += [Text(f"`{places.target}` is the target as a folder, which this command writes from the artifact"
                          f"{where}:"), Text(f"```bash\n{writing}\n```")]
        for engine, command in commands.items():
            page += [Text(f"{engine}, in this folder:"), Text(f"```bash\n{command}\n```")]
            page += [Text(WRONG_SAMPLES)] if engine == ON_CPU and chosen.write is not None else []
    page += [Text(contents.example)] if contents.example else []
    others = tuple(f"`--format {one.name}`: {one.read_by(drafter)}" for one in fitting if one.name != chosen.name)
    if others and chosen.write is not None:
        page += [Heading("Other formats of this drafter"), Text("", items=others)]
    if contents.table is not None:
        page += [Heading(f"Tensors of {chosen.file}"), Text(table_text(contents.table))]
    if chosen.write_target is None:
        page += map(Text, acceptance_lines(artifact.acceptance))
    return as_markdown(page)


def hub_name(name: str) -> str | None:
    """The name of a target on the Hub; None where its folder is written by the format `target`. The embedded one is not
    the Hub's of that name, whose weights are not rounded."""
    return None if is_local(name) or name in (DEFAULT_NAME, TINY_NAME) else name


def target_command(artifact: Artifact, commands: Mapping[str, str], places: Places, folder: str,
                   name: str | None) -> str:
    """The command that writes the target's folder, which one of `commands` reads; empty where none does. `folder` is
    the artifact's, `name` the target's path, None where the artifact names it."""
    if all(places.target not in shlex.split(command) for command in commands.values()):
        return ""
    words = ["--artifact", folder, *([] if name is None else ["--target.name", name]), "--format", "target",
             "--out", places.target]
    # Code of others runs only where the command line says so.
    if all(artifact.drafter.family != one.family for one in DRAFTERS):
        words += ["--trust", "true"]
    if any(type(one).__module__.startswith(REMOTE) for one in (artifact.target.model, artifact.target.tokenizer)):
        words += ["--target.trust_remote_code", "true"]
    return shlex.join(["draftsmith", "export", *words])
