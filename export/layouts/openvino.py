"""Drafters as OpenVINO GenAI reads them: the folder of another format, converted by optimum-intel in an environment of
its own, whose versions this project does not share.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...modules import Drafter, DraftLM, Eagle3, Target, UserError
from ...modules.files.atomic_files import write_file
from ...modules.files.owned_folders import whole_folder
from ..engine_process import EngineProcess
from .eagle import EAGLE_FILE, export_eagle
from .huggingface import export_huggingface
from .layout_folder import EXPORT, layout_readme, wrong_family
from .openvino_conversion import SCRIPT

OPENVINO_FORMAT = "openvino"
"""Name of the layout."""
_TARGET_LAYERS = 3
"""Tapped layers that OpenVINO GenAI reads."""


def export_openvino(drafter: Drafter, target: Target, out: Path, python: Path | None) -> None:
    """Write a draft language model or an EAGLE-3 drafter as OpenVINO GenAI reads it, in float32.

    Args:
        drafter: bound to `target`.
        target: the model it drafts for.
        out: new, empty, or an earlier export.
        python: interpreter of an environment with optimum-intel.

    Raises:
        UserError: if the drafter is of another family or OpenVINO GenAI does not run it, no interpreter is given, the
            conversion fails, or `out` cannot be written.
    """
    if not isinstance(drafter, DraftLM | Eagle3):
        raise wrong_family(OPENVINO_FORMAT, "draft language models and EAGLE-3 drafters", drafter)
    if isinstance(drafter, Eagle3):
        _require_known(drafter)
    if python is None:
        raise UserError(f"the format {OPENVINO_FORMAT} is converted by optimum-intel in an environment of its own; "
                        "give its interpreter with --convert_with PYTHON")
    with tempfile.TemporaryDirectory() as scratch, whole_folder(out, EXPORT) as partial:
        source, layers = Path(scratch, "source"), None
        if isinstance(drafter, Eagle3):
            export_eagle(drafter, target, source)
            _name_tokens(source / EAGLE_FILE, drafter)
            layers = list(drafter.taps)
        else:
            export_huggingface(drafter, target, source)
        process = EngineProcess(engine="optimum-intel", python=python, script=SCRIPT, folder=Path(scratch))
        process.run({"source": str(source), "out": str(partial), "layers": layers}, f"converting {source}")
        write_file(partial / "README.md", _readme(drafter, target))


def _name_tokens(file: Path, drafter: Eagle3) -> None:
    """Add the tokens of a whole vocabulary, each its own: the conversion takes missing ones from unset memory."""
    if drafter.token_ids_Q is None:
        own = {"d2t": torch.zeros(drafter.vocab_size, dtype=torch.long)}
        save_file(load_file(file) | own, file, metadata={"format": "pt"})


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
