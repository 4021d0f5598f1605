"""Published drafts in an evaluation: a checkpoint in a folder or on the Hub, imported for it and kept nowhere."""

import re
from pathlib import Path
from typing import Any

from ...data.prompts.named_sets import hub_folder
from ...export import Artifact, import_drafter
from ...export.engine_settings import DraftSettings
from ...export.layouts.parts.checkpoint import ORIGIN, Checkpoint
from ...export.layouts.registry import IMPORTED, format_named
from ...export.stored_drafter import CARD, CONFIG
from ...modules import Target, Topology, UserError
from ...modules.files.json_records import read_object

HUB = "hub:"  # Start of the name of a draft on the Hub: hub:OWNER/NAME or hub:OWNER/NAME@REVISION


def draft_folder(place: Path) -> tuple[Path, bool]:
    """(folder of a draft, which is downloaded from the Hub unless the cache has it; whether it is a checkpoint in
    another layout than an artifact's). Raises UserError."""
    if (name := str(place)).startswith(HUB):
        source, _, revision = name.removeprefix(HUB).partition("@")
        return hub_folder(source, ["*.safetensors", "*.json", CARD], revision or None, kind="model"), True
    config = read_object(place / CONFIG, "copy it again") if (place / CONFIG).is_file() else {}
    return place, any(place.glob("*.safetensors")) and config.get("format") != "draftsmith"


def imported(folder: Path, name: str, target: Target) -> Artifact:
    """The drafter of a checkpoint with a chain of as many tokens as engines draft. Raises UserError if it is in no
    known layout, or of another target."""
    said = " ".join(file.read_text("utf-8", "replace").lower() for one in (CONFIG, ORIGIN)
                    if (file := folder / one).is_file())
    # Configurations name their layout in one way or another, those of speculators another one too; those of plain
    # language models name none.
    order = sorted((one for one in IMPORTED if not format_named(one).in_target),
                   key=lambda one: (one not in said, one not in ("speculators", "huggingface")))
    refusals = list[str]()
    for layout in map(format_named, order):
        try:
            checkpoint = Checkpoint(folder, layout.file, layout.config_file, bare=layout.bare)
            drafter = import_drafter(layout.name, checkpoint, target).to(dtype=target.dtype)
        except UserError as error:
            refusals.append(str(error))
            continue
        drafter.bind(target)
        chain = Topology.chain(DraftSettings().chain(drafter))
        return Artifact(drafter=drafter.eval(), target=target, topology=chain, identity=target.identity,
                        provenance={"imported": checkpoint.origin(layout.name)})
    raise UserError(f"{name} is no checkpoint in the layout {order[0]} or another one: {refusals[0]}; draftsmith "
                    "import takes values that a checkpoint leaves open")


def facts(artifact: Artifact, folder: Path, name: str) -> dict[str, Any]:
    """Facts next to the figures of a draft that is compared, for the header of an evaluation."""
    # The fields before a card's text; an artifact's own card has none.
    card = (folder / CARD).read_text("utf-8", "replace") if (folder / CARD).is_file() else ""
    field = re.match(r"---\n(?:(?!---\n).*\n)*?license:(.*\n(?:[ \t]*- .*\n)*)", card)
    # One name or several, in quotes or without: not by YAML, since another field may be none.
    licence = ", ".join(re.findall(r"[\w.+][\w.+-]*", field[1].partition(" #")[0])) if field else ""
    return {"name": name, "parameters": sum(one.numel() for one in artifact.drafter.state_dict().values()),
            "licence": licence or "not stated", **artifact.provenance.get("imported", {})}
