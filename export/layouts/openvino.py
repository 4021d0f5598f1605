"""Drafters as OpenVINO GenAI reads them: the folder of another format, converted by optimum-intel in an environment of
its own, whose versions this project does not share."""

import os
import shlex
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...modules import BlockDraft, DraftLM, Eagle3, PEagle, Target, UserError
from ...modules.families.block.layout import KINDS
from ..engine_process import run_job
from . import dflash
from .eagle import export_eagle
from .huggingface import export_huggingface
from .parts.checkpoint import WHOLE, Contents, output_bias
from .parts.compressed_tensors import OUTPUT
from .parts.export_format import ExportFormat, ExportSettings

_TARGET_LAYERS = 3  # Tapped layers that OpenVINO GenAI reads
PIPELINE = """OpenVINO GenAI decodes with both in Python, in this folder:

```python
import openvino_genai

draft = openvino_genai.draft_model(".", "CPU")
{scheduler}pipeline = openvino_genai.LLMPipeline("../target-openvino", "CPU", draft_model=draft{given})
print(pipeline.generate("What is a draft horse?", max_new_tokens=64, num_assistant_tokens={tokens}))
```"""
"""Lines that decode with it."""
UNCACHED = {"given": ", scheduler_config=scheduler", "scheduler": (
    "scheduler = openvino_genai.SchedulerConfig()\nscheduler.enable_prefix_caching = False\n")}
"""Parts of the lines for DFlash, with which the engine refuses to keep the states of equal prefixes."""


def export_openvino(drafter: DraftLM | Eagle3 | BlockDraft, target: Target, folder: Path,
                    settings: ExportSettings) -> Contents:
    """Write a draft language model, an EAGLE-3 drafter or DFlash as OpenVINO GenAI reads it, in float32. Raises
    UserError if no interpreter of an environment with optimum-intel is given, or the conversion fails."""
    if settings.convert_with is None:
        raise UserError("the format openvino is converted by optimum-intel in an environment of its own; give its "
                        "interpreter with --convert_with PYTHON")
    with tempfile.TemporaryDirectory() as scratch:
        source, layers = Path(scratch, "source"), None
        source.mkdir()
        if isinstance(drafter, Eagle3):
            export_eagle(drafter, target, source)
            if drafter.token_ids_Q is None:
                # The conversion takes the missing tokens of a whole vocabulary from unset memory: each is its own.
                tokens = {"d2t": torch.zeros(drafter.vocab_size, dtype=torch.long)}
                save_file(load_file(source / WHOLE) | tokens, source / WHOLE, metadata={"format": "pt"})
            layers = list(drafter.taps)
        elif isinstance(drafter, BlockDraft):
            # The engine has the target's output layer alone: over it a reduced vocabulary is the whole one.
            dflash.export_dflash(drafter, target, source)
            whole = {name: tensor for name, tensor in load_file(source / WHOLE).items()
                     if name not in (OUTPUT, "d2t", "t2d")}
            save_file(whole, source / WHOLE, metadata={"format": "pt"})
        else:
            export_huggingface(drafter, target, source)
        job = {"engine": "optimum-intel", "source": str(source), "out": str(folder), "layers": layers,
               "own_code": not isinstance(drafter, DraftLM)}
        run_job(job, settings.convert_with, Path(scratch), f"converting {source}")
    if isinstance(drafter, BlockDraft):
        title, given = "DFlash drafter", UNCACHED
    else:
        title, given = "A draft language model" if layers is None else "EAGLE-3 drafter", {"given": "", "scheduler": ""}
    return Contents(title=f"{title} for OpenVINO GenAI,",
                    example=PIPELINE.format(tokens=settings.drafts.chain(drafter), **given))


def _refusal(drafter: DraftLM | Eagle3 | BlockDraft, target: Target) -> str:
    """The refusal of a drafter that OpenVINO GenAI does not run; empty for any other."""
    if isinstance(drafter, DraftLM):
        return ""
    if isinstance(drafter, BlockDraft):
        kind = KINDS.get(drafter.config.correction)
        # It has no mask within a block, drops the first slot, and knows no correction.
        wrong = {"causal slots": drafter.config.causal, "aligned: next": drafter.config.aligned == "next",
                 f"window {drafter.window}": drafter.window is not None,
                 f"the correction {drafter.config.correction}":
                     kind is None or "OpenVINO GenAI" not in kind.engines}
        found = " and ".join(setting for setting, is_wrong in wrong.items() if is_wrong)
        return dflash.refusal(drafter, target) if not found else (
            "OpenVINO GenAI runs DFlash alone, with slots that see their whole block, aligned: same, no window and no "
            f"correction, this drafter has {found}; train another")
    config, width = drafter.config, drafter.block.hidden_size
    wrong = {"all guesses in one pass": isinstance(drafter, PEagle),
             f"{drafter.num_layers} layers": drafter.num_layers != 1,
             f"{len(drafter.taps)} tapped layers": len(drafter.taps) != _TARGET_LAYERS,
             f"the width {width} for states {drafter.hidden_size} wide": width != drafter.hidden_size,
             "fc_norm": config.fc_norm, "norm_before_fc": config.norm_before_fc, "norm_output": config.norm_output,
             "norm_before_residual": config.norm_before_residual, "qk_norm": drafter.block.qk_norm,
             f"window {drafter.window}": drafter.window is not None}
    found = " and ".join(setting for setting, is_wrong in wrong.items() if is_wrong)
    return output_bias(target) if not found else (
        f"OpenVINO GenAI runs EAGLE-3 with one layer, {_TARGET_LAYERS} tapped layers, the target's width, no "
        f"window and no further norms, this drafter has {found}; train another")


OPENVINO = ExportFormat[DraftLM | Eagle3 | BlockDraft](
    name="openvino", content="draft language models, EAGLE-3 drafters and DFlash drafters",
    readers={"OpenVINO GenAI": ""}, families=(DraftLM, Eagle3, BlockDraft), refusal=_refusal, write=export_openvino,
    option="convert_with",
    others=lambda drafter, places: {"optimum-intel, which converts the target": shlex.join([
        *("optimum-cli", "export", "openvino", "-m", places.merged if places.added else places.target),
        "--task", "text-generation-with-past",
        *("--weight-format", "fp32"), os.path.normpath(f"{places.folder}/../target-openvino")])})
