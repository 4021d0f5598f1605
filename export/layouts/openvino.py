"""Drafters as OpenVINO GenAI reads them: the folder of another format, converted by optimum-intel in an environment of
its own, whose versions this project does not share.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...modules import DraftLM, Eagle3, Target, UserError
from ...modules.files.atomic_files import write_file
from ...modules.files.owned_folders import whole_folder
from ..engine_process import EngineProcess
from .eagle import EAGLE_FILE, export_eagle
from .huggingface import export_huggingface
from .openvino_conversion import SCRIPT
from .parts.export_format import ExportFormat, ExportSettings
from .parts.layout_folder import EXPORT, layout_readme

_TARGET_LAYERS = 3
"""Tapped layers that OpenVINO GenAI reads."""


def export_openvino(drafter: DraftLM | Eagle3, target: Target, out: Path, settings: ExportSettings) -> None:
    """Write a draft language model or an EAGLE-3 drafter as OpenVINO GenAI reads it, in float32.

    Args:
        drafter: bound to `target`.
        target: the model it drafts for.
        out: new, empty, or an earlier export.
        settings: interpreter of an environment with optimum-intel.

    Raises:
        UserError: if OpenVINO GenAI does not run the drafter, no interpreter is given, the conversion fails, or `out`
            cannot be written.
    """
    if isinstance(drafter, Eagle3):
        _require_known(drafter)
    if settings.convert_with is None:
        raise UserError("the format openvino is converted by optimum-intel in an environment of its own; give its "
                        "interpreter with --convert_with PYTHON")
    with tempfile.TemporaryDirectory() as scratch, whole_folder(out, EXPORT) as partial:
        source, layers = Path(scratch, "source"), None
        if isinstance(drafter, Eagle3):
            export_eagle(drafter, target, source)
            if drafter.token_ids_Q is None:
                # The conversion takes the missing tokens of a whole vocabulary from unset memory: each is its own.
                tokens = {"d2t": torch.zeros(drafter.vocab_size, dtype=torch.long)}
                save_file(load_file(source / EAGLE_FILE) | tokens, source / EAGLE_FILE, metadata={"format": "pt"})
            layers = list(drafter.taps)
        else:
            export_huggingface(drafter, target, source)
        process = EngineProcess(engine="optimum-intel", python=settings.convert_with, script=SCRIPT,
                                folder=Path(scratch))
        process.run({"source": str(source), "out": str(partial), "layers": layers}, f"converting {source}")
        write_file(partial / "README.md", _readme(drafter, target))


def _require_known(drafter: Eagle3) -> None:
    config, width = drafter.config, drafter.block.hidden_size
    wrong = {f"{drafter.num_layers} layers": drafter.num_layers != 1,
             f"{len(drafter.taps)} tapped layers": len(drafter.taps) != _TARGET_LAYERS,
             f"the width {width} for states {drafter.hidden_size} wide": width != drafter.hidden_size,
             "fc_norm": config.fc_norm, "norm_before_fc": config.norm_before_fc, "norm_output": config.norm_output,
             "norm_before_residual": config.norm_before_residual}
    if found := [setting for setting, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"OpenVINO GenAI runs EAGLE-3 with one layer, {_TARGET_LAYERS} tapped layers, the target's "
                        f"width and no further norms, this drafter has {' and '.join(found)}; export it with --format "
                        "eagle, or train another")


def _readme(drafter: DraftLM | Eagle3, target: Target) -> str:
    title = "EAGLE-3 drafter" if isinstance(drafter, Eagle3) else "A draft language model"
    paragraphs = ["The target is converted by `optimum-cli export openvino -m TARGET --task text-generation-with-past "
                  "TARGET_FOLDER`. Then:",
                  "```python\nimport openvino_genai as genai\n\n"
                  'draft = genai.draft_model("THIS_FOLDER", "CPU")\n'
                  'pipeline = genai.LLMPipeline("TARGET_FOLDER", "CPU", draft_model=draft)\n'
                  'print(pipeline.generate("A question", max_new_tokens=100, num_assistant_tokens=3))\n```']
    if isinstance(drafter, Eagle3):
        paragraphs.append(f"The layers that it reads, {list(drafter.taps)}, counted from 0 by their outputs, are in "
                          "the model (`hidden_layers_list`).")
    return layout_readme(f"{title} for OpenVINO GenAI,", target, *paragraphs)


OPENVINO = ExportFormat[DraftLM | Eagle3](
    name="openvino", content="draft language models and EAGLE-3 drafters", families=(DraftLM, Eagle3),
    write=export_openvino, option="convert_with",
)
