"""Registry of the checkpoint layouts that an artifact can be exported to; their writing and reading, and README.md of
an exported folder."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError

from ...modules import DRAFTERS, Drafter, Target, UserError
from ...modules.files.atomic_files import write_file
from ...modules.files.folders import whole_folder
from ...modules.target.loading.loading import is_local
from ..artifact import Artifact, portable
from ..measured_files import acceptance_lines, profile
from ..page import Block, Heading, Text, as_markdown
from ..stored_drafter import ACCEPTANCE, as_json, require_described
from .dflash import DFLASH
from .eagle import EAGLE, EAGLE4, EAGLE_SGLANG
from .huggingface import HUGGINGFACE
from .llama_cpp import GGUF
from .medusa import MEDUSA_VLLM
from .official_code import HYDRA, KANGAROO, PPD
from .openvino import OPENVINO
from .parts import export_format
from .parts.checkpoint import EXPORT, ORIGIN, Checkpoint, Contents, loaded, table_text
from .parts.export_format import PLAIN, READ, ExportFormat, ExportSettings, ImportSettings, Places, Reader
from .parts.gguf_file import FLOAT32
from .speculators import SPECULATORS
from .target_folder import MEDUSA, MERGED, MTP, TARGET

EXPORT_FORMATS: tuple[ExportFormat[Any], ...] = (DFLASH, EAGLE, EAGLE_SGLANG, EAGLE4, HUGGINGFACE, SPECULATORS, GGUF,
                                                 OPENVINO, HYDRA, KANGAROO, MERGED, MEDUSA, MEDUSA_VLLM, MTP, PPD,
                                                 TARGET)
"""All layouts, in the order of the tables."""
EVERY_FORMAT: tuple[str, ...] = tuple(sorted(one.name for one in EXPORT_FORMATS))  # Their names
IMPORTED: tuple[str, ...] = tuple(sorted(one.name for one in EXPORT_FORMATS if one.read))  # Of those that are read
REMOTE = "transformers_modules."  # Start of the names of modules that transformers has read next to a model


def format_named(name: str, known: tuple[str, ...] = EVERY_FORMAT) -> ExportFormat[Any]:
    """A layout by its name, which is one of these. Raises UserError for another one."""
    if name not in known:
        raise UserError(f"the format {name!r} is none of {', '.join(known)}; choose one of these")
    return next(one for one in EXPORT_FORMATS if one.name == name)


def import_drafter(format_name: str, folder: Path | Checkpoint, target: Target, settings: ImportSettings = READ
                   ) -> Drafter[Any]:
    """The drafter of a published checkpoint, given or in a folder, bound to `target`. Raises UserError if a file, a
    tensor or a key is missing or damaged, the checkpoint is of another target or has settings that are not implemented,
    or leaves a value open that `settings` do not give."""
    chosen = format_named(format_name, IMPORTED)
    given = folder if isinstance(folder, Checkpoint) else Checkpoint(folder, chosen.file, chosen.config_file,
                                                                     bare=chosen.bare)
    try:
        given.require(chosen.known, target)
        drafter, tensors = cast("Reader[Any]", chosen.read)(given, target, settings)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError,
            ValueError) as error:
        reason = "lacks " if isinstance(error, KeyError) else "is damaged: "
        raise UserError(f"{given.config} {reason}{' '.join(str(error).split())}; copy it again") from error
    found: Drafter[Any] = loaded(drafter, tensors, target, given.folder)
    return found


def formats_of(artifact: Artifact) -> list[ExportFormat[Any]]:
    """The layouts that hold the artifact's drafter with its settings, by the layouts' own checks."""
    drafter = artifact.drafter
    if artifact.adapter is not None or drafter.export_refusal is not None:
        return []
    return [one for one in EXPORT_FORMATS if one.write is not None and isinstance(drafter, one.families)
            and not one.refusal(drafter, artifact.target)]


def export_artifact(artifact: Artifact, target: Target, format_name: str, out: Path,
                    settings: ExportSettings = PLAIN) -> Path:
    """Write an artifact for its target in the layout of another project to `out` (new, empty, or an earlier export);
    returns it. Raises UserError if the format is unknown or cannot hold the drafter, or `out` cannot be written."""
    chosen = format_named(format_name)
    if not artifact.acceptance:
        artifact = replace(artifact, acceptance=profile(
            {"family": artifact.drafter.family, "target": portable(artifact.identity.name),
             "weights_sha256": artifact.weights_sha256}, ()))
    write = writer_of(chosen, artifact, target, settings)
    with whole_folder(out, EXPORT) as scratch:
        contents = write(scratch)
        # A readable copy of what `push` compares: the marker of the folder stays on this machine.
        write_file(scratch / ORIGIN, as_json(portable({
            "format": chosen.name, "family": artifact.drafter.family, "weights_sha256": artifact.weights_sha256,
            "target": artifact.identity.fields()})))
        if chosen.write_target is None:
            write_file(scratch / ACCEPTANCE, as_json(artifact.acceptance))
        write_file(scratch / "README.md", folder_readme(chosen, artifact, contents, formats_of(artifact), settings))
    return out


def writer_of(chosen: ExportFormat[Any], artifact: Artifact, target: Target,
              settings: ExportSettings) -> Callable[[Path], Contents]:
    """The part of a format that writes this artifact. Raises UserError where it cannot, for sketches of both too."""
    drafter, fitting = artifact.drafter, ", ".join(one.name for one in formats_of(artifact))
    part = chosen.write_target if artifact.adapter is None else chosen.write_adapted
    if part is not None:
        return lambda folder: part(artifact, folder, settings)
    if artifact.adapter is not None:
        able = ", ".join(one.name for one in EXPORT_FORMATS if one.write_adapted is not None)
        raise UserError(f"this artifact changes its target, which the format {chosen.name!r} cannot hold; choose one "
                        f"of {able}")
    # A family that no engine runs says why; the refusal of a format would send it to one of its own.
    if drafter.export_refusal is not None:
        raise UserError(drafter.export_refusal)
    write = chosen.write
    if write is None:
        raise UserError(f"the format {chosen.name} holds the target of an artifact that changes it, and this one does "
                        f"not; choose --format {fitting or 'target'}")
    require_number_format(chosen, settings.weights)
    # A class of another package may derive from one of these, and is then written as its base.
    if not isinstance(drafter, chosen.families):
        raise UserError(f"the format {chosen.name} holds {chosen.content}, this artifact is {drafter.family}; "
                        + (f"choose --format {fitting}" if fitting else "decode it with draftsmith"))
    if reason := chosen.refusal(drafter, target):
        raise UserError(f"{reason}, or choose --format {fitting}" if fitting else reason)

    def checked(folder: Path) -> Contents:
        require_described(drafter, artifact.identity)
        return write(drafter, target, folder, settings)

    return checked


def require_number_format(chosen: ExportFormat[Any], weights: str) -> None:
    """Refuse a number format that no engine reads in this layout. Raises UserError."""
    if weights == FLOAT32 or weights in chosen.weights:
        return
    if not chosen.weights:
        raise UserError(f"the format {chosen.name} holds its weights as they were trained, got weights {weights!r}; "
                        f"leave it out, or choose --format {', '.join(in_fewer_bits())}")
    raise UserError(f"weights must be one of {', '.join(chosen.weights)} in the format {chosen.name}, got {weights!r}")


def in_fewer_bits() -> list[str]:
    """Names of the layouts whose matrices may have fewer bits than as trained."""
    return [one.name for one in EXPORT_FORMATS if one.weights]


# README.md ------------------------------------------------------------------------------------------------------------


def folder_readme(chosen: ExportFormat[Any], artifact: Artifact, contents: Contents,
                  fitting: Sequence[ExportFormat[Any]], settings: ExportSettings) -> str:
    """README.md of an export: what it holds by its writer, the commands that serve it, other `fitting` formats."""
    name, drafter = artifact.identity.name, artifact.drafter
    page: list[Block] = [Heading(f"{contents.title} for {portable(name)}", 1),
                         *(Text(said) for said in (contents.note, chosen.warning(drafter)) if said)]
    hub = export_format.hub_name(name)
    places = Places(target=hub or Places.target, on_hub=hub is not None, drafts=settings.drafts).adapted(
        artifact.target, "../adapter")
    # A folder with the adapted target and drafts in one is none that `commands` is about.
    commands = chosen.commands(drafter, places) if artifact.adapter is None or chosen.write is None else {}
    if commands:
        page += [Heading("Serve it"), *([] if chosen.write is None else [Text(settings.drafts.said)])]
        # An export keeps no path of this machine.
        given = f"/path/to/{portable(name)}" if is_local(name) else None
        if writing := target_command(artifact, commands, places, "../artifact", given):
            where = "; replace `../artifact` where the artifact lies elsewhere" + (
                f", and `{given}` by the path of its folder or file" if given else "")
            page += [Text(f"`{places.merged}` is the target as a folder, which this command writes from the artifact"
                          f"{where}:"), Text(f"```bash\n{writing}\n```")]
        for engine, command in commands.items():
            page += [Text(f"{engine}, in this folder:"), Text(f"```bash\n{command}\n```")]
            if engine == export_format.ON_CPU and chosen.write is not None:
                page.append(Text(export_format.WRONG_SAMPLES))
        page += map(Text, places.said(commands) if chosen.write is not None else ())
    page += [Text(contents.example)] if contents.example else []
    others = tuple(f"`--format {one.name}`: {one.read_by(drafter)}" for one in fitting if one.name != chosen.name)
    if others and chosen.write is not None:
        page += [Heading("Other formats of this drafter"), Text("", items=others)]
    if contents.table is not None:
        page += [Heading(f"Tensors of {chosen.file}"), Text(table_text(contents.table))]
    if chosen.write_target is None:
        page += map(Text, acceptance_lines(artifact.acceptance))
    return as_markdown(page)


def target_command(artifact: Artifact, commands: Mapping[str, str], places: Places, folder: str,
                   name: str | None) -> str:
    """The command that writes the target's folder, which one of `commands` reads; empty where none does. `folder` is
    the artifact's, `name` the target's path, None where the artifact names it."""
    # Text Generation Inference finds it by the drafter's config.json.
    if all(places.merged not in shlex.split(command) for command in commands.values()) and not (
            places.adapter and "Text Generation Inference" in commands):
        return ""
    words = ["--artifact", folder, *([] if name is None else ["--target.name", name]),
             *(["--target.adapter", places.adapter] if places.adapter else []), "--format", "target",
             "--out", places.merged]
    # Code of others runs only where the command line says so.
    if all(artifact.drafter.family != one.family for one in DRAFTERS):
        words += ["--trust", "true"]
    if any(type(one).__module__.startswith(REMOTE) for one in (artifact.target.model, artifact.target.tokenizer)):
        words += ["--target.trust_remote_code", "true"]
    return shlex.join(["draftsmith", "export", *words])
